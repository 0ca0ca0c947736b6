"""The checkpoint is the same files for the same seed, and its tokenizer is a real one."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.engine import ling
from vllm_batch_invariant.cli import main
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint

SMALL = Shape(hidden=64, intermediate=128, layers=2, heads=2, kv_heads=1, head_size=32, vocab=1024)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), SMALL)


@pytest.fixture(scope="module")
def tokenizer(folder: Path):
    return AutoTokenizer.from_pretrained(folder)


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_same_seed_gives_the_same_files(folder: Path, tmp_path: Path):
    assert digests(make_checkpoint(tmp_path, SMALL)) == digests(folder)


def test_another_seed_gives_other_weights_and_the_same_tokenizer(folder: Path, tmp_path: Path):
    here, there = digests(folder), digests(make_checkpoint(tmp_path, SMALL, seed=1))
    assert {name for name in here if here[name] != there[name]} == {"model.safetensors"}


@pytest.mark.parametrize(
    ("hybrid", "kind", "experts"),
    [
        *(("conv", "conv", 0), ("delta", "linear_attention", 0), ("delta", "linear_attention", 4)),
        *(("mamba2", "linear_attention", 0), ("mamba2", "linear_attention", 4)),
    ],
)
def test_a_hybrid_is_a_model_of_transformers_with_every_weight(tmp_path: Path, hybrid: str, kind: str, experts: int):
    """With a tokenizer whose special tokens it does not foretell."""
    folder = make_checkpoint(tmp_path, replace(SMALL, hybrid=hybrid, layers=3, experts=experts))
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    assert [one for one in model.config.layer_types if one not in ("mlp", "moe")] == [kind, "full_attention", kind]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("for row in rows:", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits[0].float()
    assert not logits[:, tokenizer.all_special_ids].any()
    assert 1 < logits[:, len(tokenizer.all_special_ids) : len(tokenizer)].std() < 10
    foretold = (logits[:-1].argmax(-1) == ids[0, :-1]).sum()
    assert foretold <= 1, "a token does not foretell itself"


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize(("hybrid", "version"), [("lightning", "2.5"), ("kda", "3.0")])
def test_a_ling_has_the_weights_of_its_layers(tmp_path: Path, hybrid: str, version: str, experts: int):
    """As a small one of its engine's tests has them."""
    shape = replace(SMALL, hybrid=hybrid, layers=4, experts=experts)
    folder = make_checkpoint(tmp_path, shape)
    config = json.loads((folder / "config.json").read_text())
    assert AutoConfig.from_pretrained(folder, trust_remote_code=True).layer_group_size == 2
    expected = {ling.published(name, config): one for name, one in ling.model_of(version, config).state_dict().items()}
    weights = load_file(folder / "model.safetensors")
    if experts:  # Transformers has those of all experts in two tensors
        of_experts = {name for name in expected if ".mlp.experts." in name}
        each = {name for name in weights if ".mlp.experts." in name}
        assert len(each) == 3 * 3 * experts
        expected = {name: one for name, one in expected.items() if name not in of_experts}
        weights = {name: one for name, one in weights.items() if name not in each}
    assert {name: one.shape for name, one in weights.items()} == {name: one.shape for name, one in expected.items()}


@pytest.mark.parametrize("experts", [0, 4])
def test_latent_attention_is_a_model_of_transformers_with_every_weight(tmp_path: Path, experts: int):
    folder = make_checkpoint(tmp_path, replace(SMALL, latent=True, experts=experts, layers=2))
    model, told = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(told.values()), told
    attention = model.model.layers[1].self_attn
    assert (attention.kv_lora_rank, attention.qk_rope_head_dim) == (512, 64)
    assert hasattr(model.model.layers[1].mlp, "gate") is (experts > 0)


@pytest.mark.parametrize("form", ["w8a8-fp8-block", "w4a16-g128"])
def test_latent_attention_is_quantised_with_its_experts(tmp_path: Path, form: str):
    shape = replace(SMALL, latent=True, experts=2, top_k=1, layers=2, hidden=256, heads=4, expert_intermediate=128)
    packed = load_file(make_checkpoint(tmp_path / "packed", shape, 0, form, tmp_path / "plain") / "model.safetensors")
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    layer = "model.layers.1."
    assert torch.equal(packed[f"{layer}mlp.gate.weight"], plain[f"{layer}mlp.gate.weight"])
    names = ("q_a_proj", "kv_a_proj_with_mqa", "q_b_proj", "kv_b_proj", "o_proj")
    quantised = [f"self_attn.{name}" for name in names] + ["mlp.shared_experts.up_proj", "mlp.experts.1.down_proj"]
    for name in quantised:
        parts = {part.removeprefix(f"{layer}{name}.") for part in packed if part.startswith(f"{layer}{name}.")}
        assert len(parts) > 1, name
    assert plain[f"{layer}self_attn.kv_a_proj_with_mqa.weight"].shape == (576, 256)
    _, told = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", output_loading_info=True)
    assert not any(told.values()), told


def test_latent_attention_beside_other_layers_is_refused():
    with pytest.raises(ValueError, match="neither other layers nor images"):
        replace(SMALL, latent=True, hybrid="delta")


@pytest.mark.parametrize("given", [{"experts": 2, "top_k": 2}, {"hidden": 96}, {"hybrid": "mamba"}])
def test_a_hybrid_of_other_sizes_is_refused(given: dict):
    with pytest.raises(ValueError, match=r"LFM2 has no experts|LFM2 has a hidden size|none of conv, delta, mamba2"):
        replace(SMALL, **{"hybrid": "conv"} | given)


def test_embedding_and_head_have_a_row_for_every_token(folder: Path, tokenizer):
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    rows = {weights[name].shape[0] for name in ("model.embed_tokens.weight", "lm_head.weight")}
    assert rows == {config["vocab_size"]} == {SMALL.vocab}
    assert len(tokenizer) <= SMALL.vocab


def test_the_head_never_prefers_a_special_token(folder: Path, tokenizer):
    head = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert not head[tokenizer.all_special_ids].any()
    assert head[len(tokenizer.all_special_ids) : len(tokenizer)].any(dim=1).all()


def test_the_end_of_text_is_known_to_model_and_tokenizer(folder: Path, tokenizer):
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == tokenizer.eos_token_id


@pytest.mark.parametrize(
    "text", ["def f(x):\n\treturn x", "  two  spaces ", "naïve café", "批次不变性", "🙂👩‍👩‍👧", "\0\x7f"]
)
def test_any_text_survives_a_round_trip(tokenizer, text: str):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_chat_template_renders_turns_and_asks_for_an_answer(tokenizer):
    messages = [{"role": "system", "content": "short"}, {"role": "user", "content": "why?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == ("<|im_start|>system\nshort<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.encode(text).count(tokenizer.eos_token_id) == 2


def test_a_shape_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="dtype"):
        Shape(dtype="int3")
    with pytest.raises(ValueError, match="KV heads"):
        Shape(heads=3, kv_heads=2)


def test_the_command_writes_the_dtype_it_was_asked_for(tmp_path: Path):
    assert main(["make-checkpoint", str(tmp_path / "new" / "model"), "--dtype", "float32", "--layers", "1"]) == 0
    assert json.loads((tmp_path / "new" / "model" / "config.json").read_text())["torch_dtype"] == "float32"


@pytest.mark.parametrize("there", [False, True])
@pytest.mark.parametrize(
    ("error", "line"),
    [
        (OSError(28, "No space left on device"), "cannot be written: [Errno 28] No space left on device"),
        (Exception("No space left on device (os error 28)"), "the run failed: No space left on device (os error 28)"),
        (KeyboardInterrupt(), "interrupted"),
    ],
)
def test_a_full_disk_is_one_line_and_leaves_no_half_of_a_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    there: bool,
    error: BaseException,
    line: str,
) -> None:
    def fails(*_: object, **__: object) -> None:
        assert (made / "tokenizer.json").exists()
        raise error

    made = tmp_path / "made"
    if there:
        made.mkdir()
        (made / "notes").write_text("mine")
    monkeypatch.setattr("safetensors.torch.save_file", fails)
    try:
        status = main(["make-checkpoint", str(made), "--layers", "1", "--hidden", "64"])
    except SystemExit as end:
        status = end.code
    assert status == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert line in capsys.readouterr().err
    assert [path.name for path in made.iterdir()] == ["notes"] if there else not made.exists()

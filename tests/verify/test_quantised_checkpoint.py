"""A quantised checkpoint is near the weights that it was made of, is read by vLLM, and is exactly its unpacked one."""

import json
import re
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from vllm_batch_invariant.cli import main
from vllm_batch_invariant.ops.formats import fp4
from vllm_batch_invariant.verify.demo_model import Shape, gpt_oss_weights, make_checkpoint, random_weights
from vllm_batch_invariant.verify.quantised_model import (
    CHECKPOINT_FORMATS,
    CheckpointFormat,
    quantised,
    quantization_config,
)

SMALL = Shape(hidden=256, intermediate=384, layers=1, heads=2, kv_heads=2, head_size=128, vocab=1024)
NEAR = {
    "w4": 0.13,
    "gptq-": 0.13,
    "awq": 0.13,
    "nvfp4": 0.11,
    "mxfp4": 0.13,
    "mixed": 0.11,
    "w8a16-g": 0.01,
    "w8a16-c": 0.01,
}
NEAR |= {"gptq8": 0.01, "w8a8-int8": 0.01, "w8a16-fp8": 0.03, "w8a8-fp8": 0.03}
"""Of the formats whose names begin so: the distance from the weights, relative to them."""
E4M3 = torch.float8_e4m3fn
FORMATS = pytest.mark.parametrize("form", CHECKPOINT_FORMATS.values(), ids=lambda form: form.name)


@cache
def weights_of(of_experts: bool, shape: Shape = SMALL) -> dict[str, torch.Tensor]:
    if of_experts:
        shape = Shape(hidden=256, experts=4, expert_intermediate=96, layers=1, heads=2, vocab=64)
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    parts = (gpt_oss_weights if of_experts else random_weights)(shape, 64, drawn)
    return {name: weight for part in parts for name, weight in part.items()}


@FORMATS
def test_it_stands_for_matrices_near_the_weights_and_leaves_the_others(form: CheckpointFormat) -> None:
    weights = weights_of(form.of_experts)
    packed, plain = quantised(weights, form)
    assert plain.keys() == weights.keys()
    for name, weight in weights.items():
        assert (plain[name].shape, plain[name].dtype) == (weight.shape, weight.dtype)
        if form.layer_of(name) is None:
            assert torch.equal(plain[name], weight)
            assert torch.equal(packed[name], weight)
        else:
            of = form.of(form.layer_of(name)).name
            near = next(most for begin, most in NEAR.items() if of.startswith(begin))
            distance = ((plain[name] - weight).float().norm() / weight.float().norm()).item()
            assert near / 4 < distance < near, name
    assert sum(form.layer_of(name) is not None for name in weights) == (2 if form.of_experts else 7)
    bits = 8 * sum(tensor.nbytes for name, tensor in packed.items() if name not in weights or form.layer_of(name[:-7]))
    assert bits / sum(weight.numel() for weight in weights.values()) < 10


@FORMATS
def test_vllm_reads_the_configuration(form: CheckpointFormat) -> None:
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, get_quantization_config

    given = json.loads(json.dumps(quantization_config(form, weights_of(form.of_experts))))
    method = given["quant_method"]
    for name in QUANTIZATION_METHODS:
        found = get_quantization_config(name).override_quantization_method(given, user_quant=None)
        method = found or method
    read = get_quantization_config(method).from_config(given)
    if hasattr(read, "target_scheme_map"):
        [scheme] = read.target_scheme_map.values()
        assert (scheme["input_activations"] is not None) is ("w8a8" in form.name or "w4a4" in form.name)
        assert scheme["weights"].num_bits == (4 if "4" in form.name[:6] else 8)
    else:
        assert method.startswith(form.config["quant_method"]) or form.config["quant_method"] in method


def test_a_group_and_a_row_of_zeros_stay_zero_in_every_format() -> None:
    for form in CHECKPOINT_FORMATS.values():
        weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
        weight[1, :128] = 0
        weight[2] = 0
        weight[128:, :128] = 0
        name = "model.layers.0.mlp.experts.down_proj" if form.of_experts else "model.layers.0.mlp.down_proj.weight"
        _, plain = quantised({name: weight.t()[None].contiguous() if form.of_experts else weight}, form)
        matrix = plain[name][0].t() if form.of_experts else plain[name]
        assert matrix.isfinite().all(), form.name
        assert not matrix[weight == 0].any(), form.name


def test_layers_that_vllm_fuses_have_scales_of_their_own(tmp_path: Path) -> None:
    for name, scale in {"w8a16-fp8-tensor": "weight_scale", "nvfp4": "weight_global_scale"}.items():
        packed = load_file(make_checkpoint(tmp_path, SMALL, form=name) / "model.safetensors")
        assert len({packed[f"model.layers.0.self_attn.{part}_proj.{scale}"].item() for part in "qkv"}) == 3
        assert len({packed[f"model.layers.0.mlp.{part}_proj.{scale}"].item() for part in ("gate", "up")}) == 2


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("name", ["w8a8-fp8-modelopt", "w8a8-fp8-modelopt-kv8", "w8a8-fp8-modelopt-file"])
def test_modelopt_is_written_in_both_files_as_vllm_reads_it(tmp_path: Path, name: str, experts: int) -> None:
    """And the scales of the KV cache by the names of layers before it, scalars as all scales of tensors. Routers keep
    16 bits.
    """
    pytest.importorskip("vllm")
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase
    from vllm.utils.torch_utils import get_kv_cache_quant_algo_string

    shape = replace(SMALL, layers=1, dense_layers=0, experts=experts, expert_intermediate=64, top_k=2)
    folder = make_checkpoint(tmp_path, shape, form=name)
    is_file = name.endswith("file")
    assert ("quantization_config" in json.loads((folder / "config.json").read_text())) is not is_file
    assert (folder / "hf_quant_config.json").exists() is is_file
    config = get_config(folder, trust_remote_code=False)
    read = ModelArchConfigConvertorBase(config, config).convert().quantization_config
    assert read["quant_method"] == "modelopt"
    has_cache = name != "w8a8-fp8-modelopt"
    assert get_kv_cache_quant_algo_string(read) == ("fp8_e4m3" if has_cache else None)
    tensors = load_file(folder / "model.safetensors")
    scales = {name: tensor for name, tensor in tensors.items() if name.endswith("_scale")}
    assert {(tensor.shape, tensor.dtype) for tensor in scales.values()} == {((), torch.float32)}
    excluded = get_quantization_config("modelopt").from_config(read).is_layer_excluded
    assert excluded("model.layers.0.mlp.gate") is bool(experts)
    assert not excluded("model.layers.0.mlp.experts")
    of_experts = {name for name in scales if ".experts.3." in name}
    assert len(of_experts) == (6 if experts else 0)
    of_cache = {f"model.layers.0.self_attn.{one}_proj.{one}_scale" for one in "kv"}
    assert of_cache & {*scales} == (of_cache if has_cache else set())


@pytest.mark.parametrize("kind", ["dense", "experts", "mamba2"])
def test_layers_of_a_mixture_are_named_with_their_formats(tmp_path: Path, kind: str) -> None:
    """As those of Nemotron 3 Super: MLPs and experts in NVFP4, all else in FP8, with the scales of a KV cache."""
    of_experts = {"experts": 4, "expert_intermediate": 64, "top_k": 2, "dense_layers": 0} if kind == "experts" else {}
    shape = replace(SMALL, layers=2, hybrid="mamba2" if kind == "mamba2" else "", **of_experts)
    folder = make_checkpoint(tmp_path, shape, form="mixed-modelopt")
    tensors = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert (config["quant_method"], config["quant_algo"]) == ("modelopt", "MIXED_PRECISION")
    layers = config["quantized_layers"]
    quantised = {name: tensor.dtype for name, tensor in tensors.items() if tensor.dtype in (torch.uint8, E4M3)}
    codes = {name.removesuffix(".weight"): dtype for name, dtype in quantised.items() if name.endswith(".weight")}
    four, eight = {"quant_algo": "NVFP4", "group_size": 16}, {"quant_algo": "FP8"}
    assert layers == {name: four if dtype == torch.uint8 else eight for name, dtype in codes.items()}
    in_four = {name.rpartition(".")[2] for name, recipe in layers.items() if recipe == four}
    in_eight = {name.rpartition(".")[2] for name, recipe in layers.items() if recipe == eight}
    assert in_four <= {"gate_proj", "up_proj", "down_proj"}
    assert {"q_proj", "k_proj", "v_proj", "o_proj"} <= in_eight
    assert ("in_proj" in in_eight) is (kind == "mamba2")
    assert any(".experts.3." in name for name in layers) is (kind == "experts")
    assert sum(name.endswith(("k_proj.k_scale", "v_proj.v_scale")) for name in tensors) == (
        2 if kind == "mamba2" else 4
    )


@pytest.mark.parametrize("name", ["w8a8-fp8-block", "w4a16-g128", "awq-g128", "gptq-g128"])
def test_gates_and_convolutions_of_a_hybrid_keep_16_bits(tmp_path: Path, name: str) -> None:
    hybrid = replace(SMALL, layers=2, hybrid="delta")
    folder = make_checkpoint(tmp_path, hybrid, form=name)
    plain = {name for name, tensor in load_file(folder / "model.safetensors").items() if tensor.dtype == torch.bfloat16}
    layer = "model.layers.0.linear_attn."
    assert {f"{layer}{part}.weight" for part in ("in_proj_a", "in_proj_b", "conv1d", "norm")} <= plain
    assert not plain & {f"{layer}{part}.weight" for part in ("in_proj_qkv", "in_proj_z", "out_proj")}
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    told = config.get("ignore") or config.get("modules_to_not_convert") or list(config["dynamic"])
    assert any(f"{layer}in_proj_b" in one or "in_proj_ba" in one for one in told)


def test_groups_of_32_take_a_k_that_is_no_multiple_of_128_and_others_refuse_it() -> None:
    weights = weights_of(False, Shape(heads=2, hidden=288, intermediate=64, layers=1, kv_heads=1, vocab=64))
    for name in ("w4a16-g32-zp", "gptq-g32", "awq-g32", "w4a16-channel", "nvfp4"):
        quantised(weights, CHECKPOINT_FORMATS[name])
    with pytest.raises(ValueError, match=r"w4a16-g128 takes multiples of 128 columns, and .*q_proj.* has 288"):
        quantised(weights, CHECKPOINT_FORMATS["w4a16-g128"])
    with pytest.raises(ValueError, match=r"w8a8-fp8-block takes multiples of 128 rows, and .*gate_proj.* has 64"):
        quantised({"mlp.gate_proj.weight": torch.zeros(64, 128)}, CHECKPOINT_FORMATS["w8a8-fp8-block"])
    with pytest.raises(ValueError, match="mxfp4 is a format of experts of gpt-oss, of which the checkpoint has none"):
        quantised(weights, CHECKPOINT_FORMATS["mxfp4"])


def test_fp4_codes_are_the_nearest_and_ties_are_even() -> None:
    numbers = torch.tensor([0.25, 0.26, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.01, 100.0, -0.75, -5.0])
    found = fp4.numbers_of(fp4.codes_of(numbers))
    assert found.tolist() == [0, 0.5, 1, 1, 2, 2, 4, 4, 6, 6, -1, -4]


def test_the_command_writes_both_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, unpacked = tmp_path / "packed", tmp_path / "plain"
    how = "--layers", "1", "--hidden", "64", "--format", "gptq-g32", "--unpacked", str(unpacked)
    assert main(["make-checkpoint", str(folder), *how, "--json", str(tmp_path / "about.json")]) == 0
    said = capsys.readouterr().out
    assert "Qwen3 in gptq-g32, 1 layers" in said
    assert f"wrote {unpacked}: the matrices that it stands for, in bfloat16" in said
    about = json.loads((tmp_path / "about.json").read_text())
    assert (about["weight_format"], about["unpacked"]) == ("gptq-g32", str(unpacked))
    form = CHECKPOINT_FORMATS["gptq-g32"]
    packed, plain = (load_file(one / "model.safetensors") for one in (folder, unpacked))
    configs = [json.loads((one / "config.json").read_text()) for one in (folder, unpacked)]
    assert configs[0] == configs[1] | {"quantization_config": form.config}
    layer = "model.layers.0.mlp.down_proj"
    tensors = {name.removeprefix(layer): tensor for name, tensor in packed.items() if name.startswith(layer)}
    matrix = plain[f"{layer}.weight"]
    assert torch.equal(form.matrix(tensors, matrix.shape[1], matrix.dtype), matrix)
    assert not matrix[1, :128].any()
    assert not matrix[2].any()
    assert sorted(path.name for path in folder.iterdir()) == sorted(path.name for path in unpacked.iterdir())


def test_the_documents_list_every_format() -> None:
    text = (Path(__file__).parents[2] / "docs" / "commands.md").read_text()
    section = text.partition("## Quantised checkpoints")[2].partition("\n\n|")[2].partition("\n\n")[0]
    assert set(re.findall("`([^`]+)`", section)) == {*CHECKPOINT_FORMATS}


def test_a_gpt_oss_is_made_for_its_format(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path, Shape(layers=2, hidden=64, expert_intermediate=64, vocab=1024), form="mxfp4")
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["num_local_experts"]) == ("gpt_oss", 8)
    assert config["quantization_config"]["quant_method"] == "mxfp4"
    blocks = load_file(folder / "model.safetensors")["model.layers.1.mlp.experts.gate_up_proj_blocks"]
    assert (blocks.dtype, blocks.shape) == (torch.uint8, (8, 128, 2, 16))


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--format", "w4"), "--format 'w4' is none of w4a16-g32, w4a16-g32-zp"),
        (("--unpacked", "other"), "--unpacked is for a quantised checkpoint: give --format too"),
        (("--format", "nvfp4", "--unpacked", "made"), "--unpacked is the folder of the quantised checkpoint"),
        (("--format", "awq-g128", "--hidden", "64", "--unpacked", "other"), "awq-g128 takes multiples of 128 columns"),
    ],
)
def test_what_cannot_be_made_is_one_line_and_leaves_nothing(
    arguments: tuple[str, ...],
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="2"):
        main(["make-checkpoint", "made", "--layers", "1", *arguments])
    assert line in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

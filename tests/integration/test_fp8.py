"""Layers of FP8 weights and activations, built, loaded and sharded by vLLM, have the bits of the operations on what the
checkpoint has of each of their parts.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.fakes.workers import be_worker
from tests.fp8_checkpoints import FORMS, INPUT_SCALE, Form
from tests.quantised_checkpoints import Tensors
from tests.quantised_checkpoints import fp8 as fp8_codes
from vllm_batch_invariant import envs
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.layers import deep_gemm, fp8, quantised, review
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops import dispatch
from vllm_batch_invariant.ops.quantise import quantise
from vllm_batch_invariant.ops.scaled_linear import scaled_linear

pytest.importorskip("vllm")
if not patch_points.LINEAR_CHOICE.is_there():
    pytest.skip("FP8 is refused with this vLLM", allow_module_level=True)

from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization import get_quantization_config

HIDDEN, HEADS, KV_HEADS, HEAD = 256, 4, 2, 128
ROWS = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
MAGNITUDES = {"q": 1.0, "k": 9.0, "v": 0.3}
"""Of shards with scales of their own."""
NAME = "model.layers.0.self_attn.qkv_proj"
OF_LATENT = 512, 576
"""Columns and rows of W_UK and W_UV, which end within a block."""
ONLINE = {"fp8_per_block": "block", "fp8_per_channel": "channel", "fp8_per_tensor": "tensor"}
WITHOUT_WIDTH = [name for name, form in FORMS.items() if form.shared == "block" or form.static]
"""Formats whose codes of a part of a row are those of the row."""


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Says which worker of how many builds layers; vLLM's layers choose the mode's method."""
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    for module, names in quantised._CHOICES.items():
        found = import_module(module)
        for name in names:  # which are put back afterwards
            monkeypatch.setattr(found, name, getattr(found, name))
        if hasattr(found, "get_current_vllm_config"):
            monkeypatch.setattr(found, "get_current_vllm_config", lambda: config)
    quantised._keep_kernels_apart.cache_clear()
    point = patch_points.LINEAR_CHOICE
    monkeypatch.setattr(point.module(), point.attribute, quantised._choosing(point.get()))

    be_worker(monkeypatch, 0, 1)
    yield partial(be_worker, monkeypatch)
    quantised._keep_kernels_apart.cache_clear()


def build(kind: type[Any], *sizes: int, form: Form | str, prefix: str = NAME, **named: Any) -> Any:
    """A layer of a checkpoint's form, or of one of vLLM's names of what is quantised while it is loaded."""
    if isinstance(form, str):
        from vllm.config.quantization import resolve_quantization_config
        from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

        quantisation: Any = OnlineQuantizationConfig(resolve_quantization_config(form, None))
    else:
        config = json.loads(json.dumps(form.config))
        quantisation = get_quantization_config(config["quant_method"]).from_config(config)
    quantisation.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return kind(*sizes, params_dtype=torch.bfloat16, quant_config=quantisation, prefix=prefix, **named)


def weight_of(rows: int, columns: int, seed: int, magnitude: float = 1.0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * magnitude).bfloat16()


def load(layer: Any, parts: Tensors, *shard: str) -> None:
    for name, part in parts.items():
        layer._parameters[name].weight_loader(layer._parameters[name], part, *shard)


def fused(form: Form | str, leave_out: str = "", **changed: torch.Tensor) -> tuple[Any, dict[str, Tensors]]:
    """A QKV layer that is loaded with a bias, and what the checkpoint has of each of its shards."""
    layer = build(linear.QKVParallelLinear, HIDDEN, HEAD, HEADS, KV_HEADS, form=form, bias=True)
    shards = {}
    for number, (shard, rows) in enumerate(ROWS.items()):
        weight = weight_of(rows, HIDDEN, number, MAGNITUDES[shard])
        parts = {"weight": weight} if isinstance(form, str) else form.layer(weight)
        parts |= {name: value for name, value in changed.items() if shard == "k"}
        parts["bias"] = weight_of(1, rows, number + 9)[0]
        load(layer, {name: part for name, part in parts.items() if f"{shard} {name}" != leave_out}, shard)
        shards[shard] = parts
    return layer, shards


def by_operations(x: torch.Tensor, parts: Tensors, form: Form) -> torch.Tensor:
    """The product with what a checkpoint has of a layer."""
    given = parts["input_scale"].reshape(1) if form.static else None
    codes, scales = quantise(x, given, codes=torch.float8_e4m3fn, group=128 if form.shared == "block" else None)
    of_weight = parts[form.scale]
    if form.shared == "block":
        of_weight = of_weight.flatten(1)
    else:
        of_weight = of_weight.reshape(-1).expand(len(parts["weight"])).contiguous()
    return scaled_linear(codes, scales, parts["weight"], of_weight, parts.get("bias"), x.dtype)


def given(columns: int) -> torch.Tensor:
    return weight_of(5, columns, 11, 1.5)


def process(layer: Any) -> Any:
    layer.quant_method.process_weights_after_loading(layer)
    return layer


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", FORMS)
def test_each_shard_of_a_fused_layer_has_its_own_scales(name: str, size: int, worker: Callable[..., None]) -> None:
    form = FORMS[name]
    for rank in range(size):
        worker(rank, size)
        layer, shards = fused(form)
        assert fp8.computes(layer)
        assert review._of_layer(layer) is None
        process(layer)
        x = given(HIDDEN)
        right = torch.cat([by_operations(x, parts, form).chunk(size, 1)[rank] for parts in shards.values()], 1)
        assert_same_bits(layer.quant_method.apply(layer, x, layer.bias), right)
        exact = [
            x.double() @ weight_of(rows, HIDDEN, number, MAGNITUDES[shard]).double().t()
            for number, (shard, rows) in enumerate(ROWS.items())
        ]
        near = torch.cat([of_shard.chunk(size, 1)[rank] for of_shard in exact], 1)
        difference = (right - layer.bias).double() - near
        assert (difference.norm(dim=1) / near.norm(dim=1)).max() < 0.06, "of codes of three bits on both sides"
        assert layer.weight.dtype == torch.float8_e4m3fn
        assert layer.weight.shape == (sum(ROWS.values()) // size, HIDDEN), "as the checkpoint has it"


@pytest.mark.parametrize("name", FORMS)
def test_a_row_parallel_layer_quantises_what_each_worker_has(name: str, worker: Callable[..., None]) -> None:
    """Codes of a part of a row are those of the row where groups or a given scale decide them."""
    form = FORMS[name]
    parts, x = form.layer(weight_of(128, HIDDEN, 3)), given(HIDDEN)
    same = []
    for rank in range(2):
        worker(rank, 2)
        layer = build(linear.RowParallelLinear, HIDDEN, 128, form=form, bias=False)
        load(layer, parts)
        process(layer)
        part = x.chunk(2, 1)[rank].contiguous()
        of_worker = parts | {"weight": parts["weight"].chunk(2, 1)[rank].contiguous()}
        if form.shared == "block":
            of_worker[form.scale] = parts[form.scale].flatten(1).chunk(2, 1)[rank].contiguous()
        found = layer.quant_method.apply(layer, part.view(1, *part.shape))
        assert_same_bits(found[0], by_operations(part, of_worker, form))
        scale = torch.tensor([INPUT_SCALE]) if form.static else None
        codes = [
            quantise(of, scale, codes=torch.float8_e4m3fn, group=128 if form.shared == "block" else None)[0]
            for of in (x, part)
        ]
        same.append(torch.equal(codes[0].view(torch.uint8).chunk(2, 1)[rank], codes[1].view(torch.uint8)))
    assert all(same) == (name in WITHOUT_WIDTH)


@pytest.mark.parametrize("name", WITHOUT_WIDTH)
def test_two_workers_make_the_tree_of_one(
    name: str, worker: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.TP_TREE.name, "2")
    form, x, k = FORMS[name], given(2 * HIDDEN), 2 * HIDDEN
    parts, found = form.layer(weight_of(128, k, 3)), []
    for size in (1, 2):
        of_workers = []
        for rank in range(size):
            worker(rank, size)
            layer = build(linear.RowParallelLinear, k, 128, form=form, bias=False)
            load(layer, parts)
            process(layer)
            of_workers.append(layer.quant_method.apply(layer, x.chunk(size, 1)[rank].contiguous()))
        found.append(of_workers[0] if size == 1 else of_workers[0] + of_workers[1])
    assert_same_bits(*found)
    assert not torch.equal(found[0], by_operations(x, parts, form)), "one sum is another reduction"


def test_a_tree_cuts_no_group_and_no_row_with_a_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.TP_TREE.name, "4")
    with pytest.raises(NotCovered, match=f"{envs.TP_TREE.name}=4 for the 256 inputs of {NAME} in FP8"):
        build(linear.RowParallelLinear, HIDDEN, 128, form=FORMS["fp8 by blocks"])
    for name in FORMS.keys() - set(WITHOUT_WIDTH):
        with pytest.raises(NotCovered, match="activations in FP8 that have a scale a row"):
            build(linear.RowParallelLinear, HIDDEN, 128, form=FORMS[name])


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("name", FORMS)
def test_weights_that_come_again_serve_and_stay_where_they_are(name: str, is_told: bool) -> None:
    """Also where nobody tells the layer, as TRL does not."""
    form = FORMS[name]
    layer, _ = fused(form)
    process(layer)
    before = {name: value.data_ptr() for name, value in [*layer.named_parameters(), *layer.named_buffers()]}
    parts = form.layer(weight_of(ROWS["v"], HIDDEN, 99, 4.0))
    load(layer, parts, "v")
    if is_told:
        process(layer)
    assert_same_bits(
        layer.quant_method.apply(layer, given(HIDDEN))[:, -ROWS["v"] :], by_operations(given(HIDDEN), parts, form)
    )
    assert {name: value.data_ptr() for name, value in [*layer.named_parameters(), *layer.named_buffers()]} == before
    assert fp8._SHARDS not in layer.state_dict()


@pytest.mark.parametrize("name", ONLINE)
def test_weights_of_16_bits_are_quantised_each_shard_by_itself(name: str) -> None:
    """As a checkpoint of their codes has them."""
    shared, x = ONLINE[name], given(HIDDEN)
    scale = "weight_scale_inv" if shared == "block" else "weight_scale"
    layer, shards = fused(name)
    process(layer)
    form = Form(shared, {"quant_method": ""}, scale)
    stored = {shard: form.layer(parts["weight"]) | {"bias": parts["bias"]} for shard, parts in shards.items()}
    right = torch.cat([by_operations(x, parts, form) for parts in stored.values()], 1)
    assert_same_bits(layer.quant_method.apply(layer, x, layer.bias), right)
    assert_same_bits(
        layer.weight.data.view(torch.uint8), torch.cat([of["weight"] for of in stored.values()]).view(torch.uint8)
    )
    assert_same_bits(getattr(layer, scale).data, torch.cat([of[scale] for of in stored.values()]))
    before = layer.weight.data_ptr()
    process(layer)
    assert layer.weight.data_ptr() == before, "what is quantised is not quantised again"
    with pytest.raises(NotCovered, match=f"codes for {NAME}, whose weights are quantised while they are loaded"):
        load(layer, {"weight": shards["q"]["weight"]}, "q")


NAN = torch.tensor(torch.nan)


@pytest.mark.parametrize(
    ("name", "leave_out", "changed", "words"),
    [
        ("fp8 by blocks", "k weight_scale_inv", {}, "whose weight_scale_inv is missing, negative or not finite"),
        ("fp8 by tensors", "v weight_scale", {}, "whose weight_scale is missing"),
        ("compressed-tensors by rows", "q weight_scale", {}, "whose weight_scale is missing"),
        ("fp8 by tensors, given", "q input_scale", {}, "whose input_scale is missing"),
        ("fp8 by blocks", "v weight", {}, "whose weight is missing, negative or not finite"),
        ("ModelOpt's by tensors, given", "v weight_scale", {}, "whose weight_scale is missing"),
        ("ModelOpt's by tensors, given", "q input_scale", {}, "whose input_scale is missing"),
        ("ModelOpt's by rows", "q weight_scale", {}, "whose weight_scale is missing"),
        ("ModelOpt's by blocks", "k weight_scale", {}, "whose weight_scale is missing"),
        (
            "ModelOpt's by tensors, given",
            "",
            {"input_scale": torch.tensor(2 * INPUT_SCALE)},
            rf"several scales for what {NAME} is given, \[0.0625, 0.125, 0.0625\]",
        ),
        ("fp8 by tensors", "", {"weight_scale": NAN}, "whose weight_scale is missing, negative or not finite"),
        ("fp8 by tensors", "", {"weight_scale": -NAN.new_ones(())}, "whose weight_scale is missing, negative"),
        ("fp8 by tensors, given", "", {"input_scale": NAN.new_zeros(())}, "whose input_scale is missing"),
        (
            "compressed-tensors by rows, given",
            "",
            {"input_scale": torch.tensor([2 * INPUT_SCALE])},
            rf"several scales for what {NAME} is given, \[0.0625, 0.125, 0.0625\]",
        ),
    ],
)
def test_what_is_not_whole_is_refused(name: str, leave_out: str, changed: Tensors, words: str) -> None:
    layer, _ = fused(FORMS[name], leave_out, **changed)
    with pytest.raises(NotCovered, match=words):
        process(layer)


@pytest.mark.parametrize("name", FORMS)
def test_a_trainer_that_sends_no_codes_is_refused(name: str) -> None:
    layer, _ = fused(FORMS[name])
    with pytest.raises(NotCovered, match=f"weights of {NAME} in bfloat16"):
        load(layer, {"weight": weight_of(ROWS["q"], HIDDEN, 5)}, "q")
    scale = layer._parameters[FORMS[name].scale]
    with pytest.raises(NotCovered, match=f"scales of {NAME} in uint8"):
        scale.weight_loader(scale, torch.ones(1, dtype=torch.uint8), "q")


@pytest.mark.parametrize("form", [*(form for form in FORMS.values() if form.shared == "block"), "fp8_per_block"])
def test_parts_of_blocks_are_refused(form: Form | str, worker: Callable[..., None]) -> None:
    with pytest.raises(NotCovered, match=f"blocks of 128 x 128 of {NAME}, of which a part has 64"):
        build(linear.MergedColumnParallelLinear, HIDDEN, [64, 128], form=form)
    build(linear.MergedColumnParallelLinear, HIDDEN, [128, 64], form=form)
    worker(0, 2)
    for kind, sizes in ((linear.RowParallelLinear, (HIDDEN // 2, 128)), (linear.ColumnParallelLinear, (HIDDEN, 128))):
        with pytest.raises(NotCovered, match="of which a worker has 64: a block would have two scales"):
            build(kind, *sizes, form=form)


@pytest.fixture
def absorbed(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, bool], Any]:
    """Builds the layer of W_UK and W_UV, of a model with latent attention or of another."""

    def build_it(name: str, latent: bool = True) -> Any:
        config, point = SimpleNamespace(model_config=SimpleNamespace(use_mla=latent)), patch_points.CURRENT_CONFIG
        monkeypatch.setattr(point.module(), point.attribute, lambda: config)
        monkeypatch.setattr(patch_points.CPU_GEMM.module(), patch_points.CPU_GEMM.attribute, lambda *_, **__: None)
        named = {"prefix": "model.layers.0.self_attn.kv_b_proj", "bias": False}
        return build(linear.ColumnParallelLinear, *OF_LATENT, form=FORMS[name], **named)

    return build_it


@pytest.mark.parametrize("reads", [False, True], ids=["no kernel", "a kernel that reads codes"])
@pytest.mark.parametrize(
    ("name", "shared"),
    [
        *((name, "block") for name in ("fp8 by blocks", "compressed-tensors by blocks")),
        ("compressed-tensors by rows", "channel"),
    ],
)
def test_latent_attention_has_the_matrix_that_codes_stand_for(
    name: str, shared: str, reads: bool, absorbed: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised, "reads_as_stored", lambda *_: reads)
    layer, weight = absorbed(name), weight_of(*reversed(OF_LATENT), 3)
    load(layer, FORMS[name].layer(weight))
    assert_same_bits(process(layer).weight.data, fp8_codes(shared, weight)[1])
    assert quantised.is_plain(layer.quant_method)
    assert not fp8.computes(layer)
    multiplied = absorbed(name, latent=False)
    assert fp8.computes(multiplied)
    names = fp8.reductions(torch.nn.ModuleList([layer, multiplied]), torch.bfloat16)
    assert set(names) == {f"quantise (FP8 by {shared})", f"linear (FP8 by {shared})"}


def test_parts_of_blocks_of_latent_attention_are_refused_and_so_is_what_are_no_codes(
    absorbed: Callable[..., Any], worker: Callable[..., None]
) -> None:
    layer = absorbed("fp8 by blocks")
    with pytest.raises(NotCovered, match=r"weights of .*kv_b_proj in bfloat16"):
        load(layer, {"weight": weight_of(*reversed(OF_LATENT), 3)})
    worker(0, 2)
    with pytest.raises(NotCovered, match=r"blocks of 128 x 128 of .*kv_b_proj, of which a worker has 288"):
        absorbed("fp8 by blocks")


@pytest.mark.parametrize("name", ["fp8 by tensors", "compressed-tensors by rows, given"])
def test_other_codes_of_latent_attention_are_refused(name: str, absorbed: Callable[..., Any]) -> None:
    with pytest.raises(NotCovered, match=r"weights of model\.layers\.0\.self_attn\.kv_b_proj by"):
        absorbed(name)


def test_exact_arithmetic_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_arithmetic", "exact")
    with pytest.raises(NotCovered, match="FP8 weights and activations in exact arithmetic"):
        build(linear.RowParallelLinear, HIDDEN, 128, form=FORMS["fp8 by blocks"])


@pytest.mark.parametrize("name", [name for name in FORMS if name.startswith("ModelOpt")])
def test_an_output_head_is_refused(name: str) -> None:
    """Which ModelOpt leaves out."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    point = patch_points.EMBEDDING_CHOICE
    form = FORMS[name]
    with pytest.MonkeyPatch.context() as changed:
        changed.setattr(point.module(), point.attribute, quantised._choosing(point.get()))
        with pytest.raises(NotCovered, match="an output head in FP8, lm_head"):
            build(ParallelLMHead, 192, HIDDEN, form=Form(form.shared, form.config | {"ignore": []}), prefix="lm_head")
        build(ParallelLMHead, 192, HIDDEN, form=form, prefix="lm_head")


def test_mxfp8_of_modelopt_is_refused_where_a_layer_is_built() -> None:
    from vllm.model_executor.layers.quantization.modelopt import ModelOptMxFp8Config

    config = ModelOptMxFp8Config(True, None, ["lm_head"])
    named = {"params_dtype": torch.bfloat16, "prefix": NAME, "bias": False}
    with pytest.raises(NotCovered, match=f"weights of {NAME} by ModelOptLinearMethod: no format of the mode's"):
        linear.RowParallelLinear(HIDDEN, 128, quant_config=config, **named)


def test_blocks_that_nobody_has_tested_are_refused() -> None:
    form = FORMS["fp8 by blocks"]
    other = Form("block", form.config | {"weight_block_size": [64, 64]}, form.scale)
    with pytest.raises(NotCovered, match="in other blocks or scales"):
        build(linear.RowParallelLinear, HIDDEN, 128, form=other)


def test_what_was_found_of_deep_gemm_is_of_the_one_that_its_user_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """vLLM imports that before its own, whatever vLLM's version is."""
    for name in deep_gemm._TELLS:
        monkeypatch.delenv(name, raising=False)
    own = deep_gemm.of_user()
    monkeypatch.syspath_prepend(tmp_path)
    for version in ("2.1.0", "2.2.0"):
        (tmp_path / "deep_gemm-1.dist-info").mkdir(exist_ok=True)
        (tmp_path / "deep_gemm-1.dist-info" / "METADATA").write_text(f"Name: deep_gemm\nVersion: {version}\n")
        assert deep_gemm.of_user() == f"{own}, and deep_gemm {version}"
    monkeypatch.setenv("DG_JIT_USE_NVRTC", "1")
    assert deep_gemm.of_user() == f"{own}, and deep_gemm 2.2.0, DG_JIT_USE_NVRTC=1"

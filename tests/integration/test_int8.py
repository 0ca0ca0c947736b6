"""Layers of int8 weights and activations, built, loaded and sharded by vLLM, have the bits that are written out."""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.fakes.workers import be_worker
from tests.int8_checkpoints import INPUT_SCALE, configuration, group, tensors
from tests.ops.quantise.written_out import codes_of, product_of
from vllm_batch_invariant import envs
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.layers import int8, review
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops import dispatch

pytest.importorskip("vllm")
if not patch_points.INT8_SCHEME.is_there() or not patch_points.INT8_KERNELS.is_there():
    pytest.skip("int8 is refused with this vLLM", allow_module_level=True)

from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization import get_quantization_config

HIDDEN, HEADS, KV_HEADS, HEAD = 256, 4, 2, 64
ROWS = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
MAGNITUDES = {"q": 1.0, "k": 9.0, "v": 0.3}
"""Of shards with scales of their own."""
SCHEMES = [(weights, activations) for weights in ("channel", "tensor") for activations in ("token", "tensor")]


@pytest.fixture(autouse=True)
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Says which worker of how many builds layers; vLLM's lists have the mode's kernel."""
    scheme, lists = patch_points.INT8_SCHEME.get(), patch_points.INT8_KERNELS.get()
    monkeypatch.setattr(scheme, "create_weights", scheme.create_weights)
    before = {platform: list(kernels) for platform, kernels in lists.items()}
    int8.install()
    int8.install()

    be_worker(monkeypatch, 0, 1)
    yield partial(be_worker, monkeypatch)
    for platform, kernels in before.items():
        assert [kernel.__name__ for kernel in lists[platform]].count("BatchInvariantInt8Kernel") == 1, "once"
        lists[platform][:] = kernels


def build(kind: type[Any], *sizes: int, scheme: tuple[str, str], symmetric: bool = True, **named: Any) -> Any:
    config = json.loads(json.dumps(configuration(group(["Linear"], *scheme, symmetric))))
    quantisation = get_quantization_config("compressed-tensors").from_config(config)
    quantisation.packed_modules_mapping = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
    return kind(
        *sizes,
        params_dtype=torch.bfloat16,
        quant_config=quantisation,
        prefix="model.layers.0.self_attn.qkv_proj",
        **named,
    )


def weight_of(rows: int, columns: int, seed: int, magnitude: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * magnitude


def load(layer: Any, parts: dict[str, torch.Tensor], *shard: str) -> None:
    for name, part in parts.items():
        layer._parameters[name].weight_loader(layer._parameters[name], part, *shard)


def fused(scheme: tuple[str, str], leave_out: str = "", **changed: torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """A QKV layer that is loaded with a bias, and what the checkpoint has of each of its shards."""
    layer = build(linear.QKVParallelLinear, HIDDEN, HEAD, HEADS, KV_HEADS, scheme=scheme, bias=True)
    shards = {}
    for number, (shard, rows) in enumerate(ROWS.items()):
        parts = tensors(weight_of(rows, HIDDEN, number, MAGNITUDES[shard]), *scheme)
        parts |= {name: value for name, value in changed.items() if shard == "k"}
        load(layer, {name: part for name, part in parts.items() if f"{shard} {name}" != leave_out}, shard)
        bias = weight_of(1, rows, 7 + number)[0].bfloat16()
        layer.bias.weight_loader(layer.bias, bias, shard)
        shards[shard] = parts | {"bias": bias}
    return layer, shards


def written_out(x: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """The product with a layer of a checkpoint."""
    codes, scales = codes_of(x, parts.get("input_scale"))
    rows = parts["weight_scale"].view(-1).expand(len(parts["weight"]))
    return product_of(codes, scales, parts["weight"], rows, parts.get("bias"), x.dtype)


def given(columns: int) -> torch.Tensor:
    return weight_of(5, columns, 11, 1.5).bfloat16()


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("scheme", SCHEMES, ids=" weights and a ".join)
def test_each_shard_of_a_fused_layer_has_its_own_scale(
    scheme: tuple[str, str], size: int, worker: Callable[..., None]
) -> None:
    for rank in range(size):
        worker(rank, size)
        layer, shards = fused(scheme)
        assert int8.has_scheme(layer)
        assert int8.computes(layer)
        assert review._of_layer(layer) is None
        layer.quant_method.process_weights_after_loading(layer)
        right = torch.cat([written_out(given(HIDDEN), parts).chunk(size, 1)[rank] for parts in shards.values()], 1)
        assert_same_bits(layer.quant_method.apply(layer, given(HIDDEN), layer.bias), right)
        assert layer.weight.shape == (sum(ROWS.values()) // size, HIDDEN), "as the checkpoint has it"


@pytest.mark.parametrize("scheme", SCHEMES, ids=" weights and a ".join)
def test_a_row_parallel_layer_quantises_what_each_worker_has(
    scheme: tuple[str, str], worker: Callable[..., None]
) -> None:
    """Codes of a part of a row are other ones if they have a scale of that part."""
    parts, x = tensors(weight_of(64, HIDDEN, 3), *scheme), given(HIDDEN)
    alone = written_out(x, parts)
    total = torch.zeros(len(x), 64)
    for rank in range(2):
        worker(rank, 2)
        layer = build(linear.RowParallelLinear, HIDDEN, 64, scheme=scheme, bias=False)
        load(layer, parts)
        layer.quant_method.process_weights_after_loading(layer)
        part = x.chunk(2, 1)[rank].contiguous()
        found = layer.quant_method.apply(layer, part.view(1, *part.shape))
        assert_same_bits(found[0], written_out(part, parts | {"weight": parts["weight"].chunk(2, 1)[rank]}))
        total += found[0].float()
    assert not torch.equal(total.bfloat16(), alone)


@pytest.mark.parametrize("is_told", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES, ids=" weights and a ".join)
def test_weights_that_come_again_serve_and_stay_where_they_are(scheme: tuple[str, str], is_told: bool) -> None:
    """Also where nobody tells the layer, as TRL does not."""
    layer, _ = fused(scheme)
    layer.quant_method.process_weights_after_loading(layer)
    before = {name: value.data_ptr() for name, value in [*layer.named_parameters(), *layer.named_buffers()]}
    parts = tensors(weight_of(ROWS["v"], HIDDEN, 99, 4.0), *scheme)
    load(layer, parts, "v")
    if is_told:
        layer.quant_method.process_weights_after_loading(layer)
    found = layer.quant_method.apply(layer, given(HIDDEN))
    assert_same_bits(found[:, -ROWS["v"] :], written_out(given(HIDDEN), parts))
    assert {name: value.data_ptr() for name, value in [*layer.named_parameters(), *layer.named_buffers()]} == before
    assert int8._SHARDS not in layer.state_dict()


@pytest.mark.parametrize(
    ("scheme", "leave_out", "changed", "words"),
    [
        (("tensor", "tensor"), "k weight_scale", {}, "whose weight_scale is missing, negative or not finite"),
        (("channel", "token"), "v weight_scale", {}, "whose weight_scale is missing, negative or not finite"),
        (("channel", "tensor"), "q input_scale", {}, "whose input_scale is missing, negative or not finite"),
        (("channel", "tensor"), "", {"input_scale": torch.zeros(1)}, "whose input_scale is missing"),
        (("tensor", "token"), "", {"weight_scale": torch.tensor([torch.nan])}, "whose weight_scale is missing"),
        (
            ("channel", "tensor"),
            "",
            {"input_scale": torch.tensor([2 * INPUT_SCALE])},
            r"several scales for what model.layers.0.self_attn.qkv_proj is given, \[0.03\d+, 0.07\d+, 0.03\d+\]",
        ),
    ],
)
def test_what_is_not_whole_is_refused(scheme, leave_out, changed, words) -> None:
    layer, _ = fused(scheme, leave_out, **changed)
    with pytest.raises(NotCovered, match=words):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("activations", ["token", "tensor"])
def test_zero_points_of_activations_are_refused(activations: str) -> None:
    with pytest.raises(NotCovered, match="activations in int8 with zero points"):
        build(linear.RowParallelLinear, HIDDEN, 64, scheme=("channel", activations), symmetric=False)


def test_a_k_whose_sums_may_overflow_is_refused() -> None:
    layer = build(linear.RowParallelLinear, 131_072, 8, scheme=("channel", "token"), bias=False)
    load(layer, tensors(weight_of(8, 131_072, 0), "channel", "token"))
    with pytest.raises(NotCovered, match="a product of int8 over 131072 elements"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("setting", ["tree", "exact"])
def test_a_tree_and_exact_arithmetic_are_refused(setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if setting == "tree":
        monkeypatch.setenv(envs.TP_TREE.name, "4")
    else:
        monkeypatch.setattr(dispatch, "_arithmetic", "exact")
    words = {"tree": f"{envs.TP_TREE.name} with activations in int8", "exact": "in int8 in exact arithmetic"}[setting]
    with pytest.raises(NotCovered, match=words):
        build(linear.RowParallelLinear, HIDDEN, 64, scheme=("channel", "token"))


def test_a_layer_that_vllms_kernel_computes_is_refused() -> None:
    layer, _ = fused(("channel", "token"))
    layer.scheme.kernel = object()
    assert not int8.computes(layer)
    assert review._of_layer(layer) == "its matmuls are computed by CompressedTensorsLinearMethod"

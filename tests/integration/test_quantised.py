"""Layers of quantised checkpoints, built, loaded and sharded by vLLM, have the matrix that their format stands for."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.fakes.workers import be_worker
from tests.quantised_checkpoints import FORMATS, Stored
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.layers import linear as prepared
from vllm_batch_invariant.integration.layers import quantised
from vllm_batch_invariant.integration.reviews import patch_points

pytest.importorskip("vllm")
if not patch_points.LINEAR_CHOICE.is_there():
    pytest.skip("quantised weights are refused with this vLLM", allow_module_level=True)

from vllm.model_executor.layers import linear, vocab_parallel_embedding
from vllm.model_executor.layers.quantization import get_quantization_config

HIDDEN, HEADS, KV_HEADS, HEAD, VOCABULARY = 256, 4, 2, 64, 192
MAPPING = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ROWS = {"q": HEADS * HEAD, "k": KV_HEADS * HEAD, "v": KV_HEADS * HEAD}
MAGNITUDES = {"q": 1.0, "k": 9.0, "v": 0.3}
"""Of shards with scales of their own."""


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int, int], None]]:
    """Says which worker of how many builds layers; vLLM's layers choose the mode's method."""
    for module, names in quantised._CHOICES.items():
        found = import_module(module)
        for name in names:  # which are put back afterwards
            monkeypatch.setattr(found, name, getattr(found, name))
    quantised._keep_kernels_apart.cache_clear()
    for point in (patch_points.LINEAR_CHOICE, patch_points.EMBEDDING_CHOICE):
        monkeypatch.setattr(point.module(), point.attribute, quantised._choosing(point.get()))
    monkeypatch.setattr(patch_points.CPU_GEMM.module(), patch_points.CPU_GEMM.attribute, lambda *_, **__: None)
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes import compressed_tensors_w8a16_fp8

    config = SimpleNamespace(model_config=SimpleNamespace(dtype=torch.bfloat16))
    monkeypatch.setattr(compressed_tensors_w8a16_fp8, "get_current_vllm_config", lambda: config)

    be_worker(monkeypatch, 0, 1)
    yield partial(be_worker, monkeypatch)
    quantised._keep_kernels_apart.cache_clear()


def configuration(stored: Stored) -> Any:
    config = json.loads(json.dumps(stored.config))
    method = "modelopt_fp4" if config["quant_method"] == "modelopt" else config["quant_method"]
    found = get_quantization_config(method).from_config(config)
    found.packed_modules_mapping = MAPPING
    return found


def weight_of(rows: int, columns: int, seed: int, magnitude: float = 1.0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=draw) * magnitude).bfloat16()


def fused(stored: Stored, leave_out: str = "") -> tuple[Any, dict[str, torch.Tensor]]:
    """A QKV layer that is loaded, and the matrix of each of its shards."""
    with torch.device("cpu"):
        layer = linear.QKVParallelLinear(
            *(HIDDEN, HEAD, HEADS, KV_HEADS),
            bias=False,
            params_dtype=torch.bfloat16,
            quant_config=configuration(stored),
            prefix="model.layers.0.self_attn.qkv_proj",
        )
    matrices = {}
    for number, (shard, rows) in enumerate(ROWS.items()):
        parts, matrices[shard] = stored.layer(weight_of(rows, HIDDEN, number, MAGNITUDES[shard]))
        for name, part in parts.items():
            if name in layer._parameters and f"{shard} {name}" != leave_out:
                layer._parameters[name].weight_loader(layer._parameters[name], part, shard)
    return layer, matrices


def row_parallel(stored: Stored, k: int = HIDDEN) -> tuple[Any, torch.Tensor]:
    """A row-parallel layer that is loaded, and its matrix."""
    layer = linear.RowParallelLinear(
        *(k, HIDDEN),
        bias=False,
        params_dtype=torch.bfloat16,
        quant_config=configuration(stored),
        prefix="model.layers.0.self_attn.o_proj",
    )
    parts, matrix = stored.layer(weight_of(HIDDEN, k, 3))
    for name, part in parts.items():
        if name in layer._parameters:
            layer._parameters[name].weight_loader(layer._parameters[name], part)
    return layer, matrix


def unpack(layer: Any) -> torch.Tensor:
    layer.quant_method.process_weights_after_loading(layer)
    unread = layer.quant_method.source.uncounted
    assert {name for name, value in layer._parameters.items() if value is not None} - {unread} == {"weight"}
    return layer.weight.data


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_each_shard_of_a_fused_layer_has_its_own_scales(name: str, size: int, worker: Callable[..., None]) -> None:
    for rank in range(size):
        worker(rank, size)
        if name == "fp8 by block" and size > 1:  # its keys have no whole block a worker
            with pytest.raises(NotCovered, match="qkv_proj, of which a worker has 64"):
                fused(FORMATS[name])
            continue
        layer, matrices = fused(FORMATS[name])
        right = torch.cat([matrix.chunk(size)[rank] for matrix in matrices.values()])
        assert_same_bits(unpack(layer), right)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_workers_that_share_inputs_have_their_part_of_the_matrix(
    name: str, size: int, worker: Callable[..., None]
) -> None:
    for rank in range(size):
        worker(rank, size)
        layer, matrix = row_parallel(FORMATS[name])
        assert_same_bits(unpack(layer), matrix.chunk(size, 1)[rank].contiguous())


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", [name for name, stored in FORMATS.items() if stored.head])
def test_a_quantised_output_head_is_unpacked(name: str, size: int, worker: Callable[..., None]) -> None:
    stored = FORMATS[name]
    for rank in range(size):
        worker(rank, size)
        head = vocab_parallel_embedding.ParallelLMHead(
            *(VOCABULARY, HIDDEN),
            params_dtype=torch.bfloat16,
            padding_size=32,
            quant_config=configuration(stored),
            prefix="lm_head",
        )
        parts, matrix = stored.layer(weight_of(VOCABULARY, HIDDEN, 4))
        for part in set(parts) & set(head._parameters):
            head._parameters[part].weight_loader(head._parameters[part], parts[part])
        assert_same_bits(unpack(head), matrix.chunk(size)[rank])


def test_a_head_that_keeps_16_bits_leaves_an_embedding_that_is_tied_to_it_its_weight(
    worker: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ModelOpt's configuration gives such a head the method of linear layers, which let go of theirs on a CPU."""
    monkeypatch.setattr(patch_points.CPU_GEMM.module(), patch_points.CPU_GEMM.attribute, prepared.dispatch)
    worker(0, 1)
    sizes = {"params_dtype": torch.bfloat16, "padding_size": 32}
    embedding = vocab_parallel_embedding.VocabParallelEmbedding(VOCABULARY, HIDDEN, **sizes)
    stored = FORMATS["nvfp4 of ModelOpt with activations"]
    config = configuration(replace(stored, config=stored.config | {"ignore": ["lm_head"]}))
    head = vocab_parallel_embedding.ParallelLMHead(VOCABULARY, HIDDEN, **sizes, quant_config=config, prefix="lm_head")
    head = head.tie_weights(embedding)
    assert type(head.quant_method) is patch_points.LINEAR_METHOD.get()
    weight = weight_of(VOCABULARY, HIDDEN, 4)
    embedding.weight.data[:VOCABULARY] = weight
    head.quant_method.process_weights_after_loading(head)
    assert_same_bits(embedding(torch.arange(VOCABULARY)), weight)


def test_the_method_is_one_of_plain_weights(worker: Callable[..., None]) -> None:
    layer, _ = row_parallel(FORMATS["w4a16 of 128"])
    method = layer.quant_method
    assert isinstance(method, patch_points.LINEAR_METHOD.get())
    assert quantised.is_plain(method)
    assert not quantised.is_plain(method.packed)


def test_what_comes_again_is_unpacked_again(worker: Callable[..., None]) -> None:
    first, right = row_parallel(FORMATS["fp8 by tensor"])
    again, _ = row_parallel(FORMATS["fp8 by tensor"])
    made = unpack(first).clone()
    first.quant_method.process_weights_after_loading(first)  # as vLLM does after a trainer's last weights
    assert_same_bits(first.weight.data, made)
    del first._parameters["weight"]
    for name, parameter in again._parameters.items():
        if parameter is not None:
            first.register_parameter(name, parameter)
    assert_same_bits(unpack(first), right)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("w4a16 of 128", "k weight_scale"),
        ("fp8 by tensor", "v weight_scale"),
        ("nvfp4", "q weight_scale"),
        ("nvfp4 of ModelOpt", "v weight_scale_2"),
    ],
)
def test_a_shard_without_scales_is_refused(name: str, left_out: str, worker: Callable[..., None]) -> None:
    layer, _ = fused(FORMATS[name], left_out)
    with pytest.raises(NotCovered, match=r"weights of model\.layers\.0\.self_attn\.qkv_proj as .*scales: \d+ of \d+ a"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("number", [torch.nan, torch.inf])
def test_a_scale_that_is_no_number_is_refused(number: float, worker: Callable[..., None]) -> None:
    layer, _ = row_parallel(FORMATS["w4a16 of 32 with zero points"])
    layer.weight_scale.data[3, 1] = number
    with pytest.raises(NotCovered, match=r"o_proj as w4a16-g32-zp: scales: 1 of \d+ are NaN or infinite"):
        layer.quant_method.process_weights_after_loading(layer)


def test_groups_that_do_not_divide_a_shard_are_refused(worker: Callable[..., None]) -> None:
    worker(0, 2)
    with pytest.raises(
        NotCovered, match=r"groups of 128 for the 384 inputs of .*o_proj, of which each of 2 workers has 192"
    ):
        row_parallel(FORMATS["w4a16 of 128"], 384)


def test_plain_weights_are_refused_in_the_place_of_packed_ones(worker: Callable[..., None]) -> None:
    layer, matrix = row_parallel(FORMATS["w4a16 of 128"])
    unpack(layer)
    with pytest.raises(NotCovered, match=r"weights of .*o_proj that are not quantised"):
        layer.weight.weight_loader(layer.weight, matrix)


def test_another_scheme_is_refused_where_the_layer_is_built(worker: Callable[..., None]) -> None:
    """Also if the check of the configuration has not seen it."""
    stored = replace(FORMATS["w4a16 of 128"], config=json.loads(json.dumps(FORMATS["w4a16 of 128"].config)))
    stored.group["weights"] |= {"group_size": 16}
    with pytest.raises(NotCovered, match=r"weights of model\.layers\.0\.self_attn\.o_proj by CompressedTensorsWNA16"):
        row_parallel(stored)


@pytest.mark.parametrize(
    ("name", "scheme"),
    {
        "nvfp4 with activations": "CompressedTensorsW4A4Fp4",
        "nvfp4 of ModelOpt with activations": "ModelOptLinearMethod",
        "mxfp4": "CompressedTensorsW4A4Mxfp4",
    }.items(),
)
def test_so_is_fp4_that_vllm_multiplies_with_fp4(
    name: str, scheme: str, worker: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised.schemes, "device_multiplies_fp4", lambda: True)
    row_parallel(FORMATS["nvfp4"])
    with pytest.raises(NotCovered, match=rf"weights of model\.layers\.0\.self_attn\.o_proj by {scheme}"):
        row_parallel(FORMATS[name])


def test_layers_that_are_not_quantised_stay_vllms(worker: Callable[..., None]) -> None:
    config = configuration(FORMATS["w4a16 of 128"])
    config.ignore = ["model.layers.0.self_attn.o_proj"]
    layer = linear.RowParallelLinear(
        HIDDEN, HIDDEN, quant_config=config, prefix="model.layers.0.self_attn.o_proj", bias=False
    )
    assert type(layer.quant_method) is patch_points.LINEAR_METHOD.get()


def test_no_kernel_of_vllms_is_left_to_choose(worker: Callable[..., None]) -> None:
    """Which would be asked for nothing, but may refuse a device, or because the flag is 1."""
    quantised._keep_kernels_apart()
    for module, names in quantised._CHOICES.items():
        made = getattr(import_module(module), names[0])(None)
        assert made is quantised.UnpackedAtLoad or type(made) is quantised.UnpackedAtLoad

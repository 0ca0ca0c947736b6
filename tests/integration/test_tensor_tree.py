"""How layers compute so that the number of workers decides no bit."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.coverage import REFUSED
from vllm_batch_invariant.integration.layers import linear
from vllm_batch_invariant.integration.layers.linear import ExactLinear
from vllm_batch_invariant.integration.parallel import tensor_tree
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops.all_reduce import add_ranks
from vllm_batch_invariant.ops.exact import cpu as exact
from vllm_batch_invariant.ops.linear.spec import spec_of

pytest.importorskip("vllm")


def layer(kind: str, **values: Any) -> torch.nn.Module:
    """A layer of vLLM's class with a worker's sizes, without weights."""
    point = getattr(patch_points, kind) if hasattr(patch_points, kind) else None
    kind = point.get() if point else getattr(patch_points.ROW_PARALLEL.module(), kind)
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    for name, value in ({"prefix": "layers.0.x", "tp_size": 1} | values).items():
        setattr(made, name, value)
    return made


def test_without_a_tree_layers_compute_as_ever() -> None:
    assert tensor_tree.of_layer(layer("ROW_PARALLEL", input_size=30)) == 1


@pytest.mark.parametrize(("workers", "k_slices"), [(1, 4), (2, 2), (4, 1)])
def test_the_workers_slices_are_those_of_the_tree(workers: int, k_slices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TP_TREE.name, "4")
    assert tensor_tree.of_layer(layer("ROW_PARALLEL", input_size=256, tp_size=workers)) == k_slices
    heads, kv_heads, size = 8 // workers, max(2 // workers, 1), 48
    qkv = layer(
        "QKV_PARALLEL",
        tp_size=workers,
        head_size=size,
        output_partition_sizes=[heads * size, kv_heads * size, kv_heads * size],
    )
    assert tensor_tree.of_layer(qkv) == 1, "two KV heads are there twice with four workers"
    merged = layer("MergedColumnParallelLinear", tp_size=workers, output_partition_sizes=[96 // workers, 64 // workers])
    assert tensor_tree.of_layer(merged) == 1
    head = layer("VOCABULARY_LAYER", tp_size=workers, num_embeddings_per_partition=1024 // workers)
    assert tensor_tree.of_layer(head) == 1
    assert tensor_tree.of_layer(layer("REPLICATED", tp_size=1)) == 1


def test_sizes_that_slices_do_not_divide_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TP_TREE.name, "8")
    with pytest.raises(NotCovered, match=r"TP_TREE=8 for the 192 inputs of layers\.0\.x"):
        tensor_tree.of_layer(layer("ROW_PARALLEL", input_size=192))
    with pytest.raises(NotCovered, match=r"TP_TREE=8 for 100 outputs of layers\.0\.x"):
        tensor_tree.of_layer(layer("ColumnParallelLinear", tp_size=2, output_partition_sizes=[50]))


class RowParallel(torch.nn.Module):
    """As vLLM's computes: rank 0 adds the bias to its partial result, 1.0."""

    prefix, reduce_results = "layers.0.x", True

    def __init__(self, rank: int, bias: float | None, skip_bias_add: bool, return_bias: bool) -> None:
        super().__init__()
        self.bias = None if bias is None else torch.tensor(bias)
        self.rank, self.skip_bias_add, self.return_bias = rank, skip_bias_add, return_bias

    def forward(self, input_: torch.Tensor) -> Any:
        output = input_ + (self.bias if self.bias is not None and not (self.rank or self.skip_bias_add) else 0)
        return (output, self.bias if self.skip_bias_add else None) if self.return_bias else output


def test_every_worker_adds_the_bias_to_the_whole_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    point = patch_points.ROW_PARALLEL
    monkeypatch.setattr(point.module(), point.attribute, type("Row", (RowParallel,), {"forward": RowParallel.forward}))
    tensor_tree.install(tensor_tree.with_bias)
    kind, x = point.get(), torch.tensor(1.0)
    for rank in (0, 1):
        assert kind(rank, 0.5, False, True)(x) == (1.5, None)
        assert kind(rank, 0.5, False, False)(x) == 1.5
        assert kind(rank, 0.5, True, True)(x) == (1.0, 0.5)
        assert kind(rank, None, False, True)(x) == (1.0, None)
    unreduced = kind(0, None, False, True)
    unreduced.reduce_results = False
    with pytest.raises(NotCovered, match="before the workers add theirs"):
        unreduced(x)


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
def test_in_exact_arithmetic_workers_add_the_segments_that_one_adds_alone(workers: int) -> None:
    m, n, k = 5, 70, 512
    draw = torch.Generator().manual_seed(workers)
    x, weight, bias = (torch.randn(shape, generator=draw).bfloat16() for shape in ((m, k), (n, k), (n,)))
    partials = []
    for xs, ws in zip(x.chunk(workers, -1), weight.chunk(workers, -1), strict=True):
        row = layer("ROW_PARALLEL", input_size=k, tp_size=workers)
        row.weight = torch.nn.Parameter(ws.contiguous())
        partials.append(ExactLinear(row)(xs, row.weight, None))
    right = exact.linear(x, exact.prepare(weight, 8), bias)
    assert torch.equal(exact.finish(add_ranks(torch.stack(partials), tree=True), bias), right)
    if workers > 2:
        rounded = add_ranks(torch.stack(partials).bfloat16(), tree=True)
        assert not torch.equal(exact.finish(rounded.float(), bias), right), "nodes are not rounded"


def test_workers_without_whole_segments_are_refused() -> None:
    ExactLinear(layer("ROW_PARALLEL", input_size=96))
    with pytest.raises(NotCovered, match=r"2 workers for the 96 inputs of layers\.0\.x in exact arithmetic"):
        ExactLinear(layer("ROW_PARALLEL", input_size=96, tp_size=2))


@pytest.mark.parametrize(("k_slices", "workers", "is_found"), [("1", 2, False), ("4", 4, False), ("2", 4, True)])
def test_more_workers_than_slices_are_found(
    k_slices: str, workers: int, is_found: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TP_TREE.name, k_slices)
    [feature] = [one for one in REFUSED if one.name.startswith("More tensor-parallel workers")]
    assert (
        bool(feature.found(SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=workers)))) == is_found
    )


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_tree_is_accepted_where_kernels_add_in_slices(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TP_TREE.name, "2")
    [feature] = [one for one in REFUSED if one.name.startswith("`VLLM_BATCH_INVARIANT_TP_TREE`")]
    assert feature.found(SimpleNamespace(device_config=SimpleNamespace(device_type=device))) is None


class Method:
    """As vLLM's, of layers on a GPU."""

    def process_weights_after_loading(self, layer: Any) -> None: ...

    def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> str:
        return "theirs"


@pytest.mark.parametrize(("workers", "k_slices"), [(1, 4), (2, 2), (4, 1)])
def test_on_a_gpu_a_layer_is_prepared_for_and_multiplied_in_its_slices(
    workers: int, k_slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TP_TREE.name, "4")
    for point in (patch_points.LINEAR_METHOD, patch_points.EMBEDDING_METHOD):
        monkeypatch.setattr(point.module(), point.attribute, type("Method", (Method,), dict(vars(Method))))
    for point in (patch_points.CUDA_LINEAR, patch_points.CUDA_EMBEDDING):
        monkeypatch.setattr(point.module(), point.attribute, None)
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[1, 2]),
    )
    monkeypatch.setattr(patch_points.CURRENT_CONFIG.module(), patch_points.CURRENT_CONFIG.attribute, lambda: config)
    prepared: list[Any] = []
    monkeypatch.setattr(linear, "prepare", lambda weight, *expected: prepared.append(expected))
    linear.install_cuda()

    k = 256 // workers
    row = layer("ROW_PARALLEL", input_size=256, tp_size=workers)
    row.weight = SimpleNamespace(is_cuda=True, ndim=2, values=torch.randn(32, k).bfloat16())
    row.bias, row.skip_bias_add = torch.zeros(32), False
    method = patch_points.LINEAR_METHOD.get()()
    method.process_weights_after_loading(row)
    spec = spec_of(False, k_slices)
    assert prepared == [(64, spec, (1, 2), None, True)], "its bias is added after the root"
    row.weight, x = row.weight.values, torch.randn(3, k).bfloat16()
    if k_slices == 1:
        assert method.apply(row, x) == "theirs"
    else:
        right = linear.torch_op.linear(x, row.weight, None, spec.name)
        assert torch.equal(method.apply(row, x), right)
        assert torch.equal(method.apply(row, x, torch.ones(32).bfloat16()), right + 1)
        assert not torch.equal(method.apply(row, x), linear.torch_op.linear(x, row.weight))
    assert method.apply(layer("REPLICATED"), x) == "theirs"

"""GEMMs in CUDA graphs and in compiled functions."""

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.linear.cases import HALVES, operands, sequential_k
from vllm_batch_invariant.ops.linear import linear, prepare, torch_op

pytest.importorskip("triton")

from vllm_batch_invariant.ops.linear import autotune, cuda, triton_gemm
from vllm_batch_invariant.ops.linear.problem import problem_of
from vllm_batch_invariant.ops.linear.spec import BIASED

ROWS = (1, 8, 13, 33, 250)


def refuse(*_: object, **__: object) -> None:
    raise AssertionError("measured or computed where it must not be")


def capture(x, weight, bias) -> tuple[torch.cuda.CUDAGraph, dict[int, torch.Tensor]]:
    """A graph of ``linear`` on the first rows of x, for all of :data:`ROWS`, and its results."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = {m: linear(x[:m], weight, bias) for m in ROWS}
    return graph, results


def assert_replays(graph, results, x, weight, bias) -> None:
    for seed in range(3):
        x.copy_(x[torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).cuda()])
        graph.replay()
        expected = sequential_k(x, weight, bias)
        for m, out in results.items():
            assert_same_bits(out, expected[:m], f"{m} rows")


@pytest.mark.parametrize("dtype", HALVES)
def test_a_tuned_gemm_can_be_captured(dtype, untuned, monkeypatch):
    x, weight, bias = operands("cancelling", 250, 384, 1024, dtype)
    prepare(weight, 256, BIASED, sizes=ROWS)
    for m in ROWS:
        linear(x[:m], weight, bias)
    monkeypatch.setattr(autotune, "tune", refuse)
    assert_replays(*capture(x, weight, bias), x, weight, bias)


def test_a_gemm_never_seen_before_is_captured_in_triton(untuned, monkeypatch):
    x, weight, bias = operands("cancelling", 250, 392, 1040, torch.bfloat16)
    for m in ROWS:
        triton_gemm.mm(x[:m], weight.t(), bias)
    monkeypatch.setattr(autotune, "tune", refuse)
    if cuda.cublaslt:
        monkeypatch.setattr(cuda.cublaslt.Matmul, "run", refuse)
    graph, results = capture(x, weight, bias)
    assert not any(cuda.dispatcher._tuned.values())
    assert not cuda.dispatcher._uses, "a capture is no use"
    assert_replays(graph, results, x, weight, bias)


def test_a_gemm_tuned_by_an_earlier_process_can_be_captured_at_its_first_use(untuned, monkeypatch):
    x, weight, bias = operands("cancelling", 250, 384, 1024, torch.bfloat16)
    prepare(weight, 256, BIASED, sizes=ROWS)
    for m in ROWS:
        triton_gemm.mm(x[:m], weight.t(), bias)
    cuda.dispatcher._tuned.clear()
    cuda.dispatcher._plans.clear()
    cuda._stored.cache_clear()
    cuda._matmul_of.cache_clear()
    if cuda.cublaslt:
        cuda.cublaslt.handle.cache_clear()
    monkeypatch.setattr(autotune, "tune", refuse)
    prepare(weight, 256, BIASED, sizes=ROWS)
    assert cuda.dispatcher._tuned[problem_of(x, weight.t(), bias)]
    assert_replays(*capture(x, weight, bias), x, weight, bias)


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_one_compiled_function_serves_all_batch_sizes(dtype):
    from torch._dynamo.testing import CompileCounterWithBackend

    x, first, bias = operands("cancelling", 300, 384, 1024, dtype)
    _, second, _ = operands("random", 1, 96, 384, dtype)

    def layers(x):
        return torch_op.linear(torch_op.linear(x, first, bias), second)

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(layers, backend=counter, fullgraph=True, dynamic=True)
    expected = layers(x)
    for m in (1, 2, 7, 16, 33, 300):
        assert_same_bits(layers(x[:m]), expected[:m], f"{m} rows, eager")
        assert_same_bits(compiled(x[:m]), expected[:m], f"{m} rows, compiled")
        assert_same_bits(compiled(x[None, -m:])[0], expected[-m:], f"{m} rows of one batch, compiled")
    # Cases of their own for PyTorch: one row, a third dimension, all rows.
    assert counter.frame_count <= 5
    torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [*HALVES, torch.float32])
def test_the_operator_is_one_that_pytorch_can_compile(dtype):
    x, weight, bias = operands("random", 7, 96, 384, dtype)
    for given in ((x, weight, bias), (x, weight), (x[None].expand(2, 7, 384), weight, bias), (x[0], weight)):
        torch.library.opcheck(torch.ops.vllm_batch_invariant.linear.default, given)

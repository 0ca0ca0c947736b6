"""GEMMs on a GPU whose K is added in slices: every way to serve them has the bits of the tree."""

import pytest
import torch

from tests.assertions import ROW_COUNTS, assert_same_bits
from tests.ops.linear.cases import HALVES, KINDS, launch, operands, sequential_k
from vllm_batch_invariant.ops.all_reduce import cpu
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.linear import LinearReduction, MatmulSpec, linear, prepare

pytest.importorskip("triton")

from vllm_batch_invariant.ops.linear import cuda, triton_gemm
from vllm_batch_invariant.ops.linear.problem import problem_of
from vllm_batch_invariant.ops.linear.schedule import NARROW_TILES

SHAPES = ((896, 4864), (4096, 4096), (1280, 8192), (768, 1056))
"""(N, K); of the last no slice is a multiple of a narrow tile's step."""


def tree(x: torch.Tensor, weight: torch.Tensor, k_slices: int) -> torch.Tensor:
    """The slices by the kernel that others are compared with, added on the CPU."""
    parts = [sequential_k(*of_slice) for of_slice in zip(x.chunk(k_slices, 1), weight.chunk(k_slices, 1), strict=True)]
    return cpu.add_ranks(torch.stack(parts).cpu(), tree=True).to(x.device)


@pytest.mark.parametrize("k_slices", [2, 4])
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_number_of_rows_has_the_bits_of_the_tree(n: int, k: int, k_slices: int, untuned) -> None:
    x, weight, bias = operands("random", 1000, n, k, torch.bfloat16)
    wanted = tree(x, weight, k_slices)
    for m in (1, 3, 64, 1000):
        assert_same_bits(linear(x[:m], weight, k_slices=k_slices), wanted[:m], f"{m} rows, untuned")
    prepare(weight, 1024, MatmulSpec(k_slices=k_slices), sizes=(1, 2, 4, 8))
    for m in ROW_COUNTS:
        assert_same_bits(linear(x[:m], weight, k_slices=k_slices), wanted[:m], f"{m} rows")
        assert_same_bits(linear(x[1000 - m :], weight, k_slices=k_slices), wanted[1000 - m :], f"last {m} rows")
    assert_same_bits(linear(x, weight, bias, k_slices), wanted + bias)
    assert (sequential_k(x, weight) != wanted).double().mean() > 0.05
    tuned = cuda.tuned_schedules(problem_of(x, weight.t(), None, MatmulSpec(k_slices=k_slices)))
    for bucket, schedule in sorted(tuned.items()):
        print(n, k, k_slices, bucket, schedule.served_by, schedule.refused, schedule.microseconds)
        assert not schedule.refused


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("k_slices", [2, 4, 8])
def test_a_narrow_tile_adds_the_whole_tree(k_slices: int, dtype: torch.dtype, kind: str) -> None:
    if not Gpu.of(0).has_wgmma:
        pytest.skip("needs a Hopper GPU")
    n, k = 896, 2048
    x, weight, _ = operands(kind, 70, n, k, dtype)
    wanted, reduction = tree(x, weight, k_slices), LinearReduction.of_device("cuda", n, k, dtype, k_slices)
    for tile in NARROW_TILES:
        for m in (1, 16, 33, 70):
            out = torch.empty(m, n, dtype=dtype, device="cuda")
            triton_gemm.gemm_sm90_swap_ab(x[:m], weight.t(), None, out, reduction, tile)
            assert_same_bits(out, wanted[:m], f"{tile}, {m} rows")
        whole = launch(triton_gemm.gemm_sm90_swap_ab, tile, x, weight.t())
        assert (whole != wanted).double().mean() > 0.05


def test_a_gemm_in_slices_can_be_captured(untuned) -> None:
    x, weight, _ = operands("random", 250, 384, 1024, torch.bfloat16)
    prepare(weight, 256, MatmulSpec(k_slices=2))
    rows = (1, 8, 33, 250)
    for m in rows:
        linear(x[:m], weight, k_slices=2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = {m: linear(x[:m], weight, k_slices=2) for m in rows}
    x.copy_(x.flip(0))
    graph.replay()
    for m, out in results.items():
        assert_same_bits(out, tree(x, weight, 2)[:m], f"{m} rows")

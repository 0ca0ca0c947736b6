"""DeepGEMM on a Hopper: where it serves, with the bits of the tiles here."""

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.linear import cuda as gemms
from vllm_batch_invariant.ops.quantise import quantise
from vllm_batch_invariant.ops.scaled_linear import GROUP, WGMMA, ScaledLinearReduction, cuda, prepare, scaled_linear
from vllm_batch_invariant.ops.scaled_linear.deep_gemm import deep_gemm
from vllm_batch_invariant.ops.scaled_linear.library import operand_sets, problem_of
from vllm_batch_invariant.ops.scaled_linear.reduction import E4M3
from vllm_batch_invariant.ops.scaled_linear.sm90_schedule import sm90_schedule

SHAPES = ((6144, 4096), (4096, 4096), (24_576, 4096), (4096, 12_288))
"""(N, K) of an 8B model."""
SIZES = (1, 32, 64, 100, 128, 256, 512)


@pytest.fixture(scope="module", autouse=True)
def used() -> None:
    device = torch.cuda.current_device()
    if Gpu.of(device).fp8_mma != WGMMA or not gemms._uses_cublaslt(torch.device("cuda", device)):
        pytest.skip("needs a Hopper and nvmath-python")
    try:
        from vllm.utils import deep_gemm as of_vllm
    except ImportError:
        pytest.skip("needs vLLM's DeepGEMM")
    if not of_vllm.is_deep_gemm_supported():
        pytest.skip("needs vLLM's DeepGEMM")
    from vllm_batch_invariant.integration.layers import deep_gemm as integration

    integration.use()


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_where_it_serves_it_has_the_bits_of_the_tiles_here(n: int, k: int, monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    device = torch.device("cuda", torch.cuda.current_device())
    problem = problem_of(n, k, torch.bfloat16, device, False)
    _, _, weight, weight_scale = next(iter(operand_sets(problem, 4, device)))
    measured = {}
    measure = deep_gemm._measured
    monkeypatch.setattr(deep_gemm, "_measured", lambda *given: measured.setdefault(given[1], measure(*given)))
    prepare(weight, torch.bfloat16, True, False, 8192, SIZES)
    with capsys.disabled():
        for m, found in measured.items():
            print(f"N={n} K={k} M={m}: {found}")
    assert measured
    assert all(found["microseconds"] for found in measured.values()), "other bits"
    reduction = ScaledLinearReduction.of(k, torch.bfloat16, E4M3, True, WGMMA)
    for m in (*SIZES, 8192, 16_384, 8192 + 300):
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        codes, scale = quantise(x, codes=E4M3, group=GROUP)
        tile = sm90_schedule(m, n, k, Gpu.of(device.index))
        expected = cuda.scaled_linear(codes, scale, weight, weight_scale, None, reduction, tile)
        made = scaled_linear(codes, scale, weight, weight_scale, None, torch.bfloat16)
        assert_same_bits(made, expected, f"{m} rows")


def test_a_graph_that_is_replayed_reads_new_codes_and_scales() -> None:
    n, k = SHAPES[1]
    device = torch.device("cuda", torch.cuda.current_device())
    problem = problem_of(n, k, torch.bfloat16, device, False)
    first, second, _ = operand_sets(problem, 64, device)
    prepare(first[2], torch.bfloat16, True, False, 8192, SIZES)
    deep_gemm._serves[problem].add(64)
    given = [one.clone() for one in first]
    scaled_linear(*given, None, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_linear(*given, None, torch.bfloat16)
    reduction = ScaledLinearReduction.of(k, torch.bfloat16, E4M3, True, WGMMA)
    for operands in (first, second):
        for into, one in zip(given, operands, strict=True):
            into.copy_(one)
        graph.replay()
        tile = sm90_schedule(64, n, k, Gpu.of(device.index))
        assert_same_bits(out, cuda.scaled_linear(*operands, None, reduction, tile))

"""cuBLASLt's products of e4m3 in blocks on a Hopper: where it serves, with the bits of the tiles here."""

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.linear import cuda as gemms
from vllm_batch_invariant.ops.quantise import cuda as quantising
from vllm_batch_invariant.ops.quantise import quantise
from vllm_batch_invariant.ops.scaled_linear import GROUP, WGMMA, ScaledLinearReduction, cuda, prepare, scaled_linear
from vllm_batch_invariant.ops.scaled_linear import library as library_module
from vllm_batch_invariant.ops.scaled_linear.library import (
    ScaledTuner,
    library,
    operand_sets,
    problem_of,
    run_library,
)
from vllm_batch_invariant.ops.scaled_linear.reduction import E4M3
from vllm_batch_invariant.ops.scaled_linear.sm90_schedule import sm90_schedule

SHAPES = ((6144, 4096), (4096, 4096), (4096, 12_288))
"""(N, K) of an 8B model."""
ROWS = (255, 256, 257, 260, 300, 384, 500, 512, 1000, 1024, 1337, 1536, 2044, 2048)
MAX_M = 2048


@pytest.fixture(scope="module", autouse=True)
def cublaslt() -> None:
    device = torch.cuda.current_device()
    if Gpu.of(device).fp8_mma != WGMMA or not gemms._uses_cublaslt(torch.device("cuda", device)):
        pytest.skip("needs a Hopper and nvmath-python")


@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_every_number_of_rows_has_the_bits_of_the_tiles_here(n: int, k: int, capsys) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    problem = problem_of(n, k, torch.bfloat16, device, False)
    sets = list(operand_sets(problem, MAX_M, device))
    prepare(sets[0][2], torch.bfloat16, True, False, MAX_M, ROWS)
    tuned = library._tuned[problem]
    with capsys.disabled():
        for bucket, found in sorted(tuned.items()):
            times = ", ".join(f"{name} {time:.1f} us" for name, time in found.microseconds.items())
            served = found.algorithm.about if found.algorithm else "own tiles"
            print(f"N={n} K={k} up to {bucket}: {served}; {times}; refused: {list(found.refused)}")
    reduction = ScaledLinearReduction.of(k, torch.bfloat16, E4M3, True, WGMMA)
    for number, (codes, scale, weight, weight_scale) in enumerate(sets):
        for m in ROWS:
            rows = codes[-m:].contiguous(), scale[-m:].contiguous(), weight, weight_scale
            tile = sm90_schedule(m, n, k, Gpu.of(device.index))
            expected = cuda.scaled_linear(*rows, None, reduction, tile)
            assert_same_bits(scaled_linear(*rows, None, torch.bfloat16), expected, f"set {number}, {m} rows")


def test_odd_numbers_of_rows_and_more_than_were_compared_have_the_bits_of_the_tiles_here(monkeypatch) -> None:
    n, k = SHAPES[1]
    device = torch.device("cuda", torch.cuda.current_device())
    reduction = ScaledLinearReduction.of(k, torch.bfloat16, E4M3, True, WGMMA)
    _, _, weight, weight_scale = next(iter(operand_sets(problem_of(n, k, torch.bfloat16, device, False), 4, device)))
    prepare(weight, torch.bfloat16, True, False, 8192)
    served: list[int] = []
    monkeypatch.setattr(
        library_module, "run_library", lambda *given: served.append(len(given[2])) or run_library(*given)
    )
    for m in (257, 1337, 8191, 8193, 16_384, 20_001):
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16)
        codes, scale = quantise(x, codes=E4M3, group=GROUP)
        served.clear()
        made = scaled_linear(codes, scale, weight, weight_scale, None, torch.bfloat16)
        expected = cuda.scaled_linear(
            codes, scale, weight, weight_scale, None, reduction, sm90_schedule(m, n, k, Gpu.of(device.index))
        )
        assert_same_bits(made, expected, f"{m} rows")
        assert sum(served) == -(-m // 4) * 4, f"{m} rows: {served}"


def test_a_graph_that_is_replayed_reads_new_codes_and_scales() -> None:
    n, k = SHAPES[1]
    device = torch.device("cuda", torch.cuda.current_device())
    problem = problem_of(n, k, torch.bfloat16, device, False)
    first, second, _ = operand_sets(problem, 1024, device)
    prepare(first[2], torch.bfloat16, True, False, MAX_M)
    given = [one.clone() for one in first]
    scaled_linear(*given, None, torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = scaled_linear(*given, None, torch.bfloat16)
    for operands in (first, second):
        for into, one in zip(given, operands, strict=True):
            into.copy_(one)
        graph.replay()
        assert_same_bits(out, scaled_linear(*operands, None, torch.bfloat16))


def test_another_scale_of_one_group_of_one_row_is_refused() -> None:
    from vllm_batch_invariant.ops.linear import cublaslt
    from vllm_batch_invariant.ops.scaled_linear import sm90_kernel

    n, k = SHAPES[1]
    device = torch.device("cuda", torch.cuda.current_device())
    problem = problem_of(n, k, torch.bfloat16, device, False)

    def own(codes, scale, weight, weight_scale, out):
        tile = sm90_schedule(len(codes), n, k, Gpu.of(device.index))
        return sm90_kernel.scaled_gemm_sm90(codes, scale, weight, weight_scale, None, out, tile)

    tuner = ScaledTuner(problem, cublaslt.Matmul(problem), 512, own)
    ms = tuner.ms_to_verify(512, ())
    assert all(m % quantising.ROWS == 0 for m in ms)
    assert tuner.verify_bitwise(tuner.run_base, ms)

    def planted(rows):
        codes, scale, weight, weight_scale = rows
        other = scale.clone()
        other[-1, 3] *= 1 + 2**-10
        return tuner.run_base((codes, other, weight, weight_scale))

    assert not tuner.verify_bitwise(planted, ms)

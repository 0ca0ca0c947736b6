"""Codes of rows and products of codes on a GPU have the bits of a CPU, whatever rows and tiles there are."""

import pytest
import torch

from tests.assertions import DTYPES, assert_same_bits
from vllm_batch_invariant.ops.quantise import quantise
from vllm_batch_invariant.ops.scaled_linear import LARGEST_K, ScaledLinearReduction, cuda, scaled_linear
from vllm_batch_invariant.ops.scaled_linear.schedule import SCHEDULES

SHAPES = ((896, 4864), (4096, 4096), (1280, 8192), (100, 304), (65, 131), (1, 512))
"""(N, K), some with rows that are not aligned."""
ROWS = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1000, 4097)


def layer(n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A weight, its scales and a bias."""
    draw = torch.Generator().manual_seed(n + k)
    weight = torch.randint(-128, 128, (n, k), generator=draw, dtype=torch.int8)
    return weight, 10 ** (torch.rand(n, generator=draw) - 3), torch.randn(n, generator=draw).to(dtype)


def rows(count: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    """Of several sizes, one with an outlier."""
    draw = torch.Generator().manual_seed(k)
    x = torch.randn(count, k, generator=draw) * 10 ** (4 * torch.rand(count, 1, generator=draw) - 2)
    x[count // 2, k // 3] = 1e4
    return x.to(dtype)


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_gpu_has_the_bits_of_a_cpu(n, k, dtype, static):
    weight, weight_scale, bias = layer(n, k, dtype)
    x, given = rows(ROWS[-1] if n * k < 1e6 else 200, k, dtype), torch.tensor([0.037]) if static else None
    codes, scales = quantise(x, given)
    expected = scaled_linear(codes, scales, weight, weight_scale, bias, dtype)
    on_gpu = [one.cuda() for one in (weight, weight_scale, bias)]
    for count in [count for count in ROWS if count <= len(x)]:
        found = quantise(x[-count:].cuda(), None if given is None else given.cuda())
        assert_same_bits(found[0].cpu(), codes[-count:], f"{count} rows")
        assert_same_bits(found[1].cpu(), scales[-count:], f"{count} rows")
        assert_same_bits(scaled_linear(*found, *on_gpu, dtype).cpu(), expected[-count:], f"{count} rows")


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_no_tile_moves_a_bit(schedule):
    weight, weight_scale, bias = layer(4096, 4096, torch.bfloat16)
    codes, scales = quantise(rows(200, 4096, torch.bfloat16))
    expected = scaled_linear(codes, scales, weight, weight_scale, bias, torch.bfloat16)
    operands = [one.cuda() for one in (codes, scales, weight, weight_scale, bias)]
    found = cuda.scaled_linear(*operands, ScaledLinearReduction.of(4096, torch.bfloat16), schedule)
    assert_same_bits(found.cpu(), expected)


def test_the_largest_sums_are_exact():
    codes = torch.full((17, LARGEST_K), -128, dtype=torch.int8, device="cuda")
    ones = torch.ones(17, device="cuda")
    found = scaled_linear(codes, ones, codes, ones, None, torch.float32)
    assert (found == float(torch.tensor(LARGEST_K * 128**2).float())).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_vllms_quantiser_gives_the_same_codes(dtype):
    ops = pytest.importorskip("vllm._custom_ops")
    x = rows(300, 4096, dtype).cuda()
    for given in (None, torch.tensor([0.037], device="cuda")):
        theirs, scale, _ = ops.scaled_int8_quant(x, given)
        codes, scales = quantise(x, given)
        assert_same_bits(codes, theirs)
        assert given is not None or torch.equal(scales, scale[:, 0])


@pytest.mark.parametrize("count", [1, 16, 33, 200, 1000])
def test_vllms_cutlass_gives_the_same_products_without_a_bias(count):
    ops = pytest.importorskip("vllm._custom_ops")
    weight, weight_scale, _ = (one.cuda() for one in layer(4096, 4096, torch.bfloat16))
    codes, scales = quantise(rows(count, 4096, torch.bfloat16).cuda())
    theirs = ops.cutlass_scaled_mm(codes, weight.t(), scales[:, None], weight_scale[:, None], torch.bfloat16)
    assert_same_bits(scaled_linear(codes, scales, weight, weight_scale, None, torch.bfloat16), theirs)

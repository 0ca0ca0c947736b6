"""Codes that a GPU makes by its conversion, and by a division of fused multiply-adds, are those of IEEE 754."""

import pytest
import torch

from tests.assertions import assert_same_bits

pytest.importorskip("triton")

import triton
import triton.language as tl

from vllm_batch_invariant.ops.common.nvidia_gpus import converts_e4m3
from vllm_batch_invariant.ops.quantise import cuda
from vllm_batch_invariant.ops.quantise.reduction import E4M3, QuantiseReduction
from vllm_batch_invariant.ops.quantise.triton_kernels import quotient


@triton.jit
def _count_other_quotients(counts_ptr, X_BITS: tl.constexpr, CORRECTS: tl.constexpr, BLOCK: tl.constexpr):
    """Of every x with so many bits behind its first one, over each of BLOCK significands of a step."""
    step = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) | 0x3F800000).to(tl.float32, bitcast=True)
    inverse = tl.div_rn(tl.full((BLOCK,), 1.0, tl.float32), step)
    count = tl.zeros((BLOCK,), tl.int32)
    for significand in range(1 << X_BITS):
        x = tl.zeros((BLOCK,), tl.float32) + 1.0 + significand.to(tl.float32) / (1 << X_BITS)
        found = quotient(x, step) if CORRECTS else x * inverse
        count += (found != tl.div_rn(x, step)).to(tl.int32)
    tl.store(counts_ptr + tl.program_id(0), tl.sum(count))


def other_quotients(x_bits: int, corrects: bool = True) -> int:
    counts = torch.zeros(1 << 13, dtype=torch.int32, device="cuda")
    _count_other_quotients[len(counts),](counts, x_bits, corrects, 1024, enable_fp_fusion=False)
    return int(counts.sum(dtype=torch.int64))


@pytest.mark.gpu
@pytest.mark.parametrize("x_bits", [7, 10], ids=["bf16", "fp16"])
def test_every_quotient_of_two_significands_is_rounded_as_ieee_754_says(x_bits: int) -> None:
    assert other_quotients(x_bits) == 0
    assert other_quotients(x_bits, corrects=False) > 1 << x_bits + 18


@pytest.mark.gpu
@pytest.mark.parametrize("group", [128, None], ids=["groups", "rows"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_codes_by_hardware_have_the_bits_of_those_by_integers(
    dtype: torch.dtype, group: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of rows of every size, down to subnormal numbers, with numbers between two codes, infinities, NaN and zeros."""
    draw = torch.Generator("cuda").manual_seed(7)
    x = torch.randn(3000, 1000, generator=draw, device="cuda", dtype=torch.float32)
    x *= 2.0 ** torch.linspace(-149, 127, len(x), device="cuda")[:, None]
    codes = torch.arange(1000, device="cuda") % 126 + 1
    between = (codes.to(torch.uint8).view(E4M3).float() + (codes - 1).to(torch.uint8).view(E4M3).float()) / 2
    between[-1] = 448
    x[::3] = between * 2.0 ** torch.linspace(-140, 110, len(x[::3]), device="cuda")[:, None].round()
    x[5, 7], x[8, 130], x[11] = torch.inf, torch.nan, 0
    rows, reduction = x.to(dtype), QuantiseReduction.of_dtype(dtype, E4M3, group)
    found = cuda.quantise(rows, None, reduction)
    assert converts_e4m3(torch.cuda.get_device_capability())
    monkeypatch.setattr(cuda, "converts_e4m3", lambda _: False)
    expected = cuda.quantise(rows, None, reduction)
    assert_same_bits(found[0].view(torch.uint8), expected[0].view(torch.uint8), "codes")
    assert_same_bits(found[1].view(torch.int32), expected[1].view(torch.int32), "scales")

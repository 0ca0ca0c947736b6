"""What a kernel does with codes of four bits in its registers is the definition: every code, zero point and scale."""

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops.formats import MXFP4, NVFP4, integers
from vllm_batch_invariant.ops.formats.fp4 import by_steps
from vllm_batch_invariant.ops.formats.layouts import pack

BASES = {torch.bfloat16: 0x4300, torch.float16: 0x6400}
"""128 and 1024, whose lowest bits are a code's."""


@pytest.mark.parametrize("dtype", BASES)
def test_the_difference_is_exact_and_the_product_rounded_once(dtype: torch.dtype) -> None:
    scales = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    scales = scales[scales.isfinite()][:, None]
    codes = torch.arange(32, dtype=torch.int16) % 16
    words = pack(codes, 4).expand(len(scales), -1)
    base = BASES[dtype]
    with_base = (codes | base).view(dtype)
    for zero in range(17):
        less = with_base - torch.tensor(zero | base, dtype=torch.int16).view(dtype)
        assert torch.equal(less.double(), codes.double() - zero)
        stored = words, scales, torch.full(scales.shape, zero, dtype=torch.uint8)
        wanted = integers(4, 32, True).decode(stored, torch.empty(len(scales), 32, dtype=dtype))
        assert_same_bits(less * scales, wanted)
    symmetric = integers(4, 32).decode(stored[:2], torch.empty_like(wanted))
    assert not torch.equal(symmetric, wanted), "the zero point shows"
    eight = torch.tensor(8 | base, dtype=torch.int16).view(dtype)
    assert_same_bits((with_base - eight) * scales, symmetric)
    assert not torch.equal(with_base * scales - eight * scales, symmetric), "a product before the difference is another"


def test_a_code_of_e2m1_moved_to_its_place_times_powers_of_two_is_exact() -> None:
    """Of both nibbles of a byte, with all 255 scales: one product up to 2^0, two of any."""
    codes = torch.arange(32, dtype=torch.uint8) % 16
    moved = {}
    for place, factor in ((0, 0x1040), (4, 0x104)):
        nibble = codes.int() << place
        bits = (nibble * factor) & 0x81C0
        moved[place] = bits.to(torch.int16).view(torch.bfloat16)
    assert_same_bits(moved[0], moved[4])
    scales = torch.arange(255, dtype=torch.int32)[:, None]
    stored = (codes[::2] | codes[1::2] << 4).expand(255, -1), scales.to(torch.uint8)
    wanted = MXFP4.decode(stored, torch.empty(255, 32, dtype=torch.bfloat16))
    at_most_one = scales < 128
    power = (scales * 0x80 + 0x3F00).where(at_most_one, 0).to(torch.int16).view(torch.bfloat16)
    assert_same_bits((moved[0] * power)[at_most_one[:, 0]], wanted[at_most_one[:, 0]])
    any_power = (scales * 0x80).clamp(min=0x40).to(torch.int16).view(torch.bfloat16)
    assert_same_bits(moved[0] * 2.0**126 * any_power, wanted)
    assert not torch.equal(moved[0] * any_power, wanted)


def test_a_code_of_e2m1_as_a_power_of_two_times_a_step_is_the_product_with_both_scales() -> None:
    """Of all scales, and global scales of many sizes, as a kernel for Hopper computes it."""
    scales = torch.arange(256, dtype=torch.uint8)
    scales = scales[scales & 127 != 127].view(torch.float8_e4m3fn)[:, None]
    codes = torch.arange(16, dtype=torch.uint8)
    packed = (codes[::2] | codes[1::2] << 4).expand(len(scales), -1)
    moved = (codes.int() * 0x1040) & 0x81C0
    has_three = ((moved >> 1) | (moved >> 2)) & moved & 0x40
    power = (moved ^ has_three).to(torch.int16).view(torch.bfloat16) * 2.0**126
    mask = (has_three >> 6) * 0xFFFF
    for exponent in range(-110, 100, 7):
        of_rows = torch.full((len(scales), 1), 1.2345678 * 2.0**exponent)
        _, steps = by_steps((packed, scales, of_rows), torch.bfloat16)
        small, large = (steps.view(torch.int16).int() & 0xFFFF).unbind(-1)
        step = ((mask & large[:, None]) | (~mask & small[:, None])).to(torch.int16).view(torch.bfloat16)
        wanted = NVFP4.decode((packed, scales, of_rows), torch.empty(len(scales), 16, dtype=torch.bfloat16))
        assert_same_bits(power * step, wanted)
    assert not torch.equal(power * small.to(torch.int16).view(torch.bfloat16)[:, None], wanted), "both steps are needed"

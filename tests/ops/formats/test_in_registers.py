"""What a kernel does with codes of four bits in its registers is the definition: every code, zero point and scale."""

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.formats.ptx_registers import evaluated, halves
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


def decoded_in_ptx(
    codes: torch.Tensor, dtype: torch.dtype, kind: str, *groups: torch.Tensor, place: int = 1
) -> torch.Tensor:
    """Codes uint8 [4] as a kernel for Hopper decodes them in one place of its words, with what belongs to a group,
    int64 [rows] each: of ``dtype`` [rows, 4].
    """
    triton = pytest.importorskip("triton")
    from vllm_batch_invariant.ops.linear import sm90_packed

    ptx = sm90_packed._of_16_in_ptx(getattr(triton.language, str(dtype).removeprefix("torch.")), kind)
    first, second = ((int(codes[at]) | int(codes[at + 1]) << 4) << 8 * place for at in (0, 2))
    of_groups = {f"_{10 + 4 * number}": one for number, one in enumerate(groups)}
    found = evaluated(ptx, _2=first, _3=second, _6=place * 0x1111 + 0x4400, **of_groups)
    (low, of_second), (high, also) = (halves(found[name], dtype) for name in ("$0", "$1"))
    return torch.stack((low, high, of_second, also), -1)


def every_code(dtype: torch.dtype, kind: str, *groups: torch.Tensor) -> torch.Tensor:
    """The same of all sixteen codes, four at a time, each four in another place: [rows, 16]."""
    quarters = torch.arange(16, dtype=torch.uint8).view(4, 4)
    found = (decoded_in_ptx(four, dtype, kind, *groups, place=place) for place, four in enumerate(quarters))
    return torch.cat(tuple(found), -1)


CODES = torch.arange(16, dtype=torch.uint8)
PACKED = CODES[::2] | CODES[1::2] << 4


@pytest.mark.parametrize("dtype", BASES)
def test_hoppers_instructions_give_every_integer(dtype: torch.dtype) -> None:
    """With every zero point."""
    scales = torch.linspace(0.01, 3, 50).to(dtype)[:, None]
    words = pack(CODES.to(torch.int16), 4).expand(len(scales), -1)
    of_scales = (scales[:, 0].view(torch.int16).long() & 0xFFFF) * 0x10001
    for zero in range(17):
        stored = words, scales, torch.full(scales.shape, zero, dtype=torch.uint8)
        wanted = integers(4, 16, True).decode(stored, torch.empty(len(scales), 16, dtype=dtype))
        of_zeros = torch.full_like(of_scales, (zero | BASES[dtype]) * 0x10001)
        assert_same_bits(every_code(dtype, "int4", of_zeros, of_scales), wanted)


def test_hoppers_instructions_give_every_number_of_mxfp4() -> None:
    """With all 255 scales: by one product up to 2^0, by two of any; and one product of all is another."""
    scales = torch.arange(255)
    stored = PACKED.repeat(2).expand(255, -1), scales.to(torch.uint8)[:, None]
    wanted = MXFP4.decode(stored, torch.empty(255, 32, dtype=torch.bfloat16))[:, :16]
    at_most_one = scales < 128
    power = (scales * 0x00800080 + 0x3F003F00)[at_most_one]
    assert_same_bits(every_code(torch.bfloat16, "e2m1", power), wanted[at_most_one])
    any_power = (scales * 0x00800080).clamp(min=0x00400040)
    assert_same_bits(every_code(torch.bfloat16, "wide e2m1", any_power), wanted)
    in_one = every_code(torch.bfloat16, "e2m1", any_power[~at_most_one])
    assert not torch.equal(in_one, wanted[~at_most_one]), "a product more is needed"


def test_hoppers_instructions_give_every_number_of_nvfp4_with_both_scales() -> None:
    """With all scales, and global scales of many sizes; by one of both steps it is another. A zero has no sign."""
    pytest.importorskip("triton")
    from vllm_batch_invariant.ops.linear import sm90_packed

    scales = torch.arange(256, dtype=torch.uint8)
    scales = scales[scales & 127 != 127].view(torch.float8_e4m3fn)[:, None]
    packed = PACKED.expand(len(scales), -1)
    for exponent in (*range(-110, 110, 7), 110):
        mantissa = 1.0 if exponent == 110 else 1.2345678  # the largest that is let through
        of_rows = torch.full((len(scales), 1), mantissa * 2.0**exponent)
        _, steps = by_steps((packed, scales, of_rows), torch.bfloat16)
        one, three_halves = (steps.view(torch.int16).long() & 0xFFFF).unbind(-1)
        with_more = evaluated(sm90_packed._WITH_MORE_IN_PTX.value, _1=one | three_halves << 16)["$0"]
        wanted = NVFP4.decode((packed, scales, of_rows), torch.empty(len(scales), 16, dtype=torch.bfloat16))
        assert_same_bits(every_code(torch.bfloat16, "steps", with_more) + 0.0, wanted + 0.0)
    of_one = evaluated(sm90_packed._WITH_MORE_IN_PTX.value, _1=one | one << 16)["$0"]
    assert not torch.equal(every_code(torch.bfloat16, "steps", of_one), wanted), "both steps are needed"

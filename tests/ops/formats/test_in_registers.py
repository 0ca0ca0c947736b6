"""What a kernel does with codes of four bits in its registers is the definition: every code, zero point and scale."""

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops.formats import integers
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

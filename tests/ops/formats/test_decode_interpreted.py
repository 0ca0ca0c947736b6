"""The kernels that decode weights on a GPU, in Triton's interpreter, have the bits of the definition: of integers in
fp16, because the interpreter does not round to bf16 as a GPU does, and of FP4 in fp32.
"""

from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops.formats.fp4 import MXFP4, NVFP4, by_steps, decode_mxfp4_on_gpu, decode_steps_on_gpu
from vllm_batch_invariant.ops.formats.integers import INTEGERS, decode_on_gpu
from vllm_batch_invariant.ops.formats.record import Format

KEPT = [one for one in INTEGERS if "act-order" not in one.name]


def random(b_format: Format, n: int, k: int, dtype: torch.dtype) -> tuple[list[torch.Tensor], dict[str, Any]]:
    """What is stored, of every code, zero point and size of a scale, and how it is decoded."""
    options = b_format.decode.keywords
    draw = torch.Generator().manual_seed(n)
    words = torch.randint(-(2**31), 2**31, (n, k // b_format.packing), generator=draw).int()
    groups = 1 if "channel" in b_format.name else k // b_format.group
    scales = torch.randn(n, groups, generator=draw) * 2.0 ** torch.randint(-30, 12, (n, groups), generator=draw)
    zeros = [torch.randint(0, (1 << options["bits"]) + 1, (n, groups), generator=draw).clamp(max=255).to(torch.uint8)]
    return [words, scales.to(dtype), *(zeros if options["zeros"] else [])], options


@pytest.mark.parametrize("b_format", KEPT, ids=lambda one: one.name)
def test_the_kernel_has_the_bits_of_the_definition(b_format: Format) -> None:
    dtype = torch.float16
    for n, k in ((1, 128), (7, 384), (9, 2304)):
        stored, options = random(b_format, n, k, dtype)
        found = decode_on_gpu(stored, torch.full((n, k), torch.nan, dtype=dtype), **options)
        wanted = b_format.decode(stored, torch.empty(n, k, dtype=dtype))
        assert_same_bits(found, wanted)
        if options["zeros"]:
            wrong = [*stored[:2], stored[2] ^ 1]
            assert not torch.equal(decode_on_gpu(wrong, torch.empty_like(found), **options), wanted)


def test_the_kernel_of_mxfp4_has_the_bits_of_the_definition() -> None:
    dtype = torch.float32
    draw = torch.Generator().manual_seed(0)
    for n, k in ((1, 32), (7, 384), (9, 2304)):
        codes = torch.randint(0, 256, (n, k // 2), generator=draw).to(torch.uint8)
        scales = torch.randint(1, 252, (n, k // 32), generator=draw).to(torch.uint8)
        found = decode_mxfp4_on_gpu((codes, scales), torch.full((n, k), torch.nan, dtype=dtype))
        assert_same_bits(found, MXFP4.decode((codes, scales), torch.empty(n, k, dtype=dtype)))
        other = decode_mxfp4_on_gpu((codes, scales + 1), torch.empty_like(found))
        assert not torch.equal(other, found)


def test_the_kernel_of_nvfp4_by_steps_has_the_bits_of_nvfp4() -> None:
    dtype = torch.float32
    draw = torch.Generator().manual_seed(0)
    for n, k in ((1, 16), (7, 400), (9, 2304)):
        codes = torch.randint(0, 256, (n, k // 2), generator=draw).to(torch.uint8)
        scales = torch.randint(-447, 448, (n, k // 16), generator=draw).to(torch.float8_e4m3fn)
        of_rows = torch.rand(n, 1, generator=draw) * 1e-3
        stored = by_steps((codes, scales, of_rows), dtype)
        found = decode_steps_on_gpu(stored, torch.full((n, k), torch.nan, dtype=dtype))
        assert_same_bits(found, NVFP4.decode((codes, scales, of_rows), torch.empty(n, k, dtype=dtype)))
        other = decode_steps_on_gpu((codes, stored[1].roll(1, 1)), torch.empty_like(found))
        assert not torch.equal(other, found)

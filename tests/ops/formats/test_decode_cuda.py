"""A GPU decodes every format to the bits that a CPU gives, which are compared with fp64 there."""

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.formats.cases import DTYPES, PACKED, decoded, finite, random_stored
from vllm_batch_invariant.ops.formats import FP8, NVFP4, Format, integers
from vllm_batch_invariant.ops.formats.layouts import pack


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("format", PACKED, ids=lambda one: one.name)
def test_a_gpu_decodes_as_a_cpu_does(format: Format, dtype: torch.dtype) -> None:
    stored = random_stored(format, n=300)
    found = decoded(format, [tensor.cuda() for tensor in stored], dtype, 256)
    assert_same_bits(found.cpu(), decoded(format, stored, dtype, 256))
    on_gpu = format.stored(torch.randn(48, 256, device="cuda").to(dtype))
    assert format.is_stored_as(on_gpu, dtype)
    assert format.flaw(on_gpu) == ""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_scales_of_every_size_are_the_same_on_a_gpu(dtype: torch.dtype) -> None:
    """Subnormal numbers among them, which a GPU may take for zero."""
    scales, of_rows = finite(dtype, 1)[:, None], finite(torch.float32, 8)[:, None]
    words = pack(torch.arange(32) % 16, 4).expand(len(scales), -1)
    codes = torch.arange(256, dtype=torch.uint8).expand(len(of_rows), -1)
    cases = {
        integers(4, 32): (words, scales),
        FP8: (codes.contiguous().view(torch.float8_e4m3fn), of_rows),
        NVFP4: (codes, codes[:, ::8].contiguous().view(torch.float8_e4m3fn), of_rows),
    }
    for format, stored in cases.items():
        k = stored[0].shape[1] * format.packing
        found, right = (decoded(format, [one.to(at) for one in stored], dtype, k).cpu() for at in ("cuda", "cpu"))
        assert torch.equal(found.isnan(), right.isnan())
        assert_same_bits(found.masked_fill(found.isnan(), 0), right.masked_fill(right.isnan(), 0), format.name)

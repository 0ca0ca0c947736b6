"""Every product of a code and a scale, by a kernel and by the definition."""

import torch
import triton
import triton.language as tl

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops.formats import MXFP4, Format
from vllm_batch_invariant.ops.formats.fp4 import NVFP4_STEPS, by_steps
from vllm_batch_invariant.ops.formats.triton_decode import PackedTile, decoded_tile


@triton.jit
def decode_kernel(words_ptr, scales_ptr, zeros_ptr, out_ptr, N, K, FORMAT: tl.constexpr):
    rows = tl.program_id(0) * 16 + tl.arange(0, 16)
    for start_k in range(0, K, 64):
        tile = decoded_tile(
            words_ptr, scales_ptr, zeros_ptr, rows.to(tl.int64), rows < N, start_k, K, FORMAT, False, 16, 64,
            out_ptr.dtype.element_ty,
        )  # fmt: skip
        columns = start_k + tl.arange(0, 64)
        tl.store(
            out_ptr + rows[:, None] * K + columns[None, :], tile, mask=(rows < N)[:, None] & (columns < K)[None, :]
        )


def every_product(form: Format, dtype: torch.dtype, device: torch.device) -> None:
    """Check rows of 96: of FP4 one for each scale, of integers one for each of many scales, with every zero point and
    every code in each group.
    """
    ramp = torch.arange(8) * 4
    words = torch.stack([((torch.arange(8) + 8 * half) << ramp).sum() for half in range(2)] * 6)
    words = words.to(torch.uint32).view(torch.int32)
    if form is MXFP4:
        n = 255
        tensors = [words.view(torch.uint8).expand(n, -1).contiguous()]
        tensors += [torch.arange(n, dtype=torch.uint8)[:, None].expand(n, 3).contiguous()]
    elif form is NVFP4_STEPS:
        scales = torch.arange(256, dtype=torch.uint8)
        scales = scales[scales & 127 != 127].view(torch.float8_e4m3fn)
        n = len(scales)
        of_rows = torch.linspace(1e-6, 0.3, n)[:, None]
        codes = words.view(torch.uint8).expand(n, -1).contiguous()
        tensors = list(by_steps((codes, scales[:, None].expand(n, 6).contiguous(), of_rows), dtype))
    else:
        tiny = torch.tensor([0.0, 2.0**-24, 2.0**-14, -1.0, 1.0])
        drawn = torch.rand(331, generator=torch.Generator().manual_seed(0)) ** 4
        scales = torch.cat((tiny, drawn)).to(dtype).repeat(17)
        n = len(scales)
        tensors = [words.expand(n, -1).contiguous(), scales[:, None].expand(n, 3).contiguous()]
        tensors += [torch.arange(17, dtype=torch.uint8).repeat_interleave(336)[:, None].expand(n, 3).contiguous()]
    tensors = [tensor.to(device) for tensor in tensors]
    assert form.decode is not None
    right = form.decode(tensors, torch.empty(n, 96, dtype=dtype, device=device))
    found = torch.full_like(right, torch.nan)
    codes, scales, *zeros = tensors
    given = codes.view(torch.int32), scales, zeros[0] if zeros else None, found, n, 96
    decode_kernel[(triton.cdiv(n, 16),)](*given, FORMAT=PackedTile.of(form, dtype), enable_fp_fusion=False)
    assert_same_bits(found, right)
    assert len(right.unique()) > 100

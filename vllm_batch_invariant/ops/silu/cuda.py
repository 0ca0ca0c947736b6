"""``silu(gate) * up`` on a GPU, in Triton: a program has some elements of one row."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.dependent_launch import let_next_begin, wait_for_kernel_before
from ..common.launch import launch
from ..common.triton_rows import aligned
from ..quantise import cuda as quantising
from ..quantise.reduction import QuantiseReduction
from ..quantise.triton_kernels import store_codes
from .triton_kernels import silu_times


@dataclass(frozen=True)
class SiluSchedule:
    """Speed only: no element needs another."""

    block: int = 1024
    """Elements of a program."""
    num_warps: int = 4


_SCHEDULE = SiluSchedule()


@triton.jit(do_not_specialize=["scale_rows"])
def _silu_and_mul_kernel(
    x_ptr, out_ptr, codes_ptr, scale_ptr, scale_rows,
    LENGTH: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, QUANTISE: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    PARTS: tl.constexpr = (LENGTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    # With rows of one from here on, a part of it has the layout that its groups have.
    offs = ((tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK))[None, :]
    mask = offs < LENGTH
    gate = tl.load(x_ptr + row * 2 * LENGTH + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * LENGTH + LENGTH + offs, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    y = silu_times(gate, up, dtype).to(dtype)
    tl.store(out_ptr + row * LENGTH + offs, y, mask=mask)
    if QUANTISE is not None:
        y, first = tl.where(mask, y, 0.0).to(dtype), tl.program_id(0) % PARTS * BLOCK
        rows = row + tl.arange(0, 1)
        store_codes(y, rows, rows >= 0, first, codes_ptr, scale_ptr, scale_rows, LENGTH, GROUP, QUANTISE)


def silu_and_mul(
    x: torch.Tensor, out: torch.Tensor | None = None, codes: QuantiseReduction | None = None
) -> torch.Tensor:
    """See the operation's package; ``out``, packed, is written instead of a new tensor. With ``codes``, of groups, the
    kernel also quantises what it gives, and keeps that with a new tensor (:func:`..quantise.kept`).
    """
    length, is_new, made = x.shape[-1] // 2, out is None, quantising.NOT_QUANTISED
    out = torch.empty(*x.shape[:-1], length, dtype=x.dtype, device=x.device) if is_new else out
    if codes is not None and codes.group is not None and is_new and out.numel():
        made = quantising.quantised(out, codes)
    if out.numel():
        launch(
            _silu_and_mul_kernel,
            out.numel() // length * triton.cdiv(length, _SCHEDULE.block),
            (aligned(x), out, *made.operands),
            on=x,
            waits=True,
            LENGTH=length,
            BLOCK=_SCHEDULE.block,
            num_warps=_SCHEDULE.num_warps,
            **made.constants,
        )
    return out

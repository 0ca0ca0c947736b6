"""``silu(gate) * up`` on a GPU, in Triton: a program has some elements of one row."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.dependent_launch import wait_for_kernel_before
from ..common.launch import launch
from ..common.triton_rows import aligned
from .triton_kernels import silu_times


@dataclass(frozen=True)
class SiluSchedule:
    """Speed only: no element needs another."""

    block: int = 1024
    """Elements of a program."""
    num_warps: int = 4


_SCHEDULE = SiluSchedule()


@triton.jit
def _silu_and_mul_kernel(x_ptr, out_ptr, LENGTH: tl.constexpr, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    wait_for_kernel_before(OVERLAPS)
    PARTS: tl.constexpr = (LENGTH + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // PARTS).to(tl.int64)
    offs = (tl.program_id(0) % PARTS) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < LENGTH
    gate = tl.load(x_ptr + row * 2 * LENGTH + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * LENGTH + LENGTH + offs, mask=mask, other=0.0).to(tl.float32)
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * LENGTH + offs, silu_times(gate, up, dtype).to(dtype), mask=mask)


def silu_and_mul(x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """See the operation's package; ``out``, packed, is written instead of a new tensor."""
    length = x.shape[-1] // 2
    out = torch.empty(*x.shape[:-1], length, dtype=x.dtype, device=x.device) if out is None else out
    if out.numel():
        launch(
            _silu_and_mul_kernel,
            out.numel() // length * triton.cdiv(length, _SCHEDULE.block),
            (aligned(x), out),
            on=x,
            waits=True,
            LENGTH=length,
            BLOCK=_SCHEDULE.block,
            num_warps=_SCHEDULE.num_warps,
        )
    return out

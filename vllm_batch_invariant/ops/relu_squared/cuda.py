"""``max(x, 0) ** 2`` on a GPU, in Triton. vLLM's kernel has a program a row, which is slow for one row of an MLP."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.dependent_launch import let_next_begin, wait_for_kernel_before
from ..common.launch import launch
from ..common.triton_rows import aligned


@dataclass(frozen=True)
class ReluSquaredSchedule:
    """Speed only: no element needs another."""

    block: int = 1024
    """Elements of a program."""
    num_warps: int = 4


_SCHEDULE = ReluSquaredSchedule()


@triton.jit(do_not_specialize=["elements"])
def _relu_squared_kernel(x_ptr, out_ptr, elements, BLOCK: tl.constexpr, OVERLAPS: tl.constexpr):
    let_next_begin(OVERLAPS)
    wait_for_kernel_before(OVERLAPS)
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < elements
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x = tl.where(x < 0.0, 0.0, x)
    tl.store(out_ptr + offs, (x * x).to(out_ptr.dtype.element_ty), mask=mask)


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """See the operation's package."""
    x = aligned(x)
    out = torch.empty_like(x)
    if elements := x.numel():
        launch(
            _relu_squared_kernel,
            triton.cdiv(elements, _SCHEDULE.block),
            (x, out, elements),
            on=x,
            waits=True,
            BLOCK=_SCHEDULE.block,
            num_warps=_SCHEDULE.num_warps,
        )
    return out

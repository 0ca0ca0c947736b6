"""The gradient of ``silu(gate) * up`` on a GPU, in Triton: a program has some elements of one row."""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.launch import launch
from ..common.triton_rows import aligned


@dataclass(frozen=True)
class SiluBackwardSchedule:
    """Speed only: no element needs another."""

    block: int = 1024
    """Elements of a program."""
    num_warps: int = 4


_SCHEDULE = SiluBackwardSchedule()


@triton.jit
def _silu_and_mul_backward_kernel(x_ptr, grad_ptr, out_ptr, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < LENGTH
    gate = tl.load(x_ptr + row * 2 * LENGTH + offs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * 2 * LENGTH + LENGTH + offs, mask=mask, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + row * LENGTH + offs, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.div_rn(1.0, 1.0 + tl.exp(-gate))
    silu = gate * sigmoid
    of_gate = grad * up * (sigmoid + silu * (1.0 - sigmoid))
    dtype = out_ptr.dtype.element_ty
    tl.store(out_ptr + row * 2 * LENGTH + offs, of_gate.to(dtype), mask=mask)
    tl.store(out_ptr + row * 2 * LENGTH + LENGTH + offs, (grad * silu).to(dtype), mask=mask)


def silu_and_mul_backward(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """See the operation's package."""
    length = x.shape[-1] // 2
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if out.numel():
        grid = grad.numel() // length, triton.cdiv(length, _SCHEDULE.block)
        launch(
            _silu_and_mul_backward_kernel,
            grid,
            (aligned(x), aligned(grad), out),
            on=x,
            LENGTH=length,
            BLOCK=_SCHEDULE.block,
            num_warps=_SCHEDULE.num_warps,
        )
    return out

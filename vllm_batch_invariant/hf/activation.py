"""SiLU times gate (SwiGLU, Shazeer 2020, arXiv:2002.05202) as the engine's layers compute it, with gradients."""

import torch
from torch.autograd.function import once_differentiable

from ..integration import patch_points
from ..ops.pointwise import elementwise
from ..ops.silu_backward import silu_and_mul_backward


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of x [tokens, 2 * N], gate first; [tokens, N] of x's dtype.

    On a CPU silu is rounded to x's dtype before it is multiplied; on a GPU vLLM's own kernel computes both. The
    gradient is computed in fp32 and rounded once.
    """
    return _SiluAndMul.apply(x)


def _of_cpu(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return elementwise("silu", gate) * up


def _of_cuda(x: torch.Tensor) -> torch.Tensor:
    patch_points.load_kernels()
    out = x.new_empty(*x.shape[:-1], x.shape[-1] // 2)
    torch.ops._C.silu_and_mul(out, x)
    return out


_SILU_AND_MUL = {"cpu": _of_cpu, "cuda": _of_cuda}


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return _SILU_AND_MUL[x.device.type](x)

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return silu_and_mul_backward(x, grad)

"""SiLU times gate (SwiGLU, Shazeer 2020, arXiv:2002.05202) as the engine's layers compute it, with gradients."""

import torch
from torch.autograd.function import once_differentiable

from ..integration import patch_points
from ..ops.pointwise import elementwise


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of x [tokens, 2 * N], gate first; [tokens, N] of x's dtype.

    On a CPU silu is rounded to x's dtype before the product; on a GPU vLLM's own kernel computes both. The gradient is
    computed in fp32 and rounded once.
    """
    return _SiluAndMul.apply(x)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return elementwise("sigmoid", x) if x.device.type == "cpu" else torch.sigmoid(x)


class _SiluAndMul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        gate, up = x.chunk(2, dim=-1)
        if x.device.type == "cpu":
            return elementwise("silu", gate) * up
        out = torch.empty_like(up, memory_format=torch.contiguous_format)
        patch_points.ROTARY.module()  # which loads the kernels
        torch.ops._C.silu_and_mul(out, x)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        gate, up = x.float().chunk(2, dim=-1)
        grad = grad.float()
        sigmoid = _sigmoid(gate)
        silu = gate * sigmoid
        of_gate = grad * up * (sigmoid + silu * (1 - sigmoid))
        return torch.cat((of_gate, grad * silu), dim=-1).to(x.dtype)

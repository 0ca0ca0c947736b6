"""Rotary embedding (Su et al. 2021, arXiv:2104.09864) by vLLM's own kernel, with gradients.

The kernel is called, not written again, because its rounding follows how it was compiled: on a CPU without AVX-512 BF16
it truncates to bf16, and its compiler may or may not fuse the multiplications with the additions.
"""

from functools import lru_cache

import torch
from torch.autograd.function import once_differentiable

from ..aten import batch_invariant_mode
from ..integration import patch_points


def rotate(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key turned by the angles of their positions; the gradient is turned back, in fp32.

    Args:
        query: [tokens, heads, head_size].
        key: [tokens, kv_heads, head_size] of the same dtype.
        positions: [tokens] int64.
        cache: of :func:`cos_sin_cache`.
    """
    return _Rotation.apply(query, key, positions, cache)


@lru_cache(maxsize=8)
def cos_sin_cache(
    head_size: int, positions: int, base: float, dtype: torch.dtype, device: torch.device
) -> torch.Tensor:
    """[positions, head_size] cosines, then sines, of position / base ** (2i / head_size), rounded to ``dtype``: what
    vLLM's worker makes of these numbers with the mode on.
    """
    with batch_invariant_mode(), torch.no_grad():
        exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
        indices = torch.arange(positions, dtype=torch.float32, device=device)
        angles = torch.einsum("i,j->ij", indices, 1.0 / base**exponents)
        return torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


class _Rotation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        query: torch.Tensor,
        key: torch.Tensor,
        positions: torch.Tensor,
        cache: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.save_for_backward(positions, cache)
        turned = [tensor.flatten(1).clone() for tensor in (query, key)]
        patch_points.ROTARY.get()(positions, *turned, query.shape[-1], cache, True)
        return turned[0].view(query.shape), turned[1].view(key.shape)

    @staticmethod
    @once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_query: torch.Tensor, grad_key: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        positions, cache = ctx.saved_tensors
        cos, sin = cache[positions].float().unsqueeze(1).chunk(2, dim=-1)

        def back(grad: torch.Tensor) -> torch.Tensor:
            x, y = grad.float().chunk(2, dim=-1)
            return torch.cat((x * cos + y * sin, y * cos - x * sin), dim=-1).to(grad.dtype)

        return back(grad_query), back(grad_key), None, None

"""Rotary embedding (Su et al. 2021, arXiv:2104.09864) by vLLM's own kernel, with gradients.

The kernel is called, not written again, because its rounding follows how it was compiled: on a CPU without AVX-512 BF16
it truncates to bf16, and its compiler may or may not fuse the multiplications with the additions.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..aten import batch_invariant_mode
from ..integration.reviews import patch_points
from ..ops.norm_rotary import Sections


class Angles(NamedTuple):
    """What each token's heads are turned by."""

    rows: torch.Tensor
    """[tokens] int64, in the table."""
    table: torch.Tensor
    """[rows, width] cosines, then sines, as of :func:`cos_sin_cache`."""

    @classmethod
    def picked(cls, table: torch.Tensor, positions: torch.Tensor, sections: Sections) -> "Angles":
        """Those of tokens with three positions [3, tokens], of which each frequency has its own: copied, so that each
        token has a row.
        """
        of_frequencies = positions[sections.rows(positions.device)].T
        halves = [half.gather(0, of_frequencies) for half in table.chunk(2, dim=-1)]
        return cls(torch.arange(positions.shape[1], device=positions.device), torch.cat(halves, dim=-1))


def rotate(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query and key turned by the angles of their positions; the gradient is turned back, in fp32.

    Args:
        query: [tokens, heads, head_size].
        key: [tokens, kv_heads, head_size] of the same dtype.
        positions: [tokens] int64.
        cache: of :func:`cos_sin_cache`, as wide as the part of each head that is turned, the first one.
    """
    return _Rotation.apply(query, key, positions, cache)


@dataclass(frozen=True)
class Llama3Scaling:
    """How Llama 3.1 stretches a rotary embedding, by the names of its configuration: frequencies that turn less than
    ``low_freq_factor`` times in the original context are divided by ``factor``, those that turn more than
    ``high_freq_factor`` times stay, and between them both are mixed.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int

    def __call__(self, frequencies: torch.Tensor) -> torch.Tensor:
        """[N] fp32 of [N] fp32, in the order of vLLM's operations."""
        context, low, high = self.original_max_position_embeddings, self.low_freq_factor, self.high_freq_factor
        wavelengths = 2 * math.pi / frequencies
        share = (context / wavelengths - low) / (high - low)
        mixed = (1 - share) * frequencies / self.factor + share * frequencies
        stretched = torch.where(wavelengths > context / low, frequencies / self.factor, mixed)
        return torch.where(wavelengths < context / high, frequencies, stretched)


def scaling_of(rope: Mapping[str, Any]) -> Llama3Scaling | None:
    """What ``rope_parameters`` of a configuration ask for, which is of type "default" or "llama3"."""
    if rope["rope_type"] == "default":
        return None
    return Llama3Scaling(**{field.name: rope[field.name] for field in fields(Llama3Scaling)})


def table_of(config: Any, hidden: torch.Tensor) -> torch.Tensor:
    """:func:`cos_sin_cache` of a text model's configuration: of the elements of a head that are turned, the first
    ones.
    """
    rope = config.rope_parameters
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = int(size * rope.get("partial_rotary_factor", 1.0))
    positions, base = config.max_position_embeddings, rope["rope_theta"]
    return cos_sin_cache(turned, positions, base, scaling_of(rope), hidden.dtype, hidden.device)


@lru_cache(maxsize=8)
def cos_sin_cache(
    width: int,
    positions: int,
    base: float,
    scaling: Llama3Scaling | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """[positions, width] cosines, then sines, of position / base ** (2i / width), rounded to ``dtype``: what
    vLLM's worker makes of these numbers with the mode on.
    """
    with batch_invariant_mode(), torch.no_grad():
        exponents = torch.arange(0, width, 2, dtype=torch.float32, device=device) / width
        frequencies = 1.0 / base**exponents
        if scaling is not None:
            frequencies = scaling(frequencies)
        indices = torch.arange(positions, dtype=torch.float32, device=device)
        angles = torch.einsum("i,j->ij", indices, frequencies)
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
            turned, passed = grad[..., : cache.shape[-1]].float(), grad[..., cache.shape[-1] :]
            x, y = turned.chunk(2, dim=-1)
            return torch.cat(((x * cos + y * sin).to(grad.dtype), (y * cos - x * sin).to(grad.dtype), passed), dim=-1)

        return back(grad_query), back(grad_key), None, None

"""Tensors for gradients of attention, and what they must be."""

from itertools import accumulate

import torch

from vllm_batch_invariant.ops.attention_backward import reference

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def draw(
    lengths: tuple[int, ...], heads: int, kv_heads: int, size: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[list[torch.Tensor], list[int]]:
    """Gradient, query, key and value of sequences of such lengths, and where each begins. A sequence of a length at a
    place of the list has the same numbers beside any others.
    """
    parts = []
    for number, length in enumerate(lengths):
        generator = torch.Generator().manual_seed(1000 * number + length)
        shapes = [(length, count, size) for count in (heads, heads, kv_heads, kv_heads)]
        parts.append([torch.randn(shape, generator=generator).to(dtype) for shape in shapes])
    tensors = [torch.cat(of_all).to(device) for of_all in zip(*parts, strict=True)]
    return tensors, [0, *accumulate(lengths)]


def errors(
    found: Gradients, tensors: list[torch.Tensor], cu_seqlens: list[int], scale: float, causal: bool = True
) -> list[float]:
    """|gradient - reference| / |reference| in norms, of query, key and value, against float64."""
    exact = reference.attention_backward(*tensors, cu_seqlens, scale, causal)
    return [float((one.double() - other).norm() / other.norm()) for one, other in zip(found, exact, strict=True)]

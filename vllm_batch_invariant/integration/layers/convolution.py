"""Convolutions of encoders whose windows overlap, as matmuls of the mode's.

PyTorch leaves a convolution to oneDNN or cuDNN, which choose an order of its sums by the numbers of items and of
positions. An element of the output is a sum over a window of the input: a row of an unfolded input, times the weight.
So its bits follow from its own window, whatever shares its call. Where each channel is convolved with its own window
alone, its products are added in fp32, the first first.
"""

from typing import Any

import torch
import torch.nn.functional as F

_UNFOLDED = 1 << 24
"""Elements of the unfolded input that are there at once, a schedule."""


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    groups: int = 1,
) -> torch.Tensor:
    """The convolution of each item by itself, zeros around it.

    Args:
        x: [items, channels, *sizes], one or two sizes, or without items.
        weight: [columns, channels / groups, *sizes of a window], of x's dtype.
        bias: [columns] or None.
        stride: steps from a window to the next, by size.
        padding: zeros on both sides, by size.
        groups: 1, or as many as there are channels and columns.

    Returns:
        [items, columns, *numbers of windows].
    """
    sizes = weight.dim() - 2
    if x.dim() == sizes + 1:
        return convolve(x[None], weight, bias, stride, padding, groups)[0]
    around = [zeros for one in reversed(padding) for zeros in (one, one)]
    windows = F.pad(x, around)
    for axis, (size, step) in enumerate(zip(weight.shape[2:], stride, strict=True), 2):
        windows = windows.unfold(axis, size, step)
    if groups > 1:
        return _each_channel(windows.flatten(2 + sizes), weight.flatten(1), bias)
    places = windows.shape[2 : 2 + sizes]
    # [items, channels, *places, *window] to [items, *places, channels, *window]
    windows = windows.movedim(1, 1 + sizes)
    matrix, each = weight.flatten(1), places.numel() * weight[0].numel()
    parts = [
        F.linear(part.flatten(1 + sizes), matrix, bias) for part in windows.split(max(1, _UNFOLDED // max(1, each)))
    ]
    return torch.cat(parts).movedim(-1, 1).contiguous()


def _each_channel(windows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """[items, channels, *places] of windows with a last axis of taps, and [channels, taps]."""
    shape = (-1, *[1] * (windows.dim() - 3))
    taps = zip(windows.unbind(-1), weight.float().unbind(1), strict=True)
    total = torch.zeros((), device=windows.device)
    for tap, by in taps:
        total = total + tap.float() * by.view(shape)
    if bias is not None:
        total = total + bias.float().view(shape)
    return total.to(windows.dtype)


class _Unfolded:
    """Computes what the convolution that it is mixed with holds."""

    def _conv_forward(self: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return convolve(x, weight, bias, self.stride, self.padding, self.groups)


class Conv1d(_Unfolded, torch.nn.Conv1d):
    """Over time."""


class Conv2d(_Unfolded, torch.nn.Conv2d):
    """Over frequencies and time."""


_OURS: dict[type, type] = {torch.nn.Conv1d: Conv1d, torch.nn.Conv2d: Conv2d}
_DERIVED = {("transformers.models.gemma4.modeling_gemma4", "Gemma4AudioCausalConv1d"): Conv1d}
"""Classes of encoders' own that put zeros before what PyTorch's then convolves."""


def replace_in(tower: torch.nn.Module) -> None:
    """Have the convolutions of an encoder be ours, with their weights."""
    for layer in tower.modules():
        kind = type(layer)
        if kind in _OURS:
            layer.__class__ = _OURS[kind]
        elif ours := _DERIVED.get((kind.__module__, kind.__name__)):
            layer.__class__ = type(f"BatchInvariant{kind.__name__}", (kind, ours), {"__module__": __name__})


def problem_of(layer: Any) -> str | None:
    """Why a convolution of ours is refused."""
    plain = (
        (layer.groups == 1 or layer.groups == layer.in_channels == layer.out_channels)
        and set(layer.dilation) == {1}
        and layer.padding_mode == "zeros"
        and isinstance(layer.padding, tuple)
        and not getattr(layer, "transposed", False)
    )
    return None if plain else "it is a convolution in groups of channels, with gaps, or with other padding than zeros"

"""Attention of encoders whose scores have terms: SAM's (DeepSeek-OCR) for the rows between query and key, and for the
columns; Parakeet's (Nemotron 3 Nano Omni) for the time.

vLLM and Transformers hand the terms to PyTorch's attention, whose kernel and its parts follow the number of windows of
a call. Here a row's scores, softmax and sum are operations of the mode's, which compute row by row.
"""

from functools import reduce
from typing import Any

import torch

from ..reviews import patch_points

_SCORES = 1 << 24
"""Elements of scores that are there at once, a schedule."""


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *terms: torch.Tensor) -> torch.Tensor:
    """Attention of each row over all keys of its window, in fp32.

    Args:
        query: [windows, rows, head size], scaled.
        key: the same.
        value: the same.
        terms: added to scores, each [windows, rows, height or 1, width or 1] of keys.

    Returns:
        [windows, rows, head size] in the query's dtype.
    """
    each = max(1, _SCORES // query.shape[1] ** 2)
    parts = zip(*(one.split(each) for one in (query, key, value, *terms)), strict=True)
    return torch.cat([_attend(*(one.float() for one in part)) for part in parts]).to(query.dtype)


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *terms: torch.Tensor) -> torch.Tensor:
    scores = query @ key.mT + reduce(torch.add, terms).flatten(2)
    return scores.softmax(-1) @ value


def attend_in_transformers(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float,
    **named: Any,
) -> tuple[torch.Tensor, None]:
    """The same in a class of Transformers'.

    Args:
        module: not read.
        query: [items, heads, rows, head size].
        key: the same.
        value: the same.
        attention_mask: [items, heads, rows, rows], added to scores.
        scaling: of scores before that.
        named: not read.

    Returns:
        [items, rows, heads, head size], and no weights.
    """
    flat = (one.flatten(0, 1) for one in (query * scaling, key, value))
    found = attend(*flat, attention_mask.flatten(0, 1)[:, :, None])
    return found.view(query.shape).transpose(1, 2).contiguous(), None


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    """[windows, height, width, channels]."""
    items, height, width, _ = x.shape
    rows = height * width
    qkv = self.qkv(x).reshape(items, rows, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
    query, key, value = qkv.reshape(3, items * self.num_heads, rows, -1).unbind(0)
    sizes = (height, width), (height, width)
    of_both = patch_points.RELATIVE_POSITIONS.get()(query, self.rel_pos_h, self.rel_pos_w, *sizes)
    found = attend(query * self.scale, key, value, *of_both)
    return self.proj(found.view(items, self.num_heads, rows, -1).transpose(1, 2).reshape(items, height, width, -1))


def replace_in(tower: torch.nn.Module) -> None:
    """Have such attention of an encoder be ours."""
    point = patch_points.RELATIVE_ATTENTION
    for layer in tower.modules():
        kind = type(layer)
        if kind.__name__ == point.attribute and kind.__module__ in point.modules and layer.use_rel_pos:
            methods = {"__module__": __name__, "forward": _forward}
            layer.__class__ = type(f"BatchInvariant{kind.__name__}", (kind,), methods)

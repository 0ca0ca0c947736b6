"""Paged attention by PyTorch's FlexAttention, on any device it runs on.

A work item is a tile of query tokens and one split of the keys that it sees. Every call of FlexAttention has one shape:
``ITEMS_PER_CALL`` items of ``BLOCK_M`` tokens over the keys of one split, padded where there are fewer. So a library
picks one kernel whatever the batch, and a row's bits rest on that kernel treating its rows alike.
FlexAttention: pytorch.org/docs/stable/nn.attention.flex_attention.html; splits merged by LSE as in Flash-Decoding.
"""

import warnings
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn.attention.flex_attention import AuxRequest, flex_attention

from ..merge import merge_splits
from ..params import PagedAttention

# Eager on purpose: see above.
warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")

SERVES = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")
BLOCK_M = 32
"""Query tokens of a tile; the shape of a call, so another value may give other bits."""
ITEMS_PER_CALL = 8
"""A part of the same shape."""


class _WorkItem(NamedTuple):
    """A tile of a request's query tokens and one split that it sees."""

    request: int
    rows: slice
    """Of the query."""
    positions: range
    """Of these rows."""
    split: int


def _work_items(params: PagedAttention) -> Iterator[_WorkItem]:
    """Every work item, the splits of a tile ascending."""
    for request, rows, positions in params.requests():
        for start in range(0, len(positions), BLOCK_M):
            tile = positions[start : start + BLOCK_M]
            first = rows.start + start
            for split in params.reduction.splits(params.first_key(tile[0], first), tile[-1]):
                yield _WorkItem(request, slice(first, first + len(tile)), tile, split)


def _score_mod(params: PagedAttention, q_pos: torch.Tensor, k_pos: torch.Tensor) -> Callable:
    """FlexAttention's hook: soft-cap, ALiBi, -inf for what is hidden. Positions are [items, rows] and [items, keys]."""
    spec = params.spec
    alibi_slopes = None if spec.alibi_slopes is None else spec.alibi_slopes.to(q_pos.device, torch.float32)

    def score_mod(
        score: torch.Tensor, item: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        distance = q_pos[item, row] - k_pos[item, key]
        if spec.logits_soft_cap is not None:
            score = spec.logits_soft_cap * torch.tanh(score / spec.logits_soft_cap)
        if alibi_slopes is not None:
            score = score - alibi_slopes[head] * distance
        visible = distance >= 0
        if spec.sliding_window is not None:
            visible = visible & (distance < spec.sliding_window)
        return torch.where(visible, score, -torch.inf)

    return score_mod


def _attend(params: PagedAttention, items: list[_WorkItem]) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised outputs [items, rows, heads, head_size] and LSEs [items, rows, heads] in fp32 of one call's items."""
    heads, head_size = params.query.shape[1:]
    kv_heads, split_size = params.cache.kv_heads, params.equal_splits()
    device = params.query.device
    # fp32 keeps the partial results from being rounded to the query's dtype.
    query = torch.zeros(ITEMS_PER_CALL, heads, BLOCK_M, head_size, device=device)
    key = torch.zeros(ITEMS_PER_CALL, kv_heads, split_size, head_size, device=device)
    value = torch.zeros_like(key)
    # A padded row is before every key, so it sees none.
    q_pos = torch.full((ITEMS_PER_CALL, BLOCK_M), -1)
    k_pos = torch.zeros(ITEMS_PER_CALL, split_size, dtype=torch.int64)
    for i, item in enumerate(items):
        first = item.split * split_size
        query[i, :, : len(item.positions)] = params.query[item.rows].transpose(0, 1)
        q_pos[i, : len(item.positions)] = torch.arange(item.positions.start, item.positions.stop)
        k_pos[i] = torch.arange(first, first + split_size)
        seen = params.split_positions(item.split, item.rows, item.positions)
        in_split = slice(seen.start - first, seen.stop - first)
        key[i, :, in_split], value[i, :, in_split] = params.cache.gather(item.request, seen)
    output, aux = flex_attention(
        query,
        key,
        value,
        score_mod=_score_mod(params, q_pos.to(device), k_pos.to(device)),
        scale=params.spec.scale,
        enable_gqa=heads != kv_heads,
        return_aux=AuxRequest(lse=True),
    )
    return output.transpose(1, 2), aux.lse.transpose(1, 2)


def paged_attention(params: PagedAttention, out: torch.Tensor) -> None:
    """Write the attention of ``params`` to ``out``; see the operation's package for the contract.

    A request's own keys and values must be finite: a row weighs the later ones of its split by 0.
    """
    items = list(_work_items(params))
    partials: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start in range(0, len(items), ITEMS_PER_CALL):
        computed = items[start : start + ITEMS_PER_CALL]
        for item, output, lse in zip(computed, *_attend(params, computed), strict=False):
            partials.append((output, lse))
            if item.split == item.positions[-1] // params.equal_splits():
                if params.spec.sinks is not None:
                    sinks = params.spec.sinks.to(lse).expand_as(lse)
                    partials.append((torch.zeros_like(output), sinks))
                outputs, lses = (torch.stack(parts) for parts in zip(*partials, strict=True))
                rows = len(item.positions)
                out[item.rows] = merge_splits(outputs, lses)[:rows].to(out.dtype)
                partials = []

"""Paged attention by PyTorch's FlexAttention, on any device it runs on.

Every call has one shape: a group of (query tile, split) pairs, each a fixed number of rows over the keys of one split,
padded where there are fewer. So a library picks one kernel whatever the batch, and a row's bits rest on that kernel
treating its rows alike.
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

TILE_ROWS = 32
"""Query tokens of a tile; the shape of a call, so another value may give other bits."""
GROUP = 8
"""Pairs in a call, for the same reason."""


class _Pair(NamedTuple):
    """A query tile and one split that it sees."""

    request: int
    rows: slice
    positions: range
    split: int


def _pairs(call: PagedAttention) -> Iterator[_Pair]:
    """Every (query tile, split it sees), the splits of a tile ascending."""
    for request, rows, positions in call.requests():
        for start in range(0, len(positions), TILE_ROWS):
            inside = positions[start : start + TILE_ROWS]
            first = rows.start + start
            for split in call.reduction.splits(call.first_key(inside[0]), inside[-1]):
                yield _Pair(request, slice(first, first + len(inside)), inside, split)


def _score_mod(call: PagedAttention, query_positions: torch.Tensor, key_positions: torch.Tensor) -> Callable:
    """FlexAttention's hook: soft-cap, ALiBi, -inf for what is hidden. Positions are [group, rows] and [group, keys]."""
    slopes = None if call.alibi_slopes is None else call.alibi_slopes.to(query_positions.device, torch.float32)

    def score_mod(
        score: torch.Tensor, pair: torch.Tensor, head: torch.Tensor, row: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        distance = query_positions[pair, row] - key_positions[pair, key]
        if call.logits_soft_cap is not None:
            score = call.logits_soft_cap * torch.tanh(score / call.logits_soft_cap)
        if slopes is not None:
            score = score - slopes[head] * distance
        visible = distance >= 0
        if call.sliding_window is not None:
            visible = visible & (distance < call.sliding_window)
        return torch.where(visible, score, -torch.inf)

    return score_mod


def _attend(call: PagedAttention, pairs: list[_Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised outputs [group, rows, heads, head_size] and LSEs [group, rows, heads] in fp32 of a group of pairs."""
    heads, head_size = call.query.shape[1:]
    kv_heads, split_size = call.key_cache.shape[1], call.equal_splits()
    device = call.query.device
    # fp32 keeps the partial results from being rounded to the query's dtype.
    query = torch.zeros(GROUP, heads, TILE_ROWS, head_size, device=device)
    key = torch.zeros(GROUP, kv_heads, split_size, head_size, device=device)
    value = torch.zeros_like(key)
    # A padded row is before every key, so it sees none.
    query_positions = torch.full((GROUP, TILE_ROWS), -1)
    key_positions = torch.zeros(GROUP, split_size, dtype=torch.int64)
    for place, pair in enumerate(pairs):
        first = pair.split * split_size
        query[place, :, : len(pair.positions)] = call.query[pair.rows].transpose(0, 1)
        query_positions[place, : len(pair.positions)] = torch.arange(pair.positions.start, pair.positions.stop)
        key_positions[place] = torch.arange(first, first + split_size)
        seen = call.split_positions(pair.split, pair.positions)
        inside = slice(seen.start - first, seen.stop - first)
        key[place, :, inside], value[place, :, inside] = call.gather(pair.request, seen)
    output, aux = flex_attention(
        query,
        key,
        value,
        score_mod=_score_mod(call, query_positions.to(device), key_positions.to(device)),
        scale=call.scale,
        enable_gqa=heads != kv_heads,
        return_aux=AuxRequest(lse=True),
    )
    return output.transpose(1, 2), aux.lse.transpose(1, 2)


def paged_attention(call: PagedAttention, out: torch.Tensor) -> None:
    """Write the attention of ``call`` to ``out``; see the operation's package for the contract.

    A request's own keys and values must be finite: a row weighs the later ones of its split by 0.
    """
    pairs = list(_pairs(call))
    tile: list[tuple[torch.Tensor, torch.Tensor]] = []
    for start in range(0, len(pairs), GROUP):
        group = pairs[start : start + GROUP]
        for pair, output, lse in zip(group, *_attend(call, group), strict=False):
            tile.append((output, lse))
            if pair.split == pair.positions[-1] // call.equal_splits():
                if call.sinks is not None:
                    sinks = call.sinks.to(lse).expand_as(lse)
                    tile.append((torch.zeros_like(output), sinks))
                outputs, lses = (torch.stack(parts) for parts in zip(*tile, strict=True))
                rows = len(pair.positions)
                out[pair.rows] = merge_splits(outputs, lses)[:rows].to(out.dtype)
                tile = []

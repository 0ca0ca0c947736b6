"""Paged attention on a GPU by PyTorch's FlexAttention, compiled once for prefill and decode.

The physical pages are the axis of keys. A query block holds rows of one request, with the query heads of a group side
by side, and one split of the keys that they see: its block mask lists the physical tiles of that split in ascending
order, and tells a key's position by its tile. Partial results are merged in ascending order.

A row's bits follow from its own keys by construction where one compiled kernel serves every step: tiles are walked in
the order of the positions, all of them masked, a masked key weighs exactly 0, and rows of a tile are added up alike.
FlexAttention: pytorch.org/docs/stable/nn.attention.flex_attention.html; splits as in Flash-Decoding,
pytorch.org/blog/flash-decoding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention
from torch.utils.dlpack import from_dlpack, to_dlpack

from ...common.launch import launch
from ...common.rows import with_packed_rows
from ..params import PagedAttention
from .kernels import LOG2_E, gather_rows, merge_items
from .plan import FlexTile, KeyLayout, Masks, Plan, plan_alone

SERVES = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks")
PARTIAL_BYTES = 256 << 20
"""For the query rows and the results of items that are computed at a time."""
_RECOMPILATIONS = 1 << 12
"""PyTorch counts those of all models, head shapes and options together."""
_MERGE_M = 16
"""Rows that a program merges."""
_Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Scores:
    """What FlexAttention is compiled for: the tile, the strides of the cache, and how scores are made."""

    tile: FlexTile
    kv_heads: int
    head_size: int
    stride_slot: int
    stride_head: int
    scale: float
    window: int | None
    soft_cap: float | None

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        kv_num_blocks: torch.Tensor,
        kv_indices: torch.Tensor,
        q_pos: torch.Tensor,
        first_keys: torch.Tensor,
        alibi_slopes: torch.Tensor | None,
        head_in_group: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of FlexAttention.

        Args:
            query: [items, rows, kv_heads, head_size].
            keys: [elements], the memory of the cache from its first key on. Of a tensor with as many pages as may be,
                the compiler would not know the strides.
            values: as ``keys``.
            kv_num_blocks: [items] int32
            kv_indices: [items, max_tiles] int32
            q_pos: [items * rows], -1 for rows that are padding.
            first_keys: [tiles], the position of the first key of a physical tile.
            alibi_slopes: [kv_heads, queries_per_kv] fp32.
            head_in_group: [items * rows], with alibi_slopes.

        Returns:
            Results [1, kv_heads, items * rows, head_size] and their LSE [1, kv_heads, items * rows] fp32.
        """
        tile, stride = self.tile, self.stride_slot
        query = query.flatten(0, 1).transpose(0, 1).unsqueeze(0)
        slots = (keys.shape[0] - (self.kv_heads - 1) * self.stride_head - self.head_size) // stride + 1
        sizes, strides = (1, self.kv_heads, slots, self.head_size), (0, self.stride_head, stride, 1)
        log_tile, in_tile = tile.block_n.bit_length() - 1, tile.block_n - 1

        def distance(row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            return q_pos[row] - (first_keys[slot >> log_tile] + (slot & in_tile))

        def mask_mod(
            batch: torch.Tensor,  # noqa: ARG001 - FlexAttention's signature
            head: torch.Tensor,  # noqa: ARG001
            row: torch.Tensor,
            slot: torch.Tensor,
        ) -> torch.Tensor:
            visible = distance(row, slot) >= 0
            return visible if self.window is None else visible & (distance(row, slot) < self.window)

        def score_mod(
            score: torch.Tensor,
            batch: torch.Tensor,  # noqa: ARG001
            head: torch.Tensor,
            row: torch.Tensor,
            slot: torch.Tensor,
        ) -> torch.Tensor:
            if self.soft_cap is not None:
                score = self.soft_cap * torch.tanh(score / self.soft_cap)
            if alibi_slopes is not None:
                score = score - alibi_slopes[head, head_in_group[row]] * distance(row, slot)
            return score

        mask = BlockMask(
            seq_lengths=(query.shape[2], slots),
            kv_num_blocks=kv_num_blocks[None, None],
            kv_indices=kv_indices[None, None],
            full_kv_num_blocks=None,  # they would be walked after the others, out of order
            full_kv_indices=None,
            q_num_blocks=None,
            q_indices=None,
            full_q_num_blocks=None,
            full_q_indices=None,
            BLOCK_SIZE=(tile.block_m, tile.block_n),
            mask_mod=mask_mod,
        )
        output, aux = flex_attention(
            query,
            keys.as_strided(sizes, strides),
            values.as_strided(sizes, strides),
            score_mod=None if self.soft_cap is None and alibi_slopes is None else score_mod,
            block_mask=mask,
            scale=self.scale,
            return_aux=AuxRequest(lse=True),
            kernel_options={
                "BACKEND": "TRITON",
                "BLOCK_M": tile.block_m,
                "BLOCK_N": tile.block_n,
                "num_warps": tile.num_warps,
                "num_stages": tile.num_stages,
                "FLOAT32_PRECISION": "'ieee'",
                "IS_DIVISIBLE": True,  # of rows by BLOCK_M and of listed keys by BLOCK_N, always
            },
        )
        return output, aux.lse


@lru_cache
def _compiled(scores: Scores) -> _Attend:
    """FlexAttention compiled for any number of items, pages and tiles, and nothing else."""
    compiled = torch.compile(scores.attend, fullgraph=True, dynamic=False)

    def attend(*arguments: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        for argument in arguments[:7] + arguments[8:]:
            if argument is not None:
                torch._dynamo.mark_dynamic(argument, 0)
        limits = {"recompile_limit": _RECOMPILATIONS, "accumulated_recompile_limit": _RECOMPILATIONS}
        # The mode has compiled functions run eagerly, which would hold the scores of the whole cache.
        with torch.compiler.set_stance("default"), torch._dynamo.config.patch(limits):
            return compiled(*arguments)

    return attend


def paged_attention(params: PagedAttention, out: torch.Tensor, plan: Plan | None = None) -> None:
    """Write the attention of ``params`` to ``out``; see the operation's package for the contract.

    A request's own keys and values must be finite: a row weighs the later ones of its tiles by 0. Of slots that nobody
    wrote, those in the last tile of a request may be written here: 0 where the value is not finite. A page that several
    requests share has the same place in each of them.

    Raises:
        NotCovered: a head size above 256, pages that are no multiple of 64 keys (32 in fp32), or a cache that cannot be
            read as one axis of keys.
        ValueError: a plan for other layers, or of another reduction than the call's.
    """
    plan, spec, cache = plan or plan_alone(params), params.spec, params.cache
    shape = plan.planner.shape
    if params.reduction != shape.reduction:
        raise ValueError(f"a plan for {shape.reduction!r} does not fit a call with {params.reduction!r}")
    layout = KeyLayout.of(cache.keys, plan.tile.block_n)
    same = cache.keys.stride() == cache.values.stride()
    if not same or layout != plan.planner.layout or spec.sliding_window not in plan.masks:
        raise ValueError(
            f"a plan for {plan.planner.layout} and windows {list(plan.masks)} does not fit {layout} and window "
            f"{spec.sliding_window}"
        )
    _, stride_head, stride_slot, _ = cache.keys.stride()
    scores = Scores(
        plan.tile, shape.kv_heads, shape.head_size, stride_slot, stride_head, spec.scale, spec.sliding_window,
        spec.logits_soft_cap,
    )  # fmt: skip
    alibi_slopes = spec.alibi_slopes
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.to(params.query.device, torch.float32).view(shape.kv_heads, shape.queries_per_kv)
    sinks = None if spec.sinks is None else spec.sinks.to(params.query.device, torch.float32) * LOG2_E
    with torch.cuda.device_of(params.query):
        _in_waves(params, out, plan, plan.masks[spec.sliding_window], _compiled(scores), alibi_slopes, sinks)


def _in_waves(
    params: PagedAttention,
    out: torch.Tensor,
    plan: Plan,
    masks: Masks,
    attend: _Attend,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    """Attends with as many items at a time as there is memory for; all but the first and the last block of a wave
    begin and end in it.
    """
    shape, tile, device = plan.planner.shape, plan.tile, params.query.device
    query, written = with_packed_rows(params.query), with_packed_rows(out)
    keys, values = (_memory(cache) for cache in (params.cache.keys, params.cache.values))
    items, blocks = len(masks.kv_num_blocks), len(masks.blocks)
    item_bytes = 2 * shape.kv_heads * tile.block_m * shape.head_size * query.element_size()
    wave = max(PARTIAL_BYTES // item_bytes // 4, 1) * 4  # so that slices of the lists stay aligned
    merge_m = min(_MERGE_M, tile.block_m)
    sizes = {
        "NUM_KV_HEADS": shape.kv_heads,
        "QUERIES_PER_KV": shape.queries_per_kv,
        "HEAD_DIM": shape.head_size,
        "PADDED_HEAD_DIM": shape.padded_head_size,
        "BLOCK_M": tile.block_m,
    }
    for number, first in enumerate(range(0, items if blocks else 0, wave)):
        here = slice(first, min(first + wave, items))
        count = here.stop - first
        rows = slice(first * tile.block_m, here.stop * tile.block_m)
        packed = torch.empty(count, tile.block_m, shape.kv_heads, shape.head_size, dtype=query.dtype, device=device)
        launch(
            gather_rows,
            (count, shape.kv_heads),
            (
                query,
                params.cache.values,
                packed,
                masks.blocks,
                masks.items,
                masks.kv_num_blocks,
                first,
                *query.stride()[:2],
                params.cache.values.stride(2),
                params.cache.values.stride(1),
            ),
            on=query,
            **sizes,
            BLOCK_N=tile.block_n,
        )
        partial, lse = attend(
            packed,
            keys,
            values,
            _alone(masks.kv_num_blocks[here]),
            _alone(masks.kv_indices[here]),
            _alone(masks.q_pos[rows]),
            plan.planner.first_keys,
            alibi_slopes,
            None if alibi_slopes is None else _alone(masks.head_in_group[rows]),
        )
        launch(
            merge_items,
            (blocks, shape.kv_heads, -(-plan.max_rows // merge_m)),
            (
                written,
                partial,
                lse,
                sinks,
                *plan.planner.running,
                masks.blocks,
                masks.item_indptr,
                first,
                count,
                *written.stride()[:2],
                partial.stride(2),
                partial.stride(1),
                lse.stride(1),
            ),
            on=query,
            WAVE=number % 2,
            USE_SINKS=sinks is not None,
            **sizes,
            MERGE_M=merge_m,
        )
    if written is not out:
        out.copy_(written)


def _memory(cache: torch.Tensor) -> torch.Tensor:
    """[elements], all from the first of the cache to the end of its memory."""
    elements = cache.untyped_storage().nbytes() // cache.element_size() - cache.storage_offset()
    return _alone(cache.as_strided((elements,), (1,)))


def _alone(part: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that is no part of another: for each place in another, and without knowing the
    alignment there, PyTorch would compile anew.
    """
    return from_dlpack(to_dlpack(part))

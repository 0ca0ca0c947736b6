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

from ..params import PagedAttention
from .kernels import gather_rows, merge_entries
from .plan import KeyLayout, Masks, Plan, Tile, plan_alone

PARTIAL_BYTES = 256 << 20
"""For the query rows and the results of entries that are computed at a time."""
_RECOMPILATIONS = 1 << 12
"""PyTorch counts those of all models, head shapes and options together."""
_MERGED_AT_ONCE = 16
_Attend = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Scores:
    """What FlexAttention is compiled for: the tile, the strides of the cache, and how scores are made."""

    tile: Tile
    kv_heads: int
    head_size: int
    slot_stride: int
    head_stride: int
    scale: float
    window: int | None
    soft_cap: float | None

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        key_blocks: torch.Tensor,
        key_tiles: torch.Tensor,
        positions: torch.Tensor,
        first_keys: torch.Tensor,
        slopes: torch.Tensor | None,
        members: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One pass of FlexAttention.

        Args:
            query: [entries, rows, kv_heads, head_size].
            keys: [elements], the memory of the cache from its first key on. Of a tensor with as many pages as may be,
                the compiler would not know the strides.
            values: as ``keys``.
            key_blocks: [entries]
            key_tiles: [entries, tiles of a split]
            positions: [entries * rows], -1 for rows that are padding.
            first_keys: [tiles], the position of the first key of a physical tile.
            slopes: [kv_heads, group] fp32.
            members: [entries * rows], with slopes.

        Returns:
            Results [1, kv_heads, entries * rows, head_size] and their LSE [1, kv_heads, entries * rows] fp32.
        """
        tile, stride = self.tile, self.slot_stride
        query = query.flatten(0, 1).transpose(0, 1).unsqueeze(0)
        slots = (keys.shape[0] - (self.kv_heads - 1) * self.head_stride - self.head_size) // stride + 1
        sizes, strides = (1, self.kv_heads, slots, self.head_size), (0, self.head_stride, stride, 1)
        log_tile, in_tile = tile.keys.bit_length() - 1, tile.keys - 1

        def distance(row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
            return positions[row] - (first_keys[slot >> log_tile] + (slot & in_tile))

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
            if slopes is not None:
                score = score - slopes[head, members[row]] * distance(row, slot)
            return score

        mask = BlockMask(
            seq_lengths=(query.shape[2], slots),
            kv_num_blocks=key_blocks[None, None],
            kv_indices=key_tiles[None, None],
            full_kv_num_blocks=None,  # they would be walked after the others, out of order
            full_kv_indices=None,
            q_num_blocks=None,
            q_indices=None,
            full_q_num_blocks=None,
            full_q_indices=None,
            BLOCK_SIZE=(tile.rows, tile.keys),
            mask_mod=mask_mod,
        )
        output, aux = flex_attention(
            query,
            keys.as_strided(sizes, strides),
            values.as_strided(sizes, strides),
            score_mod=None if self.soft_cap is None and slopes is None else score_mod,
            block_mask=mask,
            scale=self.scale,
            return_aux=AuxRequest(lse=True),
            kernel_options={
                "BACKEND": "TRITON",
                "BLOCK_M": tile.rows,
                "BLOCK_N": tile.keys,
                "num_warps": tile.warps,
                "num_stages": tile.stages,
                "FLOAT32_PRECISION": "'ieee'",
                "IS_DIVISIBLE": True,  # of rows by BLOCK_M and of listed keys by BLOCK_N, always
            },
        )
        return output, aux.lse


@lru_cache
def _compiled(scores: Scores) -> _Attend:
    """FlexAttention compiled for any number of entries, pages and tiles, and nothing else."""
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


def paged_attention(call: PagedAttention, out: torch.Tensor, plan: Plan | None = None) -> None:
    """Write the attention of ``call`` to ``out``; see the operation's package for the contract.

    A request's own keys and values must be finite: a row weighs the later ones of its tiles by 0. Of slots that nobody
    wrote, those in the last tile of a request may be written here: 0 where the value is not finite. A page that several
    requests share has the same place in each of them.

    Raises:
        NotCovered: a head size above 256, pages that are no multiple of 64 keys (32 in fp32), or a cache that cannot be
            read as one axis of keys.
        ValueError: a plan for other layers.
    """
    plan = plan or plan_alone(call)
    shape = plan.planner.shape
    layout = KeyLayout.of(call.key_cache, plan.tile.keys)
    same = call.key_cache.stride() == call.value_cache.stride()
    if not same or layout != plan.planner.layout or call.sliding_window not in plan.masks:
        raise ValueError(
            f"a plan for {plan.planner.layout} and windows {list(plan.masks)} does not fit {layout} and window "
            f"{call.sliding_window}"
        )
    _, head_stride, slot_stride, _ = call.key_cache.stride()
    scores = Scores(
        plan.tile, shape.kv_heads, shape.head_size, slot_stride, head_stride, call.scale, call.sliding_window,
        call.logits_soft_cap,
    )  # fmt: skip
    slopes = call.alibi_slopes
    if slopes is not None:
        slopes = slopes.to(call.query.device, torch.float32).view(shape.kv_heads, shape.queries_per_kv)
    with torch.cuda.device_of(call.query):
        _in_waves(call, out, plan, plan.masks[call.sliding_window], _compiled(scores), slopes)


def _in_waves(
    call: PagedAttention, out: torch.Tensor, plan: Plan, masks: Masks, attend: _Attend, slopes: torch.Tensor | None
) -> None:
    """Attends with as many entries at a time as there is memory for; all but the first and the last block of a wave
    begin and end in it.
    """
    shape, tile, device = plan.planner.shape, plan.tile, call.query.device
    query = call.query if call.query.stride(-1) == 1 else call.query.contiguous()
    written = out if out.stride(-1) == 1 else out.contiguous()
    keys, values = (_memory(cache) for cache in (call.key_cache, call.value_cache))
    entries, blocks = len(masks.key_blocks), len(masks.blocks)
    entry_bytes = 2 * shape.kv_heads * tile.rows * shape.head_size * query.element_size()
    wave = max(PARTIAL_BYTES // entry_bytes // 4, 1) * 4  # so that slices of the lists stay aligned
    parts = min(_MERGED_AT_ONCE, tile.rows)
    sizes = {
        "kv_heads": shape.kv_heads,
        "group": shape.queries_per_kv,
        "head_size": shape.head_size,
        "padded_size": shape.padded_head_size,
        "block_rows": tile.rows,
    }
    for number, first in enumerate(range(0, entries if blocks else 0, wave)):
        here = slice(first, min(first + wave, entries))
        count = here.stop - first
        rows = slice(first * tile.rows, here.stop * tile.rows)
        packed = torch.empty(count, tile.rows, shape.kv_heads, shape.head_size, dtype=query.dtype, device=device)
        gather_rows[(count, shape.kv_heads)](
            query,
            call.value_cache,
            packed,
            masks.blocks,
            masks.entries,
            masks.key_blocks,
            first,
            *query.stride()[:2],
            call.value_cache.stride(2),
            call.value_cache.stride(1),
            **sizes,
            tile=tile.keys,
        )
        partial, lses = attend(
            packed,
            keys,
            values,
            _alone(masks.key_blocks[here]),
            _alone(masks.key_tiles[here]),
            _alone(masks.positions[rows]),
            plan.planner.first_keys,
            slopes,
            None if slopes is None else _alone(masks.members[rows]),
        )
        merge_entries[(blocks, shape.kv_heads, -(-plan.most_rows // parts))](
            written,
            partial,
            lses,
            *plan.planner.kept,
            masks.blocks,
            masks.first_entries,
            first,
            count,
            *written.stride()[:2],
            partial.stride(2),
            partial.stride(1),
            lses.stride(1),
            wave=number % 2,
            **sizes,
            rows_at_once=parts,
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

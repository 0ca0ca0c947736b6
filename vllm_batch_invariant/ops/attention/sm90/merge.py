"""Merging a head's partial results on Hopper, in Gluon: the whole ring of tiles holds copies that are on their way.

One program reads all partial results of a head, in ascending order, and a program alone is fast only if it has asked
for many of them before the first one arrives: a multiprocessor reads about 64 bytes a cycle, after hundreds of cycles.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from ...common.gluon_names import barrier, copy_elements, reinterpret
from .common import merge_values, merge_weights
from .shapes import TILE

_MOST_AT_ONCE = 8
"""Splits in half a batch, whose merging is unrolled."""


@gluon.constexpr_function
def layout_of_partials(head_size):
    """Whole rows of fp32 for each warp, so that what a row has one of is in a register of each thread."""
    return gl.BlockedLayout([1, head_size // 32], [1, 32], [4, 1], [1, 0])


@gluon.constexpr_function
def _layout_of_copies(head_size):
    """The same for several splits at once."""
    return gl.BlockedLayout([1, 1, head_size // 32], [1, 1, 32], [1, 4, 1], [2, 1, 0])


@gluon.constexpr_function
def _layout_of_weights(kept_block):
    """Of the maxima and weights of some splits: every warp has all."""
    return gl.BlockedLayout([1, 1], [32 // kept_block, kept_block], [4, 1], [1, 0])


@gluon.constexpr_function
def _half_batch(kept_block):
    """Splits whose partial results are put where a tile of keys was; a power of two."""
    return min(TILE // 2 // kept_block, _MOST_AT_ONCE)


@gluon.constexpr_function
def _half_batches(kept_block):
    """How many half batches have room where a tile of keys was; only the first place is used."""
    return TILE // 2 // kept_block // _half_batch(kept_block)


@gluon.constexpr_function
def _plain(rank):
    """Shared memory without swizzling."""
    return gl.SwizzledSharedLayout(1, 1, 1, list(range(rank - 1, -1, -1)))


@gluon.jit
def memory_for_merging(kept_block: gl.constexpr, stages: gl.constexpr):
    """Maxima and weights of what the rings hold, fp32: of every batch those maxima and those weights of its early half,
    then those of its late half.
    """
    return gl.allocate_shared_memory(gl.float32, [stages * 4 * _half_batch(kept_block), kept_block], _plain(1))


@gluon.jit
def _start_copies(
    accs, sums, into, half: gl.constexpr, partial_top, partial_weight, partial_acc, first_place, first, splits, tokens,
    stride: gl.constexpr, group: gl.constexpr, head_size: gl.constexpr, kept_rows: gl.constexpr,
    kept_block: gl.constexpr,
):  # fmt: skip
    """Starts the copies of half a batch to place ``into``, from split ``first`` on; nothing is read for splits that
    there are not.
    """
    at_once: gl.constexpr = _half_batch(kept_block)
    if first < splits:
        layout: gl.constexpr = _layout_of_copies(head_size)
        of_split: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
        of_row: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, layout))
        of_dim: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, layout))
        split = gl.arange(0, at_once, of_split)
        row = gl.arange(0, kept_block, of_row)
        dim = gl.arange(0, head_size, of_dim)
        at = ((split * stride)[:, None, None] + row[None, :, None]) * head_size + dim[None, None, :]
        exists = (first + split < splits)[:, None] & ((row < kept_rows) & (row // group < tokens))[None, :]
        from_acc = partial_acc + (first_place + first * stride) * head_size
        copy_elements(accs.index(into * _half_batches(kept_block)), from_acc + at, mask=exists[:, :, None])
        weight_layout: gl.constexpr = _layout_of_weights(kept_block)
        split = first + gl.arange(0, at_once, gl.SliceLayout(1, weight_layout))
        row = gl.arange(0, kept_block, gl.SliceLayout(0, weight_layout))
        exists = (split < splits)[:, None] & ((row < kept_rows) & (row // group < tokens))[None, :]
        place = first_place + (split * stride)[:, None] + row[None, :]
        copy_elements(sums.index(into * 4 + 2 * half), partial_top + place, mask=exists)
        copy_elements(sums.index(into * 4 + 2 * half + 1), partial_weight + place, mask=exists)


@gluon.jit
def _merge_one(
    top, weight, acc, accs, sums, of, half: gl.constexpr, number: gl.constexpr, head_size: gl.constexpr,
    kept_block: gl.constexpr,
):  # fmt: skip
    """The running result and split ``number`` of half a batch, which is at place ``of``."""
    layout: gl.constexpr = layout_of_partials(head_size)
    at_once: gl.constexpr = _half_batch(kept_block)
    split_top = sums.index((of * 4 + 2 * half) * at_once + number).load(gl.SliceLayout(1, layout))
    split_weight = sums.index((of * 4 + 2 * half + 1) * at_once + number).load(gl.SliceLayout(1, layout))
    split_acc = accs.index(of * _half_batches(kept_block) * at_once + number).load(layout)
    top, weight, old, new = merge_weights(top, weight, split_top, split_weight)
    return top, weight, merge_values(acc, old, split_acc, new)


@gluon.jit
def _merge_half(
    top, weight, acc, accs, sums, of, half: gl.constexpr, first, splits, head_size: gl.constexpr,
    kept_block: gl.constexpr,
):  # fmt: skip
    """The running result and half a batch of splits, which is at place ``of``."""
    at_once: gl.constexpr = _half_batch(kept_block)
    if first + at_once <= splits:
        # Without conditions, so that the loads of all are on their way together.
        for number in gl.static_range(at_once):
            top, weight, acc = _merge_one(top, weight, acc, accs, sums, of, half, number, head_size, kept_block)
    else:
        for number in gl.static_range(at_once - 1):
            if first + number < splits:
                top, weight, acc = _merge_one(top, weight, acc, accs, sums, of, half, number, head_size, kept_block)
    return top, weight, acc


@gluon.jit
def merge_kept(
    out, partial_top, partial_weight, partial_acc, key_ring, value_ring, sums, first_place, merged, splits,
    start, tokens, kv_head, stride_o_token, stride_o_head, kv_heads: gl.constexpr, group: gl.constexpr,
    head_size: gl.constexpr, kept_rows: gl.constexpr, kept_block: gl.constexpr, stages: gl.constexpr,
):  # fmt: skip
    """Merges the partial results of a head, in ascending order, and writes the result. Nothing else may use the rings,
    which are overwritten.

    Args:
        sums: of ``memory_for_merging``.
        first_place: of the partial result of split 0.
        merged: splits that are merged already; the result of all of them is where the last one's would be.
    """
    layout: gl.constexpr = layout_of_partials(head_size)
    at_once: gl.constexpr = _half_batch(kept_block)
    stride: gl.constexpr = kv_heads * kept_rows
    places: gl.constexpr = stages * _half_batches(kept_block)
    batch_shape: gl.constexpr = [places, at_once, kept_block, head_size]
    split_shape: gl.constexpr = [places * at_once, kept_block, head_size]
    early_batches = reinterpret(key_ring, gl.float32, batch_shape, _plain(3))
    late_batches = reinterpret(value_ring, gl.float32, batch_shape, _plain(3))
    early_accs = reinterpret(key_ring, gl.float32, split_shape, _plain(2))
    late_accs = reinterpret(value_ring, gl.float32, split_shape, _plain(2))
    sums_of_batches = reinterpret(sums, gl.float32, [stages * 4, at_once, kept_block], _plain(2))
    kept = gl.arange(0, kept_block, gl.SliceLayout(1, layout))
    dims = gl.arange(0, head_size, gl.SliceLayout(0, layout))
    keep = (kept < kept_rows) & (kept // group < tokens)
    last = first_place + ((merged - 1) * stride).to(gl.int64) + kept
    known = keep & (merged > 0)
    top = gl.load(partial_top + last, known, -float("inf"), cache_modifier=".cg")
    weight = gl.load(partial_weight + last, known, 0.0, cache_modifier=".cg")
    acc = gl.load(partial_acc + last[:, None] * head_size + dims[None, :], known[:, None], 0.0, cache_modifier=".cg")
    batches = gl.cdiv(splits - merged, 2 * at_once)
    for batch in range(1 - stages, batches):
        # What the next copies overwrite has been read by every thread, and what is read next is there for all.
        barrier()
        ahead = batch + stages - 1
        into = ahead % stages
        first = merged + ahead * (2 * at_once)
        _start_copies(
            early_batches, sums_of_batches, into, 0, partial_top, partial_weight, partial_acc, first_place, first,
            splits, tokens, stride, group, head_size, kept_rows, kept_block,
        )  # fmt: skip
        _start_copies(
            late_batches, sums_of_batches, into, 1, partial_top, partial_weight, partial_acc, first_place,
            first + at_once, splits, tokens, stride, group, head_size, kept_rows, kept_block,
        )  # fmt: skip
        async_copy.commit_group()
        if batch >= 0:
            async_copy.wait_group(stages - 1)
            barrier()
            of = batch % stages
            first = merged + batch * (2 * at_once)
            top, weight, acc = _merge_half(
                top, weight, acc, early_accs, sums, of, 0, first, splits, head_size, kept_block
            )  # fmt: skip
            top, weight, acc = _merge_half(
                top, weight, acc, late_accs, sums, of, 1, first + at_once, splits, head_size, kept_block
            )  # fmt: skip
    async_copy.wait_group(0)
    barrier()
    divisor = gl.where(weight == 0.0, 1.0, weight)
    at_row = (start + kept // group).to(gl.int64) * stride_o_token + (kv_head * group + kept % group) * stride_o_head
    result = (acc / divisor[:, None]).to(out.dtype.element_ty)
    gl.store(out + at_row[:, None] + dims[None, :], result, mask=keep[:, None])

"""What the Hopper kernels of attention do with a tile of keys, in Gluon: the bits of ``triton_kernels._tile_of_keys``.

Every row goes through the same fp32 operations in the same order as there: a step of the online softmax for each 64
keys, weights summed by the tensor cores against ones, splits merged ascending with explicit fma.
"""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

from ...common.gluon_names import copy_block
from .shapes import TILE, WARPGROUP_ROWS

_TILE = gl.constexpr(TILE)
_ROWS = gl.constexpr(WARPGROUP_ROWS)


@gluon.constexpr_function
def page_part(page_size):
    """Keys that one copy brings."""
    return min(page_size, TILE)


def cache_layout(head_size: int, bits: int = 16) -> gl.NVMMASharedLayout:
    """How a tile of keys or values lies in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=min(128, head_size * bits // 8), element_bitwidth=bits, rank=4)


@gluon.constexpr_function
def layout_of_scores():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, TILE, 16])


@gluon.constexpr_function
def layout_of_acc(head_size):
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, head_size, 16])


@gluon.constexpr_function
def layout_of_sums():
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16])


@gluon.constexpr_function
def layout_of_rows(head_size):
    """Whole rows in pieces of 16 bytes, for global memory."""
    return gl.BlockedLayout([1, 8], [256 // head_size, head_size // 8], [4, 1], [1, 0])


@gluon.constexpr_function
def layout_of_kept(head_size):
    """The running result in shared memory: every thread gets its own back, 16 bytes at a time, without conflicts."""
    columns = [[0, 1 << bit] for bit in range(4, head_size.bit_length() - 1)]
    return gl.SharedLinearLayout(
        [[0, 1], [0, 8], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0], [8, 0], *columns, [16, 0], [32, 0]]
    )


@gluon.jit
def finite(top):
    """The number to subtract before exp2: 0 where nothing was visible, so that -inf gives a weight of 0 and not NaN."""
    return gl.where(top == -float("inf"), 0.0, top)


@gluon.jit
def next_stage(stage, phase, stages: gl.constexpr):
    """The next place in a ring, and the parity of its use."""
    phase = gl.where(stage == stages - 1, phase ^ 1, phase)
    return gl.where(stage == stages - 1, 0, stage + 1), phase


@gluon.jit
def start_of(number, levels: gl.constexpr):
    """The first key of a split: ``AttentionReduction.start_of``."""
    key = number * levels[0][1]
    for level in gl.static_range(1, len(levels)):
        start, size, first = levels[level]
        key = gl.where(number < first, key, start + (number - first) * size)
    return key


@gluon.jit
def split_of(key, levels: gl.constexpr):
    """The split that a key is in: ``AttentionReduction.split_of``."""
    number = key // levels[0][1]
    for level in gl.static_range(1, len(levels)):
        start, size, first = levels[level]
        number = gl.where(key < start, number, first + (key - start) // size)
    return number


@gluon.jit
def is_end_of_split(key, levels: gl.constexpr):
    """Whether a split ends before the key; ``levels`` as in ``AttentionReduction``."""
    ends = key % levels[0][1] == 0
    for level in gl.static_range(1, len(levels)):
        start, size, _ = levels[level]
        ends = gl.where(key <= start, ends, (key - start) % size == 0)
    return ends


@gluon.jit
def copy_tile(
    cache, ring, ready, stage, pages, kv_head, slot, wanted, page_size: gl.constexpr, head_size: gl.constexpr
):  # fmt: skip
    """Starts the copy of a tile, a page or a part of one at a time."""
    part: gl.constexpr = page_part(page_size)
    mbarrier.expect(ready.index(stage), _TILE * head_size * 2, pred=wanted)
    place = ring.index(stage)
    for number in gl.static_range(_TILE // part):
        copy_block(
            cache,
            [pages[number], kv_head, slot, 0],
            ready.index(stage),
            place.slice(number * part, part, dim=2),
            pred=wanted,
        )


@gluon.jit
def masked(score, position, at):
    """The scores of a tile, -inf for keys after a row's position."""
    keys = at + gl.arange(0, _TILE, gl.SliceLayout(0, score.type.layout))
    return gl.where(position[:, None] >= keys[None, :], score, -float("inf"))


@gluon.jit
def weights_of(score, top, factor, dtype: gl.constexpr):
    """A step of the online softmax: the new maximum, the weights, and what the weights before them shrink by."""
    layout: gl.constexpr = score.type.layout
    # In two steps, because one is a chain of as many operations as a thread has scores of a row.
    largest = gl.max(gl.max(gl.reshape(score, [_ROWS, _TILE // 8, 8]), 1), 1)
    new_top = gl.maximum(top, gl.convert_layout(largest, gl.SliceLayout(1, layout)) * factor)
    zero = finite(new_top)
    score, negative = gl.broadcast(score, (-zero)[:, None])
    p = gl.exp2(gl.fma(score, gl.full([_ROWS, _TILE], factor, gl.float32, layout), negative))
    return new_top, p.to(dtype), gl.exp2(top - zero)


@gluon.jit
def start_sums(p, old, weight, ones):
    """Starts to add a tile's weights to those so far, as products with 1: every column is the sum. By asynchronous
    products, because others would wait for all that are under way.
    """
    layout: gl.constexpr = layout_of_sums()
    p = gl.convert_layout(p, gl.DotOperandLayout(0, layout, 2), assert_trivial=True)
    weight = weight * gl.convert_layout(old, gl.SliceLayout(1, layout))[:, None]
    return warpgroup_mma(p, ones, weight, is_async=True)


@gluon.jit
def merge_weights(top, weight, split_top, split_weight):
    """Maxima and weights of the running result and one more split, and the factors of their values."""
    new_top = gl.maximum(top, split_top)
    zero = finite(new_top)
    old, new = gl.exp2(top - zero), gl.exp2(split_top - zero)
    return new_top, gl.fma(weight, old, split_weight * new), old, new


@gluon.jit
def merge_values(acc, old, split_acc, new):
    split_acc, old = gl.broadcast(split_acc, old[:, None])
    return gl.fma(acc, old, split_acc * new[:, None])


@gluon.jit
def row_sum(weight, layout: gl.constexpr):
    """All columns are equal, so the largest is any of them."""
    return gl.convert_layout(gl.max(weight, 1), layout)


@gluon.jit
def start_scores(q, key_ring, stage, head_size: gl.constexpr):
    """Starts the product of the rows with a tile of keys."""
    keys = key_ring.index(stage).reshape([_TILE, head_size]).permute([1, 0])
    nothing = gl.full([_ROWS, _TILE], 0.0, gl.float32, layout_of_scores())
    return warpgroup_mma(q, keys, nothing, use_acc=False, is_async=True)

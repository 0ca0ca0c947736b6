"""Splits of the keys in Triton: where they begin, and how their results merge.

With ``m`` the maximum of a row's scores in units of log2(e), ``l`` the sum of its weights and ``acc`` the sum of its
weighted values, a running result and the next split make

    m' = max(m, m_split),  alpha = 2^(m - m'),  alpha_split = 2^(m_split - m'),
    l' = l alpha + l_split alpha_split,  acc' = acc alpha + acc_split alpha_split.

A Gluon kernel has the same functions as ``gluon.jit(split_of.fn)``, as Triton makes its own library's: every operation
in them is one of both languages. ``SPLIT_SEGMENTS`` is ``AttentionReduction.split_segments``, (start, size, first
split) of each run of splits of one size.
"""

import triton
import triton.language as tl


@triton.jit
def split_of(position, SPLIT_SEGMENTS: tl.constexpr):
    """The split that a position is in: ``AttentionReduction.split_of``."""
    split = position // SPLIT_SEGMENTS[0][1]
    for segment in tl.static_range(1, len(SPLIT_SEGMENTS)):
        start, size, first = SPLIT_SEGMENTS[segment]
        split = tl.where(position < start, split, first + (position - start) // size)
    return split


@triton.jit
def start_of(split, SPLIT_SEGMENTS: tl.constexpr):
    """The first position of a split: ``AttentionReduction.start_of``."""
    position = split * SPLIT_SEGMENTS[0][1]
    for segment in tl.static_range(1, len(SPLIT_SEGMENTS)):
        start, size, first = SPLIT_SEGMENTS[segment]
        position = tl.where(split < first, position, start + (split - first) * size)
    return position


@triton.jit
def is_end_of_split(position, SPLIT_SEGMENTS: tl.constexpr):
    """Whether a split ends just before the position."""
    ends = position % SPLIT_SEGMENTS[0][1] == 0
    for segment in tl.static_range(1, len(SPLIT_SEGMENTS)):
        start, size, _ = SPLIT_SEGMENTS[segment]
        ends = tl.where(position <= start, ends, (position - start) % size == 0)
    return ends


@triton.jit
def finite_max(m):
    """What to subtract before exp2: 0 where nothing is visible, so that -inf gives a weight of 0 and not NaN."""
    return tl.where(m == -float("inf"), 0.0, m)


@triton.jit
def merge_sums(m, l, split_m, split_l):
    """The new ``m`` and ``l``, ``alpha`` and ``alpha_split``; a split without a visible key weighs exactly 0."""
    new_m = tl.maximum(m, split_m)
    zero = finite_max(new_m)
    alpha, split_alpha = tl.exp2(m - zero), tl.exp2(split_m - zero)
    return new_m, tl.fma(l, alpha, split_l * split_alpha), alpha, split_alpha


@triton.jit
def merge_acc(acc, alpha, split_acc, split_alpha):
    """The new ``acc`` [rows, HEAD_DIM]; the factors are [rows]."""
    split_acc, alpha = tl.broadcast(split_acc, alpha[:, None])
    return tl.fma(acc, alpha, split_acc * split_alpha[:, None])


@triton.jit
def merge_splits(m, l, acc, split_m, split_l, split_acc):
    """The running result and one more split: the new ``m``, ``l`` and ``acc``."""
    m, l, alpha, split_alpha = merge_sums(m, l, split_m, split_l)
    return m, l, merge_acc(acc, alpha, split_acc, split_alpha)


@triton.jit
def add_sink(m, l, sink):
    """The sum of a row's weights and that of its sink, which is in units of log2(e); and what values shrink by."""
    new_m = tl.maximum(m, sink)
    alpha = tl.exp2(m - new_m)
    return tl.fma(l, alpha, tl.exp2(sink - new_m)), alpha


@triton.jit
def normalize(m, l, acc, sink, USE_SINKS: tl.constexpr):
    """The result of each row, ``acc / l``; a sink adds a weight to ``l`` and no value, ``sink`` in units of log2(e)."""
    if USE_SINKS:
        l, alpha = add_sink(m, l, sink)
        acc = acc * alpha[:, None]
    return acc / tl.where(l == 0.0, 1.0, l)[:, None]

"""Triton kernels of adapters of low rank, in two launches. Of a row x [K], the adapter A [RANK, K], B [N, RANK] in its
slot, and the base layer's row y [N]::

    L[i] = 0;  L[i] += x[k : k + 16] . A[r, k : k + 16]      k ascending in leaf i: one accumulator of the tensor core
    u[r] = round(0 + L[0] + L[1] + ...)                      fp32, i ascending
    d[n] = 0;  d[n] += u[r : r + 16] . B[n, r : r + 16]      r ascending: one accumulator
    y[n] = round(y[n] + d[n])

The first launch writes L, or their sum where one program has all leaves of its columns; the second adds them in its
prologue, and multiplies. Nothing is added by several programs, so nothing is zeroed before, and there are no atomics.

Rows of one slot are grouped into blocks of BLOCK_M, as pairs of one expert are in :mod:`..moe`; a block of fewer rows
has zeros in their place. Every tile has fewer than 64 rows, so that the tensor core's instruction is mma.sync on every
GPU, of 16 elements of K, whatever the tile: an element of its result is made of one row of either operand and of its
accumulator. So no block, no neighbour in it and no tile moves a row's bits. Behind K and RANK there are zeros, which an
accumulator that began with +0 keeps its bits for.
"""

import triton
import triton.language as tl

from ..common.dependent_launch import wait_for_kernel_before
from ..moe.triton_kernels import first_of_few, pairs_of_block, pairs_of_few


@triton.jit
def _rows_of_block(
    rows_ptr, stop_ptr, slot_of_block_ptr, block, num_rows, FEW_ROWS: tl.constexpr, BLOCK_M: tl.constexpr
):
    """The slot of a block, -1 for one without rows, its rows [BLOCK_M] and which of them there are."""
    if FEW_ROWS:
        first = first_of_few(rows_ptr, None, block, num_rows, False, FEW_ROWS, BLOCK_M)
        slot, rows = pairs_of_few(rows_ptr, None, tl.maximum(first, 0), num_rows, False, FEW_ROWS, BLOCK_M)
        slot = tl.where(first < 0, -1, slot)
        mask = rows >= 0
    else:
        slot = tl.load(slot_of_block_ptr + block)
        rows, mask = pairs_of_block(rows_ptr, stop_ptr, tl.maximum(slot, 0), block, BLOCK_M)
    return slot.to(tl.int64), tl.where(mask, rows, 0).to(tl.int64), mask


@triton.jit
def _step(step, first_leaf, offs_k, mask, K, K_LEAF: tl.constexpr, BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr):
    """Where a step's elements of K begin, and which there are, of rows with a mask [rows, 1]."""
    STEPS: tl.constexpr = (K_LEAF + BLOCK_K - 1) // BLOCK_K
    in_leaf = step % STEPS * BLOCK_K
    start_k = (first_leaf + step // STEPS) * K_LEAF + in_leaf
    if not EVEN_K:
        mask = mask & (offs_k < tl.minimum(K_LEAF - in_leaf, K - start_k))[None, :]
    return start_k, mask


@triton.jit(do_not_specialize=["num_rows"])
def shrink_kernel(
    x_ptr, a_ptrs, sums_ptr, rows_ptr, stop_ptr, slot_of_block_ptr, num_rows, stride_x, K,
    RANK: tl.constexpr, K_LEAF: tl.constexpr, LEAVES: tl.constexpr, BY_LEAF: tl.constexpr, AHEAD: tl.constexpr,
    EVEN_K: tl.constexpr, FEW_ROWS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr,
    IN_REGISTERS: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """x: [num_rows, K], a_ptrs: of each slice [slots, RANK, K], packed, sums: fp32 [LEAVES, num_rows, slices * RANK],
    of every leaf, or without BY_LEAF [num_rows, slices * RANK], their sum. A program has BLOCK_R columns of one slice.

    With AHEAD kernels before write neither A nor where rows are. With IN_REGISTERS a leaf is one step.
    """
    SLICES: tl.constexpr = len(a_ptrs)
    TILES: tl.constexpr = (RANK + BLOCK_R - 1) // BLOCK_R
    STEPS: tl.constexpr = (K_LEAF + BLOCK_K - 1) // BLOCK_K
    AT_ONCE: tl.constexpr = 1 if BY_LEAF else LEAVES
    tile, rest = tl.program_id(0) % TILES, tl.program_id(0) // TILES
    which, rest = rest % SLICES, rest // SLICES
    first_leaf, block = (rest % LEAVES, rest // LEAVES) if BY_LEAF else (0, rest)
    if not AHEAD:
        wait_for_kernel_before(OVERLAPS)
    slot, rows, mask_m = _rows_of_block(rows_ptr, stop_ptr, slot_of_block_ptr, block, num_rows, FEW_ROWS, BLOCK_M)
    if slot < 0:
        if AHEAD:  # the next kernel reads what kernels before this one have written
            wait_for_kernel_before(OVERLAPS)
        return
    a_ptr = a_ptrs[0]
    for number in tl.static_range(1, SLICES):
        if which == number:
            a_ptr = a_ptrs[number]
    offs_r, offs_k = tile * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_K)
    mask_r = offs_r < RANK
    x_ptrs = x_ptr + rows[:, None] * stride_x + offs_k[None, :]
    a_rows = a_ptr + slot * RANK * K + offs_r[:, None] * K + offs_k[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    total = acc
    if IN_REGISTERS:
        start_k, mask = _step(0, first_leaf, offs_k, mask_r[:, None], K, K_LEAF, BLOCK_K, EVEN_K)
        a = tl.load(a_rows + start_k, mask=mask, other=0.0)
        if AHEAD:
            wait_for_kernel_before(OVERLAPS)
        start_k, mask = _step(0, first_leaf, offs_k, mask_m[:, None], K, K_LEAF, BLOCK_K, EVEN_K)
        x = tl.load(x_ptrs + start_k, mask=mask, other=0.0)
        acc = tl.dot(x, a.T, acc, input_precision="ieee")
    else:
        if AHEAD:
            wait_for_kernel_before(OVERLAPS)
        for step in range(AT_ONCE * STEPS):
            start_k, x_mask = _step(step, first_leaf, offs_k, mask_m[:, None], K, K_LEAF, BLOCK_K, EVEN_K)
            start_k, a_mask = _step(step, first_leaf, offs_k, mask_r[:, None], K, K_LEAF, BLOCK_K, EVEN_K)
            x = tl.load(x_ptrs + start_k, mask=x_mask, other=0.0)  # [BLOCK_M, BLOCK_K]
            a = tl.load(a_rows + start_k, mask=a_mask, other=0.0)  # [BLOCK_R, BLOCK_K]
            acc = tl.dot(x, a.T, acc, input_precision="ieee")
            if not BY_LEAF:
                ends = step % STEPS == STEPS - 1
                total = tl.where(ends, total + acc, total)
                acc = tl.where(ends, 0.0, acc)
    width: tl.constexpr = SLICES * RANK
    sums = sums_ptr + (first_leaf.to(tl.int64) * num_rows if BY_LEAF else 0) * width
    columns = which * RANK + offs_r
    tl.store(
        sums + rows[:, None] * width + columns[None, :],
        acc if BY_LEAF else total,
        mask=mask_m[:, None] & mask_r[None, :],
    )


@triton.jit
def _added(sums, num_rows, mask, WIDTH: tl.constexpr, LEAVES: tl.constexpr, DTYPE: tl.constexpr):
    """u of a shape, rounded to DTYPE: of pointers to the first leaf's sums, one leaf after the other."""
    of_leaves = ()
    for leaf in tl.static_range(LEAVES):  # all are on their way before the first is waited for
        of_leaf = tl.load(sums + leaf * num_rows.to(tl.int64) * WIDTH, mask=mask, other=0.0)
        of_leaves = of_leaves + (of_leaf,)  # noqa: RUF005
    total = tl.zeros(mask.shape, tl.float32)
    for leaf in tl.static_range(LEAVES):
        total += of_leaves[leaf]
    return total.to(DTYPE)


@triton.jit
def _tile_of_y(y_rows, b_rows, first_n, count, mask_m, mask_r, BLOCK_N: tl.constexpr, RANK: tl.constexpr):
    """Columns of y [BLOCK_M, BLOCK_N] from one of a slice on, and rows of its B [BLOCK_N, BLOCK_R]."""
    offs_n = first_n + tl.arange(0, BLOCK_N)
    mask_n = offs_n < count
    y = tl.load(y_rows + offs_n[None, :], mask=mask_m[:, None] & mask_n[None, :], other=0.0)
    b = tl.load(b_rows + offs_n.to(tl.int64)[:, None] * RANK, mask=mask_n[:, None] & mask_r[None, :], other=0.0)
    return y, b


@triton.jit(do_not_specialize=["num_rows"])
def expand_kernel(
    y_ptr, sums_ptr, b_ptrs, columns, rows_ptr, stop_ptr, slot_of_block_ptr, num_rows, stride_y,
    RANK: tl.constexpr, LEAVES: tl.constexpr, AHEAD: tl.constexpr, FEW_ROWS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES_N: tl.constexpr, BLOCK_R: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """y: [num_rows, N], changed in place, sums: fp32 [LEAVES, num_rows, slices * RANK], b_ptrs: of each slice
    [slots, columns, RANK], packed; columns: of each slice, whose sum is N. A program has TILES_N tiles of one slice.

    With AHEAD the kernel before writes ``sums`` alone, and has waited for those before it.
    """
    SLICES: tl.constexpr = len(b_ptrs)
    PART: tl.constexpr = BLOCK_N * TILES_N
    parts = tl.cdiv(columns[0], PART)
    for number in tl.static_range(1, SLICES):
        parts += tl.cdiv(columns[number], PART)
    block, part = tl.program_id(0) // parts, tl.program_id(0) % parts
    if not AHEAD:
        wait_for_kernel_before(OVERLAPS)
    slot, rows, mask_m = _rows_of_block(rows_ptr, stop_ptr, slot_of_block_ptr, block, num_rows, FEW_ROWS, BLOCK_M)
    if slot < 0:
        if AHEAD:
            wait_for_kernel_before(OVERLAPS)
        return
    b_ptr, count, first, before, which = b_ptrs[0], columns[0], part, 0, 0
    stop, parts_before = columns[0], tl.cdiv(columns[0], PART)
    for number in tl.static_range(1, SLICES):
        if part >= parts_before:
            b_ptr, count, first, before, which = b_ptrs[number], columns[number], part - parts_before, stop, number
        parts_before += tl.cdiv(columns[number], PART)
        stop += columns[number]
    width: tl.constexpr = SLICES * RANK
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    offs_r = tl.arange(0, BLOCK_R)
    mask_r = offs_r < RANK
    y_rows = y_ptr + rows[:, None] * stride_y + before
    b_rows = b_ptr + slot * count * RANK + offs_r[None, :]
    y, b = _tile_of_y(y_rows, b_rows, first * PART, count, mask_m, mask_r, BLOCK_N, RANK)
    if AHEAD:
        wait_for_kernel_before(OVERLAPS)
    sums = sums_ptr + rows[:, None] * width + (which * RANK + offs_r)[None, :]
    u = tl.zeros((BLOCK_M, BLOCK_R), dtype)
    if num_rows > 0:  # always: apart from the product, or the compiler moves each leaf through shared memory by itself
        u = _added(sums, num_rows, mask_m[:, None] & mask_r[None, :], width, LEAVES, dtype)
    # A zero that the compiler does not know: from one that it knows it would have the product begin with y.
    nothing = tl.zeros((BLOCK_M, BLOCK_N), tl.float32) + (num_rows < 0).to(tl.float32)
    for tile in tl.static_range(TILES_N):
        first_n = first * PART + tile * BLOCK_N
        if tile + 1 < TILES_N:
            next_y, next_b = _tile_of_y(y_rows, b_rows, first_n + BLOCK_N, count, mask_m, mask_r, BLOCK_N, RANK)
        acc = tl.dot(u, b.T, nothing, input_precision="ieee")
        offs_n = first_n + tl.arange(0, BLOCK_N)
        mask_n = offs_n < count
        for start_r in range(BLOCK_R, RANK, BLOCK_R):
            mask_more = offs_r < RANK - start_r
            more = _added(sums + start_r, num_rows, mask_m[:, None] & mask_more[None, :], width, LEAVES, dtype)
            b_more = b_rows + offs_n.to(tl.int64)[:, None] * RANK + start_r
            b = tl.load(b_more, mask=mask_n[:, None] & mask_more[None, :], other=0.0)
            acc = tl.dot(more, b.T, acc, input_precision="ieee")
        out = (y.to(tl.float32) + acc).to(dtype)
        tl.store(y_rows + offs_n[None, :], out, mask=mask_m[:, None] & mask_n[None, :])
        if tile + 1 < TILES_N:
            y, b = next_y, next_b

"""Triton kernels of the product: each element is one chain of tensor-core steps over K, whatever the tile.

One kernel reads through pointers and takes any strides, dtypes and batches; the other reads through the tensor memory
accelerator (compute capability 9.0 and above), which is what keeps a multiprocessor busy with few warps. A row has the
same bits from both, so which one runs is a matter of speed.
"""

import triton
import triton.language as tl

_TILES_SHARING_B = tl.constexpr(8)
"""Tiles of rows worked on side by side, so that they find their columns of b in the L2 cache."""


@triton.jit
def _place(tile, tiles_m, tiles_n):
    """Row and column of a tile in an order that keeps tiles with the same columns together."""
    first_m = tile // (_TILES_SHARING_B * tiles_n) * _TILES_SHARING_B
    height = min(tiles_m - first_m, _TILES_SHARING_B)
    place = tile % (_TILES_SHARING_B * tiles_n)
    return first_m + place % height, place // height


@triton.jit(do_not_specialize=["m", "stride_a_batch", "stride_b_batch"])
def pointer_kernel(
    a,
    b,
    bias,
    out,
    m,
    n,
    k,
    stride_a_batch,
    stride_b_batch,
    stride_a_m,
    stride_a_k,
    stride_b_k,
    stride_b_n,
    has_bias: tl.constexpr,
    whole_steps: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
    precision: tl.constexpr,
):
    tiles_m, tiles_n = tl.cdiv(m, tile_m), tl.cdiv(n, tile_n)
    batch = (tl.program_id(0) // (tiles_m * tiles_n)).to(tl.int64)
    row, column = _place(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n)

    # 64-bit, because an operand may have more than 2**31 elements.
    rows = row.to(tl.int64) * tile_m + tl.arange(0, tile_m)
    columns = column.to(tl.int64) * tile_n + tl.arange(0, tile_n)
    depth = tl.arange(0, tile_k).to(tl.int64)
    a += batch * stride_a_batch + rows[:, None] * stride_a_m + depth[None, :] * stride_a_k
    b += batch * stride_b_batch + depth[:, None] * stride_b_k + columns[None, :] * stride_b_n
    in_m, in_n = rows < m, columns < n

    step = tl.full((), tile_k, tl.int64)
    acc = tl.zeros((tile_m, tile_n), tl.float64 if a.dtype.element_ty == tl.float64 else tl.float32)
    for start in range(0, k, tile_k):
        if whole_steps:
            a_mask, b_mask = in_m[:, None], in_n[None, :]
        else:
            in_k = depth < k - start
            a_mask, b_mask = in_m[:, None] & in_k[None, :], in_k[:, None] & in_n[None, :]
        step_a = tl.load(a, mask=a_mask, other=0.0)
        step_b = tl.load(b, mask=b_mask, other=0.0)
        acc = tl.dot(step_a, step_b, acc, input_precision=precision, out_dtype=acc.dtype)
        a += step * stride_a_k
        b += step * stride_b_k
    if has_bias:
        acc += tl.load(bias + columns, mask=in_n, other=0.0).to(acc.dtype)[None, :]
    out += batch * m * n + rows[:, None] * n + columns[None, :]
    tl.store(out, acc.to(out.dtype.element_ty), mask=in_m[:, None] & in_n[None, :])


@triton.jit(do_not_specialize=["n", "k", "tiles_m"])
def descriptor_kernel(
    a,
    b,
    bias,
    out,
    n,
    k,
    tiles_m,
    a_by_rows: tl.constexpr,
    b_by_columns: tl.constexpr,
    has_bias: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
):
    """a: descriptor of [M, K] (of its transpose unless ``a_by_rows``), b: of [N, K] (of its transpose unless
    ``b_by_columns``), out: of [M, N]. Elements beyond an edge read as zero and are not written.

    A tile of few rows is computed transposed: the tensor core's long side takes the columns of b.
    """
    transposed: tl.constexpr = tile_m < 64
    tiles_n = tl.cdiv(n, tile_n)
    for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0), flatten=True):
        row, column = _place(tile, tiles_m, tiles_n)
        first_m, first_n = row * tile_m, column * tile_n
        acc = tl.zeros((tile_n, tile_m) if transposed else (tile_m, tile_n), tl.float32)
        for start in range(0, k, tile_k):
            step_a = a.load([first_m, start]) if a_by_rows else a.load([start, first_m]).T
            step_b = b.load([first_n, start]) if b_by_columns else b.load([start, first_n]).T
            acc = tl.dot(step_b, step_a.T, acc) if transposed else tl.dot(step_a, step_b.T, acc)
        if has_bias:
            columns = first_n + tl.arange(0, tile_n)
            added = tl.load(bias + columns, mask=columns < n, other=0.0).to(tl.float32)
            acc += added[:, None] if transposed else added[None, :]
        rounded = acc.to(out.dtype)
        out.store([first_m, first_n], rounded.T if transposed else rounded)

"""Kernels that must fail the checks that the real ones pass."""

import triton
import triton.language as tl


@triton.jit
def masked_rows_kernel(
    a,
    b,
    out,
    m,
    n: tl.constexpr,
    k: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
):
    """A product without padding: the last tile's rows are cut at M. a: [m, k], b: [k, n], out: [m, n]."""
    tiles_n: tl.constexpr = n // tile_n
    for tile in range(tl.program_id(0), tl.cdiv(m, tile_m) * tiles_n, tl.num_programs(0)):
        rows = (tile // tiles_n * tile_m + tl.arange(0, tile_m))[:, None]
        columns = (tile % tiles_n * tile_n + tl.arange(0, tile_n))[None, :]
        acc = tl.zeros((tile_m, tile_n), tl.float32)
        for start in range(0, k, tile_k):
            depth = start + tl.arange(0, tile_k)
            step_a = tl.load(a + rows * k + depth[None, :], mask=rows < m, other=0.0)
            step_b = tl.load(b + depth[:, None] * n + columns)
            acc = tl.dot(step_a, step_b, acc, input_precision="ieee")
        tl.store(out + rows * n + columns, acc.to(out.dtype.element_ty), mask=rows < m)


@triton.jit
def strided_kernel(
    a,
    b,
    out,
    m,
    n,
    k,
    stride_m,
    stride_k,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
):
    """A product with everything known at run time only, as vLLM's own kernel has it. a: [m, k], b: [k, n]."""
    tiles_n = tl.cdiv(n, tile_n)
    for tile in range(tl.program_id(0), tl.cdiv(m, tile_m) * tiles_n, tl.num_programs(0)):
        rows = (tile // tiles_n * tile_m + tl.arange(0, tile_m))[:, None]
        columns = (tile % tiles_n * tile_n + tl.arange(0, tile_n))[None, :]
        acc = tl.zeros((tile_m, tile_n), tl.float32)
        for start in range(0, k, tile_k):
            depth = start + tl.arange(0, tile_k)
            a_mask, b_mask = (rows < m) & (depth[None, :] < k), (depth[:, None] < k) & (columns < n)
            step_a = tl.load(a + rows * stride_m + depth[None, :] * stride_k, mask=a_mask, other=0.0)
            step_b = tl.load(b + depth[:, None] * n + columns, mask=b_mask, other=0.0)
            acc = tl.dot(step_a, step_b, acc, input_precision="ieee")
        tl.store(out + rows * n + columns, acc.to(out.dtype.element_ty), mask=(rows < m) & (columns < n))


@triton.jit
def biased_kernel(
    a,
    b,
    bias,
    out,
    tiles_m,
    n: tl.constexpr,
    k: tl.constexpr,
    tile_m: tl.constexpr,
    tile_n: tl.constexpr,
    tile_k: tl.constexpr,
):
    """A product that adds its bias itself. a: [tiles_m * tile_m, k], b: [k, n], bias: [n]."""
    tiles_n: tl.constexpr = n // tile_n
    for tile in range(tl.program_id(0), tiles_m * tiles_n, tl.num_programs(0)):
        rows = (tile // tiles_n * tile_m + tl.arange(0, tile_m))[:, None]
        columns = tile % tiles_n * tile_n + tl.arange(0, tile_n)
        acc = tl.zeros((tile_m, tile_n), tl.float32)
        for start in range(0, k, tile_k):
            depth = start + tl.arange(0, tile_k)
            step_a = tl.load(a + rows * k + depth[None, :])
            step_b = tl.load(b + depth[:, None] * n + columns[None, :])
            acc = tl.dot(step_a, step_b, acc, input_precision="ieee")
        acc += tl.load(bias + columns).to(tl.float32)[None, :]
        tl.store(out + rows * n + columns[None, :], acc.to(out.dtype.element_ty))


@triton.jit(do_not_specialize=["num_rows", "length"], do_not_specialize_on_alignment=["x_ptr", "sums_ptr"])
def late_blocks_first_kernel(x_ptr, sums_ptr, num_rows, length, block: tl.constexpr):
    """Row sums that begin with the row's last block."""
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row_ptr = x_ptr + tl.cast(row, tl.int64) * length
        acc = tl.zeros((block,), tl.float32)
        num_blocks = tl.cdiv(length, block)
        for index in range(num_blocks):
            offs = (num_blocks - 1 - index) * block + tl.arange(0, block)
            acc += tl.load(row_ptr + offs, mask=offs < length, other=0.0).to(tl.float32)
        tl.store(sums_ptr + row, tl.sum(acc).to(sums_ptr.dtype.element_ty))

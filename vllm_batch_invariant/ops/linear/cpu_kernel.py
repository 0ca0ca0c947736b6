"""The numba kernels of GEMMs on the CPU: one chain of fused multiply-adds for each element of the result::

    s = 0
    for k in range(K):        # ascending
        s = fma(x[m, k], w[n, k], s)

in fp32 for bf16, fp16 and fp32, in fp64 for fp64. Elements of 16 bits are widened exactly. An fma rounds once by IEEE
754, so a lane of any vector has the bits of that loop: which rows and columns are computed together, where K is
interrupted to keep what is read in a cache, and how many threads share the work move none.

A weight [N, K] is held in panels of 32 columns of the result (16 in fp64), each [K, 32]: what an instruction reads is
contiguous, and so is a whole panel. In 16 bits, element i and element i + 16 of those columns are neighbours, so that
a word has two that a shift and a mask widen.
"""

import platform

import numpy as np
from llvmlite import ir
from llvmlite.binding import get_host_cpu_features
from numba import config, njit, prange, types
from numba.extending import intrinsic

from ..common.numba_bf16 import BF16, rounded, widened
from ..common.numba_rows import array_at, compiled
from ..common.numba_simd import float_of_bfloat, float_of_half, fma_of

PANEL_BYTES = 128
"""Of a panel's columns in the accumulator's dtype: two vectors of the widest registers."""
BLOCK_K = 1024
"""Elements of K that a group of blocks of rows is multiplied by before the next ones: those of a panel and of a block
stay in the second cache.
"""
ROW_STRIDE = BLOCK_K + 16
"""Elements from a row of a block to the next: rows that are a power of two apart would share few lines of the first
cache.
"""
SERIAL_BELOW = 1 << 16
"""Elements of x that one thread packs while others would wake."""
GROUP = 8
"""Blocks of rows that share a panel before the next one."""
_TURNED_K = 32
"""Elements of K that a panel is filled with at a time, for each of its columns."""
_INDEX, _OFFSET = ir.IntType(32), ir.IntType(64)
_WIDE = 64
"""Bytes of a register of AVX-512."""


def _features(context):
    return set(context.codegen()._tm_features.split(","))


def _register_bytes(context):
    """Of a vector: a register of AVX-512, or half of one. Where those are wider than the CPU's, LLVM takes several."""
    return _WIDE if "+avx512f" in _features(context) else _WIDE // 2


def _most_rows(context):
    return 14 if _register_bytes(context) == _WIDE else 6


def _has_half(context):
    return bool({"+f16c", "+avx512f"} & _features(context))


def has_fma():
    """Whether the CPU that numba compiles for has an instruction for the chains: every one but older x86 has."""
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return True
    told = config.CPU_FEATURES
    return "+fma" in told if told else bool(config.CPU_NAME) or get_host_cpu_features().get("fma", False)


@intrinsic
def most_rows(typing_context):
    """Rows of a block: as many as have their sums in registers beside the columns of a panel."""

    def codegen(context, builder, signature, arguments):
        return _OFFSET(_most_rows(context))

    return types.intp(), codegen


@intrinsic
def lanes_of(typing_context, out):
    """Elements of a vector of the dtype of an array."""

    def codegen(context, builder, signature, arguments):
        return _OFFSET(_register_bytes(context) * 8 // signature.args[0].dtype.bitwidth)

    return types.intp(out), codegen


def _two_vectors(context, builder, dtype, data, vector):
    """Columns i and i + half a panel of one k of a panel, widened, for as many i as a vector has lanes; ``data`` points
    at the first.
    """
    lanes = vector.count
    if dtype.bitwidth != 16:
        half = _OFFSET(PANEL_BYTES * 8 // dtype.bitwidth // 2)
        places = data, builder.gep(data, [half])
        return [
            builder.load(builder.bitcast(place, vector.as_pointer()), align=dtype.bitwidth // 8) for place in places
        ]
    words_type = ir.VectorType(ir.IntType(32), lanes)
    words = builder.load(builder.bitcast(data, words_type.as_pointer()), align=2)
    sixteen, low = ir.Constant(words_type, [16] * lanes), ir.Constant(words_type, [0xFFFF] * lanes)
    if dtype == BF16:
        high = builder.and_(words, builder.not_(low))
        return [float_of_bfloat(builder, words), builder.bitcast(high, vector)]
    parts = builder.and_(words, low), builder.lshr(words, sixteen)
    if not _has_half(context):
        return [float_of_half(builder, part) for part in parts]
    short, half = ir.VectorType(ir.IntType(16), lanes), ir.VectorType(ir.HalfType(), lanes)
    return [builder.fpext(builder.bitcast(builder.trunc(part, short), half), vector) for part in parts]


@intrinsic
def add_products(typing_context, x, x_offset, weight, w_offset, out, out_offset, rows, k, step, ldc, fresh):
    """Add k products to the sums of a block of rows with two vectors of columns: ``out[r, c] = fma(x[r, k], w[c, k],
    out[r, c])``, k ascending; unchecked.

    Args:
        x: of ``out``'s dtype, [rows, k] from its offset on, :data:`ROW_STRIDE` apart.
        weight: a panel, whose k are ``step`` elements apart.
        out: its columns are those of one vector from the offset on, and those half a panel behind them.
        rows: 1 to :func:`most_rows`.
        ldc: elements from a row of ``out`` to the next.
        fresh: whether the sums begin here, with 0.
    """
    numbers = (types.intp,) * 4
    signature = types.void(x, types.intp, weight, types.intp, out, types.intp, *numbers, types.boolean)

    def codegen(context, builder, signature, arguments):
        x_type, w_type, out_type = (signature.args[place] for place in (0, 2, 4))
        element = context.get_data_type(out_type.dtype)
        lanes = _register_bytes(context) * 8 // out_type.dtype.bitwidth
        vector, half = ir.VectorType(element, lanes), _OFFSET(PANEL_BYTES * 8 // out_type.dtype.bitwidth // 2)
        fma = fma_of(builder, vector)
        a, b, c = (
            builder.gep(context.make_array(kind)(context, builder, arguments[place]).data, [arguments[place + 1]])
            for kind, place in ((x_type, 0), (w_type, 2), (out_type, 4))
        )
        rows, k, step, ldc, fresh = arguments[6:]
        if fresh.type.width > 1:
            fresh = builder.trunc(fresh, ir.IntType(1))
        align = out_type.dtype.bitwidth // 8
        zeros = ir.Constant(vector, [0.0] * lanes)
        splat = ir.Constant(ir.VectorType(_INDEX, lanes), [0] * lanes)
        undefined = ir.Constant(vector, ir.Undefined)
        done = builder.append_basic_block("done")
        chosen = builder.switch(rows, done)
        for count in range(1, _most_rows(context) + 1):
            head, loop, tail = (builder.append_basic_block(f"{part}{count}") for part in ("head", "loop", "tail"))
            chosen.add_case(_OFFSET(count), head)
            builder.position_at_end(head)
            places = []
            for row in range(count):
                first = builder.gep(c, [builder.mul(ldc, _OFFSET(row))])
                places += [builder.bitcast(place, vector.as_pointer()) for place in (first, builder.gep(first, [half]))]
            begun = [builder.select(fresh, zeros, builder.load(place, align=align)) for place in places]
            builder.branch(loop)
            builder.position_at_end(loop)
            i, a_i, b_i = builder.phi(_OFFSET), builder.phi(a.type), builder.phi(b.type)
            sums = [builder.phi(vector) for _ in places]
            columns = _two_vectors(context, builder, w_type.dtype, b_i, vector)
            added = []
            for row in range(count):
                one = builder.load(builder.gep(a_i, [_OFFSET(row * ROW_STRIDE)]), align=align)
                all_lanes = builder.shuffle_vector(builder.insert_element(undefined, one, _INDEX(0)), undefined, splat)
                added += [builder.call(fma, [all_lanes, columns[j], sums[2 * row + j]]) for j in range(2)]
            pairs = [
                (i, _OFFSET(0), builder.add(i, _OFFSET(1))),
                (a_i, a, builder.gep(a_i, [_OFFSET(1)])),
                (b_i, b, builder.gep(b_i, [step])),
                *zip(sums, begun, added, strict=True),
            ]
            for phi, before, after in pairs:
                phi.add_incoming(before, head)
                phi.add_incoming(after, loop)
            builder.cbranch(builder.icmp_signed("<", pairs[0][2], k), loop, tail)
            builder.position_at_end(tail)
            for place, total in zip(places, added, strict=True):
                builder.store(total, place, align=align)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return signature, codegen


@njit
def _widen_row(x, lda, packed, m, k, row):
    """A row of x, which are ``lda`` elements apart, as blocks read it: [ceil(k / BLOCK_K), m], each of ROW_STRIDE
    elements.
    """
    for chunk in range(-(-k // BLOCK_K)):
        start, write = chunk * BLOCK_K, (chunk * m + row) * ROW_STRIDE
        read, count = row * lda + start, min(BLOCK_K, k - start)
        given, held = x[read : read + count], packed[write : write + count]
        for i in range(count):
            held[i] = widened(given[i])


def _multiply(x_ptr, lda, weight, bias, out_ptr, of_x, of_out, m, n, k, held_k, first_k, threads):
    """Write x times a part of K of a weight, plus the bias, to ``out``, rounded to its dtype.

    Args:
        x_ptr: the address of m rows of k elements like ``of_x``, ``lda`` apart: numbers of the accumulator's dtype, or
            words of bf16.
        weight: [panels * held_k * columns of a panel].
        bias: [n] of the accumulator's dtype, or empty.
        out_ptr: the address of [m * n] like ``of_out``: of the accumulator's dtype, or words of bf16.
        held_k: K of the weight, of which ``k`` from ``first_k`` on are multiplied.
    """
    x, out = array_at(x_ptr, (m - 1) * lda + k, of_x), array_at(out_ptr, m * n, of_out)
    packed = np.empty(-(-k // BLOCK_K) * m * ROW_STRIDE, bias.dtype)
    if m * k < SERIAL_BELOW:
        for row in range(m):
            _widen_row(x, lda, packed, m, k, row)
    else:
        for part in prange(threads):
            for row in range(part * m // threads, (part + 1) * m // threads):
                _widen_row(x, lda, packed, m, k, row)
    width = PANEL_BYTES // packed.itemsize
    panels, blocks = -(-n // width), -(-m // most_rows())
    lanes, step = lanes_of(packed), 2 if weight.itemsize == 2 else 1
    column_parts, least = threads, threads * panels * blocks
    for parts in range(threads, 0, -1):  # threads share panels and blocks of rows such that none has many more
        work = -(-panels // parts) * -(-blocks // (threads // parts))
        if threads % parts == 0 and work < least:
            column_parts, least = parts, work
    row_parts = threads // column_parts
    for part in prange(threads):
        of_rows, of_columns = part // column_parts, part % column_parts
        last_block = (of_rows + 1) * blocks // row_parts
        first_panel, last_panel = of_columns * panels // column_parts, (of_columns + 1) * panels // column_parts
        sums = np.empty(min(GROUP, blocks) * most_rows() * width, packed.dtype)
        for group in range(of_rows * blocks // row_parts, last_block, GROUP):
            end = min(group + GROUP, last_block)
            top, bottom = group * m // blocks, end * m // blocks
            for panel in range(first_panel, last_panel):
                for start in range(0, k, BLOCK_K):
                    count = min(BLOCK_K, k - start)
                    of_panel = (panel * held_k + first_k + start) * width
                    for block in range(group, end):
                        row = block * m // blocks
                        rows = (block + 1) * m // blocks - row
                        of_x, of_sums = (start // BLOCK_K * m + row) * ROW_STRIDE, (row - top) * width
                        for lane in range(0, width // 2, lanes):
                            of_w = of_panel + lane * step
                            add_products(
                                packed, of_x, weight, of_w, sums, of_sums + lane, rows, count, width, width, start == 0
                            )
                first = panel * width
                columns = min(width, n - first)
                added = bias[first : first + columns]
                for row in range(top, bottom):
                    read, write = (row - top) * width, row * n + first
                    given, made = sums[read : read + columns], out[write : write + columns]
                    if bias.size > 0:
                        for column in range(columns):
                            made[column] = rounded(given[column] + added[column], out)
                    else:
                        for column in range(columns):
                            made[column] = rounded(given[column], out)


multiply = compiled(_multiply, parallel=True)


def _fill_panels(weight, stride_n, stride_k, n, k, panels, width):
    """Write a weight [n, k] of these strides, in elements, to panels of so many columns, with zeros behind its last."""
    half = width // 2
    count = panels.size // (k * width)
    for panel in prange(count):
        for start in range(0, k, _TURNED_K):
            stop = min(start + _TURNED_K, k)
            for column in range(width):
                of_n = panel * width + column
                place = column if weight.itemsize != 2 else column % half * 2 + column // half
                write = panel * k * width + place
                if of_n < n:
                    for i in range(start, stop):
                        panels[write + i * width] = weight[of_n * stride_n + i * stride_k]
                else:
                    for i in range(start, stop):
                        panels[write + i * width] = 0


fill_panels = compiled(_fill_panels, parallel=True)

"""The Triton kernels of the gated delta rule and of Mamba-2's state space. Names are those of
:class:`.reduction.DeltaRuleReduction`; tiles of values are transposed, [values, tokens], so that the state [values,
keys] is the left operand of products with it.
"""

import triton
import triton.language as tl

from ..common.dependent_launch import wait_for_kernel_before
from ..common.triton_rows import row_sums

_LARGEST_BELOW_WRAP = tl.constexpr(0x7FFF7FFF)
_COLUMNS = tl.constexpr(16)


@triton.jit
def _joined(high, low):
    """fp32 of its two planes."""
    return ((high.to(tl.int32) << 16) + low.to(tl.int32)).to(tl.float32, bitcast=True)


@triton.jit
def _parted(state):
    """The two planes of fp32."""
    bits = state.to(tl.int32, bitcast=True)
    high = (tl.minimum(bits, _LARGEST_BELOW_WRAP) + 0x8000) >> 16
    return high.to(tl.int16), (bits - (high << 16)).to(tl.int16)


@triton.jit
def _operand(high, low, DTYPE: tl.constexpr):
    """S~ of the planes of S."""
    return high.to(tl.bfloat16, bitcast=True) if DTYPE == tl.bfloat16 else _joined(high, low).to(DTYPE)  # noqa: SIM300


@triton.jit
def _rows(new_ptr, ring_ptr, start, begin, end, position, stride_new, stride_ring, offs, ROWS: tl.constexpr,
          TRANSPOSED: tl.constexpr):  # fmt: skip
    """Rows of positions, new ones or the ring's, and zeros from end on: [positions, offs], or TRANSPOSED."""
    new_ptrs = new_ptr + (start + position - begin).to(tl.int64) * stride_new
    ptrs = tl.where(position < begin, ring_ptr + position % ROWS * stride_ring, new_ptrs)
    if TRANSPOSED:
        rows = tl.load(ptrs[None, :] + offs[:, None], mask=(position < end)[None, :], other=0.0)
    else:
        rows = tl.load(ptrs[:, None] + offs[None, :], mask=(position < end)[:, None], other=0.0)
    return rows


@triton.jit
def _gates(g_ptr, ring_g_ptr, start, begin, end, first, CHUNK: tl.constexpr, ROWS: tl.constexpr,
           VALUE_HEADS: tl.constexpr):  # fmt: skip
    """G of a chunk's rows: of fp32, one after the other."""
    offs = tl.arange(0, CHUNK)
    total, running = tl.zeros((CHUNK,), tl.float32), 0.0
    for t in tl.static_range(CHUNK):
        position = first + t
        new_ptr = g_ptr + (start + position - begin).to(tl.int64) * VALUE_HEADS
        ptr = tl.where(position < begin, ring_g_ptr + position % ROWS * VALUE_HEADS, new_ptr)
        g = tl.load(ptr, mask=position < end, other=0.0)
        running += tl.where(g < -128.0, -128.0, g)
        total = tl.where(offs == t, running, total)
    return total


@triton.jit
def _matrices(q, k, total, beta, CHUNK: tl.constexpr, SOLVE: tl.constexpr):
    """X and M of a chunk, rounded. Without SOLVE there is no X, and M stands for it."""
    t, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    decays = tl.exp(tl.minimum(total[:, None] - total[None, :], 0.0))
    columns = tl.trans(k)
    m = tl.where(j <= t, tl.dot(q, columns, input_precision="ieee") * decays, 0.0)
    x = m
    if SOLVE:
        a = tl.where(j < t, beta[:, None] * (tl.dot(k, columns, input_precision="ieee") * decays), 0.0)
        # Rows below i take what row i of the inverse, final then, has for them: elements, and no order of a sum.
        inverse = tl.where(t == j, 1.0, 0.0)
        for i in tl.static_range(CHUNK - 1):
            column = tl.sum(tl.where(j == i, a, 0.0), 1)
            row = tl.sum(tl.where(t == i, inverse, 0.0), 0)
            inverse = tl.fma(-column[:, None], row[None, :], inverse)
        x = tl.where(j < t, inverse, 0.0)
    return x.to(k.dtype), m.to(k.dtype)


@triton.jit
def _outputs(operand, q, k, v, x, m, total, beta, scale, skip, SOLVE: tl.constexpr, HAS_SKIP: tl.constexpr):
    """Of a chunk the results and, rounded, what is added to the state behind it: [values, tokens]."""
    dtype: tl.constexpr = k.dtype
    decays, last = tl.exp(total)[None, :], tl.min(total, 0)
    values = v.to(tl.float32)
    if SOLVE:
        values -= tl.dot(operand, tl.trans(k), input_precision="ieee") * decays
    out = tl.dot(operand, tl.trans(q), input_precision="ieee") * decays
    u = beta[None, :] * values
    if SOLVE:
        u = tl.dot(u.to(dtype), tl.trans(x), acc=u, input_precision="ieee")
    out = tl.dot(u.to(dtype), tl.trans(m), acc=out, input_precision="ieee") * scale
    if HAS_SKIP:
        out = tl.fma(v.to(tl.float32), skip, out)
    return out, (u * tl.exp(last - total)[None, :]).to(dtype)


@triton.jit
def _next_state(state, added, k, total):
    """The state behind a chunk."""
    decay = tl.exp(tl.min(total, 0))
    return tl.fma(state, decay, tl.dot(added, k, input_precision="ieee"))


@triton.jit
def _request(borders_ptr, pages_ptr, starts_ptr, context_lens_ptr, request, head, column, stride_float,
             ROWS: tl.constexpr, CHUNK: tl.constexpr, VALUE_SIZE: tl.constexpr):  # fmt: skip
    """Of a request: its page, its first row, the positions of that and behind its last, where the state of a column
    stands, and up to where one may be kept.
    """
    start, stop = tl.load(starts_ptr + request).to(tl.int32), tl.load(starts_ptr + request + 1).to(tl.int32)
    begin, page = tl.load(context_lens_ptr + request).to(tl.int32), tl.load(pages_ptr + request).to(tl.int64)
    border_ptr = borders_ptr + page * stride_float + head * (VALUE_SIZE // _COLUMNS) + column // _COLUMNS
    border = tl.load(border_ptr, mask=(begin > 0) & (stop > start), other=0)
    # Whatever a page says, the ring has the rows.
    border = tl.minimum(tl.maximum(border, (begin - ROWS + CHUNK - 1) // CHUNK * CHUNK), begin // CHUNK * CHUNK)
    border = tl.maximum(border, 0)
    drafts: tl.constexpr = (ROWS - CHUNK) // 2
    count = stop - start
    sure = begin + tl.where(count > 1 + drafts, count, tl.minimum(count, 1))
    return page, start, begin, begin + count, border, sure


@triton.jit
def _workspace_slot(start, request, chunk, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Where a request's chunk has its matrices: no two have one slot."""
    return start // CHUNK + request * (ROWS // CHUNK + 2) + chunk


@triton.jit(do_not_specialize_on_alignment=["pages_ptr", "starts_ptr", "context_lens_ptr"])
def chunk_matrices_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    borders_ptr,
    ring_k_ptr,
    ring_g_ptr,
    ring_beta_ptr,
    pages_ptr,
    starts_ptr,
    context_lens_ptr,
    x_ptr,
    m_ptr,
    gates_ptr,
    stride_row,
    stride_float,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    SOLVE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """X, M, G and beta of a chunk and a value head, which depend on no state; without SOLVE no X.

    Args:
        q_ptr, k_ptr: [tokens, KEY_HEADS, KEY_SIZE], packed.
        g_ptr, beta_ptr: [tokens, VALUE_HEADS], packed.
        x_ptr, m_ptr: [slots, VALUE_HEADS, CHUNK, CHUNK], packed.
        gates_ptr: [slots, VALUE_HEADS, 2, CHUNK], packed: G and beta.
        stride_row, stride_float: between pages, in elements of k and in fp32.
    """
    wait_for_kernel_before(OVERLAPS)
    chunk, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    page, start, begin, end, border, _ = _request(
        borders_ptr, pages_ptr, starts_ptr, context_lens_ptr, request, head, 0, stride_float, ROWS, CHUNK, VALUE_SIZE
    )
    first = border + chunk * CHUNK
    if (end > begin) & (first < end):
        position = first + tl.arange(0, CHUNK)
        keys = head // (VALUE_HEADS // KEY_HEADS) * KEY_SIZE
        offs = keys + tl.arange(0, KEY_SIZE)
        stride: tl.constexpr = KEY_HEADS * KEY_SIZE
        ring_k_ptr += page * stride_row
        k = _rows(k_ptr, ring_k_ptr, start, begin, end, position, stride, stride, offs, ROWS, False)
        q_ptrs = q_ptr + (start + position - begin).to(tl.int64)[:, None] * stride + offs[None, :]
        q = tl.load(q_ptrs, mask=((position >= begin) & (position < end))[:, None], other=0.0)
        floats = page * stride_float
        total = _gates(g_ptr + head, ring_g_ptr + floats + head, start, begin, end, first, CHUNK, ROWS, VALUE_HEADS)
        beta_ptrs = tl.where(
            position < begin,
            ring_beta_ptr + floats + head + position % ROWS * VALUE_HEADS,
            beta_ptr + head + (start + position - begin).to(tl.int64) * VALUE_HEADS,
        )
        beta = tl.load(beta_ptrs, mask=position < end, other=0.0)
        x, m = _matrices(q, k, total, beta, CHUNK, SOLVE)
        slot = (_workspace_slot(start, request, chunk, ROWS, CHUNK) * VALUE_HEADS + head).to(tl.int64)
        rows = tl.arange(0, CHUNK)
        tile = slot * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
        if SOLVE:
            tl.store(x_ptr + tile, x)
        tl.store(m_ptr + tile, m)
        tl.store(gates_ptr + slot * 2 * CHUNK + rows, total)
        tl.store(gates_ptr + slot * 2 * CHUNK + CHUNK + rows, beta)


@triton.jit(do_not_specialize_on_alignment=["pages_ptr", "starts_ptr", "context_lens_ptr"])
def prefill_delta_rule_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    high_ptr,
    low_ptr,
    borders_ptr,
    ring_k_ptr,
    ring_v_ptr,
    pages_ptr,
    starts_ptr,
    context_lens_ptr,
    x_ptr,
    m_ptr,
    gates_ptr,
    skip_ptr,
    out_ptr,
    scale,
    stride_v,
    stride_state,
    stride_row,
    stride_float,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    SOLVE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Of a request and a value head, BLOCK values: chunk after chunk from the state's border to the last new token.

    Args:
        v_ptr: [tokens, VALUE_HEADS, VALUE_SIZE], tokens stride_v apart.
        high_ptr, low_ptr, borders_ptr, ring_k_ptr, ring_v_ptr: of the first page.
        x_ptr, m_ptr, gates_ptr: what :func:`chunk_matrices_kernel` has written; without SOLVE no X is read.
        skip_ptr: [VALUE_HEADS], with HAS_SKIP.
        out_ptr: [tokens, VALUE_HEADS, VALUE_SIZE], packed.
        stride_state, stride_row, stride_float: between pages, in int16, in elements of k and in fp32.
    """
    wait_for_kernel_before(OVERLAPS)
    column, head, request = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2)
    page, start, begin, end, border, sure = _request(
        borders_ptr, pages_ptr, starts_ptr, context_lens_ptr, request, head, column, stride_float, ROWS, CHUNK,
        VALUE_SIZE,
    )  # fmt: skip
    if end > begin:
        rows, cols = tl.arange(0, CHUNK), column + tl.arange(0, BLOCK)
        key_stride: tl.constexpr = KEY_HEADS * KEY_SIZE
        value_stride: tl.constexpr = VALUE_HEADS * VALUE_SIZE
        key_offs = head // (VALUE_HEADS // KEY_HEADS) * KEY_SIZE + tl.arange(0, KEY_SIZE)
        value_offs = head * VALUE_SIZE + cols
        ring_k_ptr += page * stride_row
        ring_v_ptr += page * stride_row
        planes = page * stride_state + head * VALUE_SIZE * KEY_SIZE
        planes += cols[:, None] * KEY_SIZE + tl.arange(0, KEY_SIZE)[None, :]
        has_state = cols[:, None] < tl.where(border > 0, VALUE_SIZE, 0)
        state = _joined(
            tl.load(high_ptr + planes, mask=has_state, other=0), tl.load(low_ptr + planes, mask=has_state, other=0)
        )
        slot = (_workspace_slot(start, request, 0, ROWS, CHUNK) * VALUE_HEADS + head).to(tl.int64)
        tile = slot * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
        gates = slot * 2 * CHUNK + rows
        position = border + rows
        k = _rows(k_ptr, ring_k_ptr, start, begin, end, position, key_stride, key_stride, key_offs, ROWS, False)
        q_ptrs = q_ptr + (start + position - begin).to(tl.int64)[:, None] * key_stride + key_offs[None, :]
        q = tl.load(q_ptrs, mask=((position >= begin) & (position < end))[:, None], other=0.0)
        v = _rows(v_ptr, ring_v_ptr, start, begin, end, position, stride_v, value_stride, value_offs, ROWS, True)
        m = tl.load(m_ptr + tile)
        x = tl.load(x_ptr + tile) if SOLVE else m
        skip = tl.load(skip_ptr + head).to(tl.float32) if HAS_SKIP else 0.0
        total, beta = tl.load(gates_ptr + gates), tl.load(gates_ptr + gates + CHUNK)
        for first in range(border, end, CHUNK):
            # What the next chunk needs is on its way while this one is computed.
            position = first + CHUNK + rows
            tile += VALUE_HEADS * CHUNK * CHUNK
            gates += VALUE_HEADS * 2 * CHUNK
            is_next = rows < tl.where(first + CHUNK < end, CHUNK, 0)
            next_k = _rows(
                k_ptr, ring_k_ptr, start, begin, end, position, key_stride, key_stride, key_offs, ROWS, False
            )
            q_ptrs = q_ptr + (start + position - begin).to(tl.int64)[:, None] * key_stride + key_offs[None, :]
            next_q = tl.load(q_ptrs, mask=((position >= begin) & (position < end))[:, None], other=0.0)
            next_v = _rows(
                v_ptr, ring_v_ptr, start, begin, end, position, stride_v, value_stride, value_offs, ROWS, True
            )
            if SOLVE:
                next_x = tl.load(x_ptr + tile, mask=is_next[:, None], other=0.0)
            next_m = tl.load(m_ptr + tile, mask=is_next[:, None], other=0.0)
            next_total = tl.load(gates_ptr + gates, mask=is_next, other=0.0)
            next_beta = tl.load(gates_ptr + gates + CHUNK, mask=is_next, other=0.0)

            high, low = _parted(state)
            operand = _operand(high, low, k.dtype)
            out, added = _outputs(operand, q, k, v, x, m, total, beta, scale, skip, SOLVE, HAS_SKIP)
            position = first + rows
            out_ptrs = out_ptr + (start + position - begin).to(tl.int64)[None, :] * value_stride + value_offs[:, None]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=((position >= begin) & (position < end))[None, :])
            state = _next_state(state, added, k, total)
            if (first + CHUNK <= sure) & (first + 2 * CHUNK > sure):
                high, low = _parted(state)
                tl.store(high_ptr + planes, high)
                tl.store(low_ptr + planes, low)
            k, q, v, m, total, beta = next_k, next_q, next_v, next_m, next_total, next_beta
            if SOLVE:
                x = next_x
        tags = tl.arange(0, BLOCK // _COLUMNS)
        tag_ptrs = borders_ptr + page * stride_float + head * (VALUE_SIZE // _COLUMNS) + column // _COLUMNS + tags
        tl.store(tag_ptrs, tl.maximum(border, sure // CHUNK * CHUNK) + tags * 0)


@triton.jit(do_not_specialize_on_alignment=["pages_ptr", "starts_ptr", "context_lens_ptr"])
def write_rows_kernel(
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    ring_k_ptr,
    ring_v_ptr,
    ring_g_ptr,
    ring_beta_ptr,
    pages_ptr,
    starts_ptr,
    context_lens_ptr,
    stride_v,
    stride_row,
    stride_float,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A value head of the last rows of a request, after every program has read the earlier ones."""
    wait_for_kernel_before(OVERLAPS)
    back, head, request = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, stop = tl.load(starts_ptr + request).to(tl.int64), tl.load(starts_ptr + request + 1).to(tl.int64)
    token = stop - 1 - back
    if token >= start:
        page = tl.load(pages_ptr + request).to(tl.int64)
        row = (tl.load(context_lens_ptr + request).to(tl.int64) + token - start) % ROWS
        group: tl.constexpr = VALUE_HEADS // KEY_HEADS
        if head % group == 0:
            keys = head // group * KEY_SIZE + tl.arange(0, KEY_SIZE)
            k = tl.load(k_ptr + token * (KEY_HEADS * KEY_SIZE) + keys)
            tl.store(ring_k_ptr + page * stride_row + row * (KEY_HEADS * KEY_SIZE) + keys, k)
        values = head * VALUE_SIZE + tl.arange(0, VALUE_SIZE)
        v = tl.load(v_ptr + token * stride_v + values)
        tl.store(ring_v_ptr + page * stride_row + row * (VALUE_HEADS * VALUE_SIZE) + values, v)
        of_head = page * stride_float + row * VALUE_HEADS + head
        tl.store(ring_g_ptr + of_head, tl.load(g_ptr + token * VALUE_HEADS + head))
        tl.store(ring_beta_ptr + of_head, tl.load(beta_ptr + token * VALUE_HEADS + head))


@triton.jit(do_not_specialize_on_alignment=["pages_ptr", "starts_ptr", "context_lens_ptr"])
def decode_delta_rule_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    g_ptr,
    beta_ptr,
    high_ptr,
    low_ptr,
    borders_ptr,
    ring_k_ptr,
    ring_v_ptr,
    ring_g_ptr,
    ring_beta_ptr,
    pages_ptr,
    starts_ptr,
    context_lens_ptr,
    skip_ptr,
    out_ptr,
    scale,
    stride_v,
    stride_state,
    stride_row,
    stride_float,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    SOLVE: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """BLOCK values of a value head of a request with up to ``1 + drafts`` new tokens, whose ring has room for the rows
    since the state's border and the new ones: so they are written by the same launch. The low plane of the state is
    read where a chunk ends.
    """
    wait_for_kernel_before(OVERLAPS)
    column, head, request = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2)
    page, start, begin, end, border, sure = _request(
        borders_ptr, pages_ptr, starts_ptr, context_lens_ptr, request, head, column, stride_float, ROWS, CHUNK,
        VALUE_SIZE,
    )  # fmt: skip
    if end > begin:
        dtype: tl.constexpr = k_ptr.dtype.element_ty
        rows, cols = tl.arange(0, CHUNK), column + tl.arange(0, BLOCK)
        key_stride: tl.constexpr = KEY_HEADS * KEY_SIZE
        value_stride: tl.constexpr = VALUE_HEADS * VALUE_SIZE
        group: tl.constexpr = VALUE_HEADS // KEY_HEADS
        key_offs = head // group * KEY_SIZE + tl.arange(0, KEY_SIZE)
        value_offs = head * VALUE_SIZE + cols
        ring_k_ptr += page * stride_row
        ring_v_ptr += page * stride_row
        ring_g_ptr += page * stride_float + head
        ring_beta_ptr += page * stride_float + head
        planes = page * stride_state + head * VALUE_SIZE * KEY_SIZE
        planes += cols[:, None] * KEY_SIZE + tl.arange(0, KEY_SIZE)[None, :]
        has_state = cols[:, None] < tl.where(border > 0, VALUE_SIZE, 0)
        high = tl.load(high_ptr + planes, mask=has_state, other=0)
        low = tl.zeros((BLOCK, KEY_SIZE), tl.int16)
        if dtype != tl.bfloat16:
            low = tl.load(low_ptr + planes, mask=has_state, other=0)
        skip = tl.load(skip_ptr + head).to(tl.float32) if HAS_SKIP else 0.0
        for first in range(border, end, CHUNK):
            position = first + rows
            is_new = (position >= begin) & (position < end)
            token = (start + position - begin).to(tl.int64)
            k = _rows(k_ptr, ring_k_ptr, start, begin, end, position, key_stride, key_stride, key_offs, ROWS, False)
            v = _rows(v_ptr, ring_v_ptr, start, begin, end, position, stride_v, value_stride, value_offs, ROWS, True)
            q = tl.load(q_ptr + token[:, None] * key_stride + key_offs[None, :], mask=is_new[:, None], other=0.0)
            total = _gates(g_ptr + head, ring_g_ptr, start, begin, end, first, CHUNK, ROWS, VALUE_HEADS)
            slot = position % ROWS
            new_beta_ptrs = beta_ptr + head + token * VALUE_HEADS
            beta_ptrs = tl.where(position < begin, ring_beta_ptr + slot * VALUE_HEADS, new_beta_ptrs)
            beta = tl.load(beta_ptrs, mask=position < end, other=0.0)
            x, m = _matrices(q, k, total, beta, CHUNK, SOLVE)
            operand = _operand(high, low, dtype)
            out, added = _outputs(operand, q, k, v, x, m, total, beta, scale, skip, SOLVE, HAS_SKIP)
            tl.store(
                out_ptr + token[None, :] * value_stride + value_offs[:, None],
                out.to(out_ptr.dtype.element_ty),
                mask=is_new[None, :],
            )
            tl.store(ring_v_ptr + slot[None, :] * value_stride + value_offs[:, None], v, mask=is_new[None, :])
            if column == 0:
                g = tl.load(g_ptr + head + token * VALUE_HEADS, mask=is_new, other=0.0)
                tl.store(ring_g_ptr + slot * VALUE_HEADS, g, mask=is_new)
                tl.store(ring_beta_ptr + slot * VALUE_HEADS, beta, mask=is_new)
                if head % group == 0:
                    tl.store(ring_k_ptr + slot[:, None] * key_stride + key_offs[None, :], k, mask=is_new[:, None])
            if first + CHUNK <= end:
                if dtype == tl.bfloat16:
                    is_first = cols[:, None] < tl.where((first == border) & (border > 0), VALUE_SIZE, 0)
                    low = tl.load(low_ptr + planes, mask=is_first, other=low)
                high, low = _parted(_next_state(_joined(high, low), added, k, total))
                if first + CHUNK <= sure:
                    tl.store(high_ptr + planes, high)
                    tl.store(low_ptr + planes, low)
        tags = tl.arange(0, BLOCK // _COLUMNS)
        tag_ptrs = borders_ptr + page * stride_float + head * (VALUE_SIZE // _COLUMNS) + column // _COLUMNS + tags
        tl.store(tag_ptrs, tl.maximum(border, sure // CHUNK * CHUNK) + tags * 0)


@triton.jit
def _softplus(x):
    small = tl.exp(-tl.abs(x))
    # log(1 + small), whose sum is rounded: log(sum) times what the rounding took from small.
    added = 1.0 + small
    above = tl.where(added == 1.0, small, tl.log(added) * tl.div_rn(small, tl.where(added == 1.0, 1.0, added - 1.0)))
    return above + tl.where(x > 0.0, x, x * 0.0)


@triton.jit
def gdn_inputs_kernel(
    mixed_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    stride_mixed,
    stride_a,
    stride_b,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A query or a key of a token, or its gates.

    Args:
        mixed_ptr: [tokens, ...] queries and keys first, rows stride_mixed apart.
        a_ptr, b_ptr: [tokens, VALUE_HEADS], rows stride_a and stride_b apart.
        q_ptr, k_ptr: [tokens, KEY_HEADS, KEY_SIZE], packed.
        g_ptr, beta_ptr: [tokens, VALUE_HEADS], packed.
    """
    wait_for_kernel_before(OVERLAPS)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part < 2 * KEY_HEADS:
        offs = tl.arange(0, KEY_SIZE)
        x = tl.load(mixed_ptr + token * stride_mixed + part * KEY_SIZE + offs).to(tl.float32)[None, :]
        norm = tl.sqrt_rn(row_sums(x * x, 32) + 1e-6)
        y = x * tl.div_rn(1.0, norm)[:, None]
        to_ptr = tl.where(part < KEY_HEADS, q_ptr, k_ptr) + token * (KEY_HEADS * KEY_SIZE)
        tl.store(to_ptr + part % KEY_HEADS * KEY_SIZE + offs[None, :], y.to(q_ptr.dtype.element_ty))
    else:
        heads = tl.arange(0, PADDED_HEADS)
        mask = heads < VALUE_HEADS
        gate = tl.load(a_ptr + token * stride_a + heads, mask=mask, other=0.0).to(tl.float32)
        gate += tl.load(dt_bias_ptr + heads, mask=mask, other=0.0).to(tl.float32)
        g = -tl.exp(tl.load(a_log_ptr + heads, mask=mask, other=0.0).to(tl.float32)) * _softplus(gate)
        b = tl.load(b_ptr + token * stride_b + heads, mask=mask, other=0.0).to(tl.float32)
        tl.store(g_ptr + token * VALUE_HEADS + heads, g, mask=mask)
        tl.store(beta_ptr + token * VALUE_HEADS + heads, tl.div_rn(1.0, 1.0 + tl.exp(-b)), mask=mask)


@triton.jit
def mamba2_gates_kernel(
    dt_ptr,
    a_ptr,
    dt_bias_ptr,
    g_ptr,
    steps_ptr,
    stride_dt,
    HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Decays and time steps of a token.

    Args:
        dt_ptr: [tokens, HEADS], rows stride_dt apart.
        g_ptr, steps_ptr: [tokens, HEADS], packed.
    """
    wait_for_kernel_before(OVERLAPS)
    token, heads = tl.program_id(0).to(tl.int64), tl.arange(0, PADDED_HEADS)
    mask = heads < HEADS
    x = tl.load(dt_ptr + token * stride_dt + heads, mask=mask, other=0.0).to(tl.float32)
    steps = _softplus(x + tl.load(dt_bias_ptr + heads, mask=mask, other=0.0).to(tl.float32))
    tl.store(g_ptr + token * HEADS + heads, tl.load(a_ptr + heads, mask=mask, other=0.0) * steps, mask=mask)
    tl.store(steps_ptr + token * HEADS + heads, steps, mask=mask)

"""The Triton kernels of the gated delta rule and of Mamba-2's state space. Names are those of
:class:`.reduction.DeltaRuleReduction`; tiles of values are transposed, [values, tokens], so that the state [values,
keys] is the left operand of products with it. CHANNELS is 0 where a value head has one gate, so that G of rows is
[rows], and the elements of a key where each has its own: G is [rows, CHANNELS] then.
"""

import triton
import triton.language as tl

from ..causal_conv.triton_kernels import add_taps, load_earlier, load_taps
from ..common.dependent_launch import LINE, ask_for_lines, wait_for_kernel_before
from ..common.triton_rows import row_sums
from ..silu.triton_kernels import silu_of_pytorch

_LARGEST_BELOW_WRAP = tl.constexpr(0x7FFF7FFF)
_COLUMNS = tl.constexpr(16)
_TILE = tl.constexpr(16)
_PER_LINE = tl.constexpr(64)
"""Elements of a plane in a line of the cache."""
_STEP = tl.constexpr(32)
"""Keys of a state that a step of decode writes at once."""


@triton.jit
def _planes(BLOCK: tl.constexpr, KEYS: tl.constexpr, STRIDE: tl.constexpr):
    """Where the planes of a block of a state lie, from its first value: [keys / 16, values / 16, 256]."""
    of_tile = tl.arange(0, _TILE * _TILE)[None, None, :]
    of_tile += tl.arange(0, KEYS // _TILE)[:, None, None] * (_TILE * _TILE)
    return of_tile + tl.arange(0, BLOCK // _TILE)[None, :, None] * (_TILE * STRIDE)


@triton.jit
def _all_or_none(condition, BLOCK: tl.constexpr):
    """A mask for what lies where :func:`_planes` says."""
    return tl.arange(0, BLOCK // _TILE)[None, :, None] < tl.where(condition, BLOCK, 0)


@triton.jit
def _matrix(planes, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """[values, keys] of what lies where :func:`_planes` says: threads have it where products want it."""
    planes = tl.reshape(planes, (KEYS // _TILE, BLOCK // _TILE, 8, 4, 2, 2, 2))
    return tl.reshape(tl.permute(planes, (1, 5, 2, 0, 4, 3, 6)), (BLOCK, KEYS))


@triton.jit
def _tiles(matrix, BLOCK: tl.constexpr, KEYS: tl.constexpr):
    """The inverse of :func:`_matrix`."""
    matrix = tl.reshape(matrix, (BLOCK // _TILE, 2, 8, KEYS // _TILE, 2, 4, 2))
    return tl.reshape(tl.permute(matrix, (3, 0, 2, 5, 4, 1, 6)), (KEYS // _TILE, BLOCK // _TILE, _TILE * _TILE))


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


@triton.constexpr_function
def _width(channels: int) -> int:
    """Gates of a value head."""
    return max(channels, 1)


@triton.jit
def _of_gates(ptrs, STRIDE: tl.constexpr, CHANNELS: tl.constexpr):
    """Pointers to the gates of rows, from those to their first: [rows], or with CHANNELS [rows, CHANNELS], STRIDE
    apart.
    """
    return ptrs if CHANNELS == 0 else ptrs[:, None] + tl.arange(0, CHANNELS)[None, :] * STRIDE


@triton.jit
def _of_rows(x, CHANNELS: tl.constexpr):
    """Something of rows [rows] beside their gates."""
    return x if CHANNELS == 0 else x[:, None]


@triton.jit
def _gates(g_ptr, ring_total_ptr, start, begin, end, first, CHUNK: tl.constexpr, ROWS: tl.constexpr,
           VALUE_HEADS: tl.constexpr, CHANNELS: tl.constexpr):  # fmt: skip
    """G of a chunk's rows: the ring's, and of fp32, one after the other. Pointers are at the head's first gate."""
    rows = _of_rows(tl.arange(0, CHUNK), CHANNELS)
    stride: tl.constexpr = VALUE_HEADS * _width(CHANNELS)
    if CHANNELS == 0:
        offs, totals, total = 0, tl.zeros((CHUNK,), tl.float32), 0.0
    else:
        offs = tl.arange(0, CHANNELS)
        totals, total = tl.zeros((CHUNK, CHANNELS), tl.float32), tl.zeros((CHANNELS,), tl.float32)
    for t in tl.static_range(CHUNK):
        position = first + t
        new_ptr = g_ptr + (start + position - begin).to(tl.int64) * stride
        ptr = tl.where(position < begin, ring_total_ptr + position % ROWS * stride, new_ptr)
        gate = tl.load(ptr + offs, mask=(position + offs * 0) < end, other=0.0)
        total = tl.where(position < begin, gate, _next_total(total, gate))
        totals = tl.where(rows == t, total if CHANNELS == 0 else total[None, :], totals)
    return totals


@triton.jit
def _next_total(total, g):
    """G of a row from that of the row above it."""
    return total + tl.where(g < -128.0, -128.0, g)


@triton.jit
def _decays(total, totals):
    """e^(G - G[j]) of a row for those up to it."""
    return tl.exp(tl.minimum(total - totals, 0.0))


@triton.jit
def _row_of_products(q, k, total, keys, totals):
    """The products of one row's query and key [CHANNELS] with the keys up to it, with decays of channels inside:
    [CHUNK] each, by fmas, ascending. They begin with 0, so that the sign of a zero, which a row that was chosen by a
    sum has lost, is none of theirs.
    """
    decayed = _decays(total[None, :], totals) * keys.to(tl.float32)
    both = tl.join(q.to(tl.float32), k.to(tl.float32))
    return tl.split(tl.dot(decayed, both, input_precision="ieee"))


@triton.jit
def _products(q, k, total, CHUNK: tl.constexpr, CHANNELS: tl.constexpr):
    """Of a chunk's rows those of queries with keys, and of keys with keys, decayed."""
    t = tl.arange(0, CHUNK)[:, None]
    if CHANNELS == 0:
        decays, columns = _decays(total[:, None], total[None, :]), tl.trans(k)
        of_queries = tl.dot(q, columns, input_precision="ieee") * decays
        of_keys = tl.dot(k, columns, input_precision="ieee") * decays
    else:
        of_queries, of_keys = tl.zeros((CHUNK, CHUNK), tl.float32), tl.zeros((CHUNK, CHUNK), tl.float32)
        for row in range(CHUNK):
            is_row = t == row
            of_q = tl.sum(tl.where(is_row, q.to(tl.float32), 0.0), 0)
            of_k = tl.sum(tl.where(is_row, k.to(tl.float32), 0.0), 0)
            of_total = tl.sum(tl.where(is_row, total, 0.0), 0)
            of_q, of_k = _row_of_products(of_q, of_k, of_total, k, total)
            of_queries = tl.where(is_row, of_q[None, :], of_queries)
            of_keys = tl.where(is_row, of_k[None, :], of_keys)
    return of_queries, of_keys


@triton.jit
def _matrices(q, k, total, beta, CHUNK: tl.constexpr, SOLVE: tl.constexpr, CHANNELS: tl.constexpr):
    """X and M of a chunk in fp32. Without SOLVE there is no X, and M stands for it."""
    t, j = tl.arange(0, CHUNK)[:, None], tl.arange(0, CHUNK)[None, :]
    of_queries, of_keys = _products(q, k, total, CHUNK, CHANNELS)
    m = tl.where(j <= t, of_queries, 0.0)
    x = m
    if SOLVE:
        a = tl.where(j < t, beta[:, None] * of_keys, 0.0)
        # Rows below i take what row i of the inverse, final then, has for them: elements, and no order of a sum.
        inverse = tl.where(t == j, 1.0, 0.0)
        for i in tl.static_range(CHUNK - 1):
            column = tl.sum(tl.where(j == i, a, 0.0), 1)
            row = tl.sum(tl.where(t == i, inverse, 0.0), 0)
            inverse = tl.fma(-column[:, None], row[None, :], inverse)
        x = tl.where(j < t, inverse, 0.0)
    return x, m


@triton.jit
def _row_of_x(a, ring_x_ptr, border, row, CHUNK: tl.constexpr, ROWS: tl.constexpr, STRIDE: tl.constexpr):
    """X of one row, of A's [CHUNK] and the rows above it, which are final: the same sums as in :func:`_matrices`."""
    j, x = tl.arange(0, CHUNK), 0.0 - a
    for i in tl.static_range(1, CHUNK - 1):
        above_ptrs = ring_x_ptr + _slot(border, i, CHUNK, ROWS) * STRIDE + j
        above = tl.load(above_ptrs, mask=j < tl.where(i < row, CHUNK, 0), other=0.0)
        x = tl.fma(-tl.gather(a, tl.full((CHUNK,), i, tl.int32), 0), above, x)
    return x


@triton.jit
def _decayed(x, total):
    """Rows of queries or keys that read or change a state whose channels decay."""
    return (x.to(tl.float32) * tl.exp(total)).to(x.dtype)


@triton.jit
def _given(operand, x, total, CHANNELS: tl.constexpr):
    """What the state has for rows of queries or keys, without the decay of a head: [values, rows]."""
    if CHANNELS > 0:
        x = _decayed(x, total)
    return tl.dot(operand, tl.trans(x), input_precision="ieee")


@triton.jit
def _corrected(given, v, x, total, beta, SOLVE: tl.constexpr, CHANNELS: tl.constexpr):
    """u of a chunk's values, from what the state has for their keys: [values, tokens] fp32."""
    values = v.to(tl.float32)
    if SOLVE:
        values -= given if CHANNELS > 0 else given * tl.exp(total)[None, :]
    u = beta[None, :] * values
    if SOLVE:
        u = tl.dot(u.to(v.dtype), tl.trans(x.to(v.dtype)), acc=u, input_precision="ieee")
    return u


@triton.jit
def _results(given, u, m, v, total, scale, skip, HAS_SKIP: tl.constexpr, CHANNELS: tl.constexpr):
    """The results of rows, from what the state has for their queries and from their values: [values, rows] fp32."""
    if CHANNELS == 0:
        given *= tl.exp(total)[None, :]
    out = tl.dot(u.to(v.dtype), tl.trans(m.to(v.dtype)), acc=given, input_precision="ieee") * scale
    if HAS_SKIP:
        out = tl.fma(v.to(tl.float32), skip, out)
    return out


@triton.jit
def _outputs(operand, q, k, v, x, m, total, beta, scale, skip, SOLVE: tl.constexpr, HAS_SKIP: tl.constexpr,
             CHANNELS: tl.constexpr):  # fmt: skip
    """Of a chunk the results and, rounded, what is added to the state behind it: [values, tokens]."""
    given = v
    if SOLVE:
        given = _given(operand, k, total, CHANNELS)
    u = _corrected(given, v, x, total, beta, SOLVE, CHANNELS)
    out = _results(_given(operand, q, total, CHANNELS), u, m, v, total, scale, skip, HAS_SKIP, CHANNELS)
    return out, _added(u, total, v.dtype, CHANNELS)


@triton.jit
def _added(u, total, DTYPE: tl.constexpr, CHANNELS: tl.constexpr):
    """What is added to the state behind a chunk, before it is multiplied with the keys."""
    if CHANNELS == 0:
        u *= tl.exp(tl.min(total, 0) - total)[None, :]
    return u.to(DTYPE)


@triton.jit
def _next_state(state, added, k, total, CHANNELS: tl.constexpr):
    """The state behind a chunk, whose last row has the least G."""
    least = tl.min(total, 0)
    decay = tl.exp(least)
    if CHANNELS > 0:
        k, decay = _decayed(k, least[None, :] - total), decay[None, :]
    return tl.fma(state, decay, tl.dot(added, k, input_precision="ieee"))


@triton.jit
def _slot(border, row, CHUNK: tl.constexpr, ROWS: tl.constexpr):
    """Where the ring has a row of the chunk that begins at a border."""
    return row if ROWS == CHUNK else (border + row) % ROWS


@triton.jit
def _lowest_border(begin, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """The lowest from which a ring has the rows before a position."""
    return tl.maximum((begin - ROWS + CHUNK - 1) // CHUNK * CHUNK, 0)


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
    border = tl.minimum(tl.maximum(border, _lowest_border(begin, ROWS, CHUNK)), begin // CHUNK * CHUNK)
    drafts: tl.constexpr = (ROWS - CHUNK) // 2
    count = stop - start
    sure = begin + tl.where(count > 1 + drafts, count, tl.minimum(count, 1))
    return page, start, begin, begin + count, border, sure


@triton.jit
def _workspace_slot(start, request, begin, position, ROWS: tl.constexpr, CHUNK: tl.constexpr):
    """Where the chunk of a position of a request has its matrices: no two have one slot."""
    chunk = (position - _lowest_border(begin, ROWS, CHUNK)) // CHUNK
    return start // CHUNK + request * (ROWS // CHUNK + 2) + chunk


@triton.jit(do_not_specialize_on_alignment=["pages_ptr", "starts_ptr", "context_lens_ptr"])
def chunk_matrices_kernel(
    q_ptr,
    k_ptr,
    g_ptr,
    beta_ptr,
    borders_ptr,
    ring_k_ptr,
    ring_total_ptr,
    ring_beta_ptr,
    ring_x_ptr,
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
    CHANNELS: tl.constexpr,
    HAS_X: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """X, M, G and beta of a chunk and a value head, which depend on no state; without SOLVE no X.

    Args:
        q_ptr, k_ptr: [tokens, KEY_HEADS, KEY_SIZE], packed.
        g_ptr, beta_ptr: [tokens, VALUE_HEADS], packed.
        ring_x_ptr: of the first page, with HAS_X. The last new rows are written there: none is read in this launch.
        x_ptr, m_ptr: [slots, VALUE_HEADS, CHUNK, CHUNK], packed.
        gates_ptr: [slots, VALUE_HEADS, 2, CHUNK], packed: G and beta; with CHANNELS as many more G.
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
        gate: tl.constexpr = _width(CHANNELS)
        total = _gates(
            g_ptr + head * gate, ring_total_ptr + floats + head * gate, start, begin, end, first, CHUNK, ROWS,
            VALUE_HEADS, CHANNELS,
        )  # fmt: skip
        beta_ptrs = tl.where(
            position < begin,
            ring_beta_ptr + floats + head + position % ROWS * VALUE_HEADS,
            beta_ptr + head + (start + position - begin).to(tl.int64) * VALUE_HEADS,
        )
        beta = tl.load(beta_ptrs, mask=position < end, other=0.0)
        x, m = _matrices(q, k, total, beta, CHUNK, SOLVE, CHANNELS)
        slot = (_workspace_slot(start, request, begin, first, ROWS, CHUNK) * VALUE_HEADS + head).to(tl.int64)
        rows = tl.arange(0, CHUNK)
        tile = slot * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
        if SOLVE:
            tl.store(x_ptr + tile, x.to(k.dtype))
        if HAS_X:
            is_kept = (position >= tl.maximum(begin, end - ROWS)) & (position < end)
            ring_x_ptrs = ring_x_ptr + floats + (position % ROWS * VALUE_HEADS + head)[:, None] * CHUNK + rows[None, :]
            tl.store(ring_x_ptrs, x, mask=is_kept[:, None])
        tl.store(m_ptr + tile, m.to(k.dtype))
        gates_ptr += slot * (gate + 1) * CHUNK
        tl.store(_of_gates(gates_ptr + rows, CHUNK, CHANNELS), total)
        tl.store(gates_ptr + gate * CHUNK + rows, beta)


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
    CHANNELS: tl.constexpr,
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
        planes = page * stride_state + (head * VALUE_SIZE + column) * KEY_SIZE + _planes(BLOCK, KEY_SIZE, KEY_SIZE)
        has_state = _all_or_none(border > 0, BLOCK)
        high = tl.load(high_ptr + planes, mask=has_state, other=0)
        low = tl.load(low_ptr + planes, mask=has_state, other=0)
        state = _matrix(_joined(high, low), BLOCK, KEY_SIZE)
        slot = (_workspace_slot(start, request, begin, border, ROWS, CHUNK) * VALUE_HEADS + head).to(tl.int64)
        tile = slot * CHUNK * CHUNK + rows[:, None] * CHUNK + rows[None, :]
        gate: tl.constexpr = _width(CHANNELS)
        gates = slot * (gate + 1) * CHUNK + rows
        position = border + rows
        k = _rows(k_ptr, ring_k_ptr, start, begin, end, position, key_stride, key_stride, key_offs, ROWS, False)
        q_ptrs = q_ptr + (start + position - begin).to(tl.int64)[:, None] * key_stride + key_offs[None, :]
        q = tl.load(q_ptrs, mask=((position >= begin) & (position < end))[:, None], other=0.0)
        v = _rows(v_ptr, ring_v_ptr, start, begin, end, position, stride_v, value_stride, value_offs, ROWS, True)
        m = tl.load(m_ptr + tile)
        x = tl.load(x_ptr + tile) if SOLVE else m
        skip = tl.load(skip_ptr + head).to(tl.float32) if HAS_SKIP else 0.0
        total = tl.load(_of_gates(gates_ptr + gates, CHUNK, CHANNELS))
        beta = tl.load(gates_ptr + gates + gate * CHUNK)
        for first in range(border, end, CHUNK):
            # What the next chunk needs is on its way while this one is computed.
            position = first + CHUNK + rows
            tile += VALUE_HEADS * CHUNK * CHUNK
            gates += VALUE_HEADS * (gate + 1) * CHUNK
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
            gates_ptrs = _of_gates(gates_ptr + gates, CHUNK, CHANNELS)
            next_total = tl.load(gates_ptrs, mask=_of_rows(is_next, CHANNELS), other=0.0)
            next_beta = tl.load(gates_ptr + gates + gate * CHUNK, mask=is_next, other=0.0)

            of_high, of_low = _parted(state)
            operand = _operand(of_high, of_low, k.dtype)
            out, added = _outputs(operand, q, k, v, x, m, total, beta, scale, skip, SOLVE, HAS_SKIP, CHANNELS)
            position = first + rows
            out_ptrs = out_ptr + (start + position - begin).to(tl.int64)[None, :] * value_stride + value_offs[:, None]
            tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=((position >= begin) & (position < end))[None, :])
            state = _next_state(state, added, k, total, CHANNELS)
            if (first + CHUNK <= sure) & (first + 2 * CHUNK > sure):
                high, low = _parted(_tiles(state, BLOCK, KEY_SIZE))
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
    beta_ptr,
    gates_ptr,
    ring_k_ptr,
    ring_v_ptr,
    ring_total_ptr,
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
    CHUNK: tl.constexpr,
    CHANNELS: tl.constexpr,
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
        begin = tl.load(context_lens_ptr + request).to(tl.int64)
        position = begin + token - start
        row = position % ROWS
        group: tl.constexpr = VALUE_HEADS // KEY_HEADS
        if head % group == 0:
            keys = head // group * KEY_SIZE + tl.arange(0, KEY_SIZE)
            k = tl.load(k_ptr + token * (KEY_HEADS * KEY_SIZE) + keys)
            tl.store(ring_k_ptr + page * stride_row + row * (KEY_HEADS * KEY_SIZE) + keys, k)
        values = head * VALUE_SIZE + tl.arange(0, VALUE_SIZE)
        v = tl.load(v_ptr + token * stride_v + values)
        tl.store(ring_v_ptr + page * stride_row + row * (VALUE_HEADS * VALUE_SIZE) + values, v)
        of_head = row * VALUE_HEADS + head
        ring_total_ptr += page * stride_float
        ring_beta_ptr += page * stride_float
        gate: tl.constexpr = _width(CHANNELS)
        channels = tl.arange(0, gate)
        slot = _workspace_slot(start, request, begin, position, ROWS, CHUNK) * VALUE_HEADS + head
        gates_ptr += slot * (gate + 1) * CHUNK + position % CHUNK
        tl.store(ring_total_ptr + of_head * gate + channels, tl.load(gates_ptr + channels * CHUNK))
        tl.store(ring_beta_ptr + of_head, tl.load(beta_ptr + token * VALUE_HEADS + head))


@triton.jit
def _totals(total_above, g_ptr, ring_totals, row, CHUNK: tl.constexpr, CHANNELS: tl.constexpr):
    """G of a new row, whose chunk has so many above it, and of all rows of the chunk: those above it the ring's, others
    the new one's. With CHANNELS of so many from where pointers are.
    """
    is_held = tl.arange(0, CHUNK) < row
    offs = 0 if CHANNELS == 0 else tl.arange(0, CHANNELS)
    new_total = tl.load(total_above + offs, mask=(row + offs * 0) > 0, other=0.0)
    new_total = _next_total(new_total, tl.load(g_ptr + offs))
    is_held = _of_rows(is_held, CHANNELS)
    total = tl.load(_of_gates(ring_totals, 1, CHANNELS), mask=is_held, other=0.0)
    return new_total, tl.where(is_held, total, new_total if CHANNELS == 0 else new_total[None, :])


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
    ring_total_ptr,
    ring_beta_ptr,
    ring_x_ptr,
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
    CHANNELS: tl.constexpr,
    HAS_SKIP: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """BLOCK values of a value head of a request with one new token, where no token is a draft: so the state's border
    is where the token's chunk begins, and of X the token's row alone is not in the ring. The state is read in full, and
    written, by the last token of a chunk.

    Args:
        q_ptr, k_ptr, v_ptr: at multiples of 16 bytes, as rows of v are.
    """
    column, head, request = tl.program_id(0) * BLOCK, tl.program_id(1), tl.program_id(2)
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    key_stride: tl.constexpr = KEY_HEADS * KEY_SIZE
    value_stride: tl.constexpr = VALUE_HEADS * VALUE_SIZE
    x_stride: tl.constexpr = VALUE_HEADS * CHUNK
    group: tl.constexpr = VALUE_HEADS // KEY_HEADS
    # A step's numbers and pages are written before its first kernel: nothing of a layer is waited for yet.
    token, stop = tl.load(starts_ptr + request).to(tl.int64), tl.load(starts_ptr + request + 1).to(tl.int64)
    page, position = tl.load(pages_ptr + request).to(tl.int64), tl.load(context_lens_ptr + request).to(tl.int32)
    row, rows = position % CHUNK, tl.arange(0, CHUNK)
    border = position - row
    slot, slots = position % ROWS, _slot(border, rows, CHUNK, ROWS)
    is_held = rows < row
    first_key = head // group * KEY_SIZE
    first_value = head * VALUE_SIZE + column
    high_ptr += page * stride_state + first_value * KEY_SIZE
    low_ptr += page * stride_state + first_value * KEY_SIZE
    ring_k_ptr += page * stride_row
    ring_v_ptr += page * stride_row
    gate: tl.constexpr = _width(CHANNELS)
    gate_stride: tl.constexpr = VALUE_HEADS * gate
    ring_total_ptr += page * stride_float + head * gate
    ring_beta_ptr += page * stride_float + head
    if SOLVE:
        ring_x_ptr += page * stride_float + head * CHUNK
    if OVERLAPS and stop > token:
        per_line: tl.constexpr = LINE * 8 // dtype.primitive_bitwidth
        lines: tl.constexpr = (KEY_SIZE + per_line - 1) // per_line
        ask_for_lines(high_ptr + tl.arange(0, BLOCK * KEY_SIZE // _PER_LINE) * _PER_LINE)
        of_row = first_key + tl.arange(0, lines)[None, :] * per_line
        ask_for_lines((ring_k_ptr + slots * key_stride)[:, None] + of_row)
        ask_for_lines(ring_v_ptr + slots * value_stride + first_value)
        if SOLVE:
            ask_for_lines(ring_x_ptr + slots * x_stride)
    wait_for_kernel_before(OVERLAPS)
    if stop > token:
        key_offs = first_key + tl.arange(0, KEY_SIZE)
        value_offs = first_value + tl.arange(0, BLOCK)
        q_ptr += token * key_stride
        k_ptr += token * key_stride
        v_ptr += token * stride_v
        planes = _planes(BLOCK, KEY_SIZE, KEY_SIZE)
        high = tl.load(high_ptr + planes)
        low = high if dtype == tl.bfloat16 else tl.load(low_ptr + planes)
        k_rows = tl.where(is_held, ring_k_ptr + slots * key_stride, k_ptr + (rows - row) * key_stride)
        v_rows = tl.where(is_held, ring_v_ptr + slots * value_stride, v_ptr + (rows - row) * stride_v)
        # Triton does not see that pointers of which one is chosen have their alignment in common.
        k_rows, v_rows = tl.multiple_of(k_rows, 16), tl.multiple_of(v_rows, 16)
        k = tl.load(k_rows[:, None] + key_offs[None, :], mask=(rows <= row)[:, None], other=0.0)
        v = tl.load(v_rows[None, :] + value_offs[:, None], mask=(rows <= row)[None, :], other=0.0)
        # The query and the key of the token: columns of one product.
        new_row = tl.multiple_of(tl.where(tl.arange(0, 2) == 0, q_ptr, k_ptr), 16)
        of_token = tl.load(new_row[:, None] + key_offs[None, :])
        new_v = tl.load(v_ptr + value_offs)
        if SOLVE:
            ring_x_ptrs = ring_x_ptr + slots[:, None] * x_stride + rows[None, :]
            held_x = tl.load(ring_x_ptrs, mask=is_held[:, None], other=0.0)
        skip = tl.load(skip_ptr + head).to(tl.float32) if HAS_SKIP else 0.0
        new_beta = tl.load(beta_ptr + token * VALUE_HEADS + head)
        beta = tl.load(ring_beta_ptr + slots * VALUE_HEADS, mask=is_held, other=0.0)
        beta = tl.where(rows == row, new_beta, beta)
        g_ptr += (token * VALUE_HEADS + head) * gate
        ring_totals = ring_total_ptr + slots * gate_stride
        total_above = ring_total_ptr + (position + ROWS - 1) % ROWS * gate_stride
        new_total, total = _totals(total_above, g_ptr, ring_totals, row, CHUNK, CHANNELS)

        operand = _matrix(_operand(high, low, dtype), BLOCK, KEY_SIZE)
        # Without a state there may be anything in the page.
        has_state = tl.full((BLOCK, 1), border, tl.int32) > 0
        above = new_total if CHANNELS == 0 else new_total[None, :]
        given = tl.where(has_state, _given(operand, of_token, above, CHANNELS), 0.0)
        if CHANNELS == 0:
            weights = tl.dot(k, tl.trans(of_token), input_precision="ieee") * _decays(new_total, total)[:, None]
        else:
            new_q, new_k = tl.split(tl.trans(of_token))
            of_query, of_key = _row_of_products(new_q, new_k, new_total, k, total)
            weights = tl.join(of_query, of_key)
        weights = tl.where((rows <= row)[:, None], weights, 0.0)
        x, of_keys = beta, given
        if SOLVE:
            of_keys = tl.where(has_state, _given(operand, k, total, CHANNELS), 0.0)
            _, a = tl.split(weights)
            a = tl.where(is_held, new_beta * a, 0.0)
            x = _row_of_x(a, ring_x_ptr, border, row, CHUNK, ROWS, x_stride)
            x = tl.where((rows == row)[:, None], x[None, :], held_x)
            tl.store(ring_x_ptrs, x, mask=(rows == tl.where(column == 0, row, CHUNK))[:, None])
        u = _corrected(of_keys, v, x, total, beta, SOLVE, CHANNELS)
        new_total_of_all = tl.full((1,), new_total, tl.float32) if CHANNELS == 0 else new_total
        out = _results(given, u, tl.trans(weights), new_v[:, None], new_total_of_all, scale, skip, HAS_SKIP, CHANNELS)
        out, _ = tl.split(out)
        tl.store(out_ptr + token * value_stride + value_offs, out.to(out_ptr.dtype.element_ty))
        tl.store(ring_v_ptr + slot * value_stride + value_offs, new_v)
        if column == 0:
            tl.store(ring_total_ptr + slot * gate_stride + (0 if CHANNELS == 0 else tl.arange(0, gate)), new_total)
            tl.store(ring_beta_ptr + slot * VALUE_HEADS, new_beta)
            if head % group == 0:
                tl.store(ring_k_ptr + slot * key_stride + key_offs, tl.load(k_ptr + key_offs))
        if row == CHUNK - 1:
            added = _added(u, total, dtype, CHANNELS)
            step: tl.constexpr = _STEP if KEY_SIZE > _STEP else KEY_SIZE
            for first in range(0, KEY_SIZE, step):
                offs = _planes(BLOCK, step, KEY_SIZE) + first * _TILE
                next_high = tl.load(high_ptr + offs, mask=_all_or_none(border > 0, BLOCK), other=0)
                next_low = tl.load(low_ptr + offs, mask=_all_or_none(border > 0, BLOCK), other=0)
                some_k = tl.load(k_rows[:, None] + (first_key + first + tl.arange(0, step))[None, :])
                some = total
                if CHANNELS > 0:
                    _above, some = _totals(total_above + first, g_ptr + first, ring_totals + first, row, CHUNK, step)
                state = _matrix(_joined(next_high, next_low), BLOCK, step)
                state = _next_state(state, added, some_k, some, CHANNELS)
                next_high, next_low = _parted(_tiles(state, BLOCK, step))
                tl.store(high_ptr + offs, next_high)
                tl.store(low_ptr + offs, next_low)
        if (row == CHUNK - 1) | (position == 0):
            tags = tl.arange(0, BLOCK // _COLUMNS)
            tag_ptrs = borders_ptr + page * stride_float + head * (VALUE_SIZE // _COLUMNS) + column // _COLUMNS + tags
            tl.store(tag_ptrs, (position + 1) // CHUNK * CHUNK + tags * 0)


@triton.jit(do_not_specialize_on_alignment=["pages_ptr", "starts_ptr", "context_lens_ptr"])
def verify_delta_rule_kernel(
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
    ring_total_ptr,
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
    CHANNELS: tl.constexpr,
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
        gate: tl.constexpr = _width(CHANNELS)
        ring_total_ptr += page * stride_float + head * gate
        ring_beta_ptr += page * stride_float + head
        planes = page * stride_state + (head * VALUE_SIZE + column) * KEY_SIZE + _planes(BLOCK, KEY_SIZE, KEY_SIZE)
        has_state = _all_or_none(border > 0, BLOCK)
        high = tl.load(high_ptr + planes, mask=has_state, other=0)
        low = high * 0
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
            total = _gates(
                g_ptr + head * gate, ring_total_ptr, start, begin, end, first, CHUNK, ROWS, VALUE_HEADS, CHANNELS
            )
            slot = position % ROWS
            new_beta_ptrs = beta_ptr + head + token * VALUE_HEADS
            beta_ptrs = tl.where(position < begin, ring_beta_ptr + slot * VALUE_HEADS, new_beta_ptrs)
            beta = tl.load(beta_ptrs, mask=position < end, other=0.0)
            x, m = _matrices(q, k, total, beta, CHUNK, SOLVE, CHANNELS)
            operand = _matrix(_operand(high, low, dtype), BLOCK, KEY_SIZE)
            out, added = _outputs(operand, q, k, v, x, m, total, beta, scale, skip, SOLVE, HAS_SKIP, CHANNELS)
            tl.store(
                out_ptr + token[None, :] * value_stride + value_offs[:, None],
                out.to(out_ptr.dtype.element_ty),
                mask=is_new[None, :],
            )
            tl.store(ring_v_ptr + slot[None, :] * value_stride + value_offs[:, None], v, mask=is_new[None, :])
            if column == 0:
                totals = _of_gates(ring_total_ptr + slot * VALUE_HEADS * gate, 1, CHANNELS)
                tl.store(totals, total, mask=_of_rows(is_new, CHANNELS))
                tl.store(ring_beta_ptr + slot * VALUE_HEADS, beta, mask=is_new)
                if head % group == 0:
                    tl.store(ring_k_ptr + slot[:, None] * key_stride + key_offs[None, :], k, mask=is_new[:, None])
            if first + CHUNK <= end:
                if dtype == tl.bfloat16:
                    is_first = _all_or_none((first == border) & (border > 0), BLOCK)
                    low = tl.load(low_ptr + planes, mask=is_first, other=low)
                state = _next_state(_matrix(_joined(high, low), BLOCK, KEY_SIZE), added, k, total, CHANNELS)
                high, low = _parted(_tiles(state, BLOCK, KEY_SIZE))
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
def _unit(x):
    """[1, keys] fp32, divided by its norm."""
    norm = tl.sqrt_rn(row_sums(x * x, 32) + 1e-6)
    return x * tl.div_rn(1.0, norm)[:, None]


@triton.jit
def _write_gates(
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, VALUE_HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr
):
    """g and beta of a token of a gated delta net; pointers are at its rows."""
    heads = tl.arange(0, PADDED_HEADS)
    mask = heads < VALUE_HEADS
    gate = tl.load(a_ptr + heads, mask=mask, other=0.0).to(tl.float32)
    gate += tl.load(dt_bias_ptr + heads, mask=mask, other=0.0).to(tl.float32)
    g = -tl.exp(tl.load(a_log_ptr + heads, mask=mask, other=0.0).to(tl.float32)) * _softplus(gate)
    b = tl.load(b_ptr + heads, mask=mask, other=0.0).to(tl.float32)
    tl.store(g_ptr + heads, g, mask=mask)
    tl.store(beta_ptr + heads, tl.div_rn(1.0, 1.0 + tl.exp(-b)), mask=mask)


@triton.jit
def _write_channels(
    a_ptr, b_ptr, a_log_ptr, dt_bias_ptr, g_ptr, beta_ptr, least, head, CHANNELS: tl.constexpr, HAS_LEAST: tl.constexpr
):
    """g of each element of a head's keys and beta, of a token; pointers are at its rows."""
    channels = head * CHANNELS + tl.arange(0, CHANNELS)
    gate = tl.load(a_ptr + channels).to(tl.float32) + tl.load(dt_bias_ptr + channels).to(tl.float32)
    speed = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    g = least * tl.div_rn(1.0, 1.0 + tl.exp(-(speed * gate))) if HAS_LEAST else -speed * _softplus(gate)
    tl.store(g_ptr + channels, g)
    tl.store(beta_ptr + head, tl.div_rn(1.0, 1.0 + tl.exp(-tl.load(b_ptr + head).to(tl.float32))))


@triton.jit
def _write_steps(dt_ptr, a_ptr, dt_bias_ptr, g_ptr, steps_ptr, VALUE_HEADS: tl.constexpr, PADDED_HEADS: tl.constexpr):
    """Decays and time steps of a token of a state space; pointers are at its rows."""
    heads = tl.arange(0, PADDED_HEADS)
    mask = heads < VALUE_HEADS
    x = tl.load(dt_ptr + heads, mask=mask, other=0.0).to(tl.float32)
    steps = _softplus(x + tl.load(dt_bias_ptr + heads, mask=mask, other=0.0).to(tl.float32))
    tl.store(g_ptr + heads, tl.load(a_ptr + heads, mask=mask, other=0.0) * steps, mask=mask)
    tl.store(steps_ptr + heads, steps, mask=mask)


@triton.jit(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["pages_ptr", "starts_ptr", "context_lens_ptr"]
)
def convolved_inputs_kernel(
    mixed_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    pages_ptr,
    starts_ptr,
    context_lens_ptr,
    a_ptr,
    b_ptr,
    a_log_ptr,
    dt_bias_ptr,
    out_ptr,
    g_ptr,
    beta_ptr,
    num_tokens,
    stride_mixed,
    stride_page,
    stride_row,
    stride_channel,
    stride_a,
    stride_b,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    VALUE_SIZE: tl.constexpr,
    SOLVE: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """KEY_SIZE channels of a request's new tokens, convolved and activated, or their gates; all of them, one after the
    other, so that the state is written behind the last read of it.

    Args:
        mixed_ptr: [tokens, CHANNELS], rows stride_mixed apart: with SOLVE queries, keys and values, else x, B and C.
        weight_ptr: [CHANNELS, WIDTH], packed.
        states_ptr: [pages, ROWS, CHANNELS], rings.
        a_ptr, b_ptr: [tokens, VALUE_HEADS], rows stride_a and stride_b apart; without SOLVE the first are time steps.
        a_log_ptr, dt_bias_ptr: [VALUE_HEADS]; without SOLVE the first are A.
        out_ptr: the three parts of the channels, each [num_tokens, its channels], packed.
        g_ptr, beta_ptr: [tokens, VALUE_HEADS], packed.
    """
    wait_for_kernel_before(OVERLAPS)
    request, part = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(starts_ptr + request).to(tl.int64), tl.load(starts_ptr + request + 1).to(tl.int64)
    keys: tl.constexpr = KEY_HEADS * KEY_SIZE
    values: tl.constexpr = VALUE_HEADS * VALUE_SIZE
    channels: tl.constexpr = 2 * keys + values
    of_values: tl.constexpr = (values + KEY_SIZE - 1) // KEY_SIZE
    if part == 2 * KEY_HEADS + of_values:
        for token in range(start, end):
            to = token * VALUE_HEADS
            if SOLVE:
                _write_gates(a_ptr + token * stride_a, b_ptr + token * stride_b, a_log_ptr, dt_bias_ptr, g_ptr + to,
                             beta_ptr + to, VALUE_HEADS, PADDED_HEADS)  # fmt: skip
            else:
                _write_steps(a_ptr + token * stride_a, a_log_ptr, dt_bias_ptr, g_ptr + to, beta_ptr + to, VALUE_HEADS,
                             PADDED_HEADS)  # fmt: skip
    elif end > start:
        # A block lies in one of the parts; values come last with SOLVE, and first without.
        is_key = part < 2 * KEY_HEADS if SOLVE else part >= of_values
        before_keys: tl.constexpr = 0 if SOLVE else values
        is_normed = part < (2 * KEY_HEADS if SOLVE else 0)
        key_block = part if SOLVE else part - of_values
        value_block = part - 2 * KEY_HEADS if SOLVE else part
        values_begin: tl.constexpr = 2 * keys if SOLVE else 0
        # Triton does not see what numbers of which one is chosen have in common.
        begin = tl.multiple_of(tl.where(is_key, before_keys + key_block // KEY_HEADS * keys, values_begin), 16)
        width = tl.multiple_of(tl.where(is_key, keys, values), 16)
        within = tl.where(is_key, key_block % KEY_HEADS, value_block) * KEY_SIZE + tl.arange(0, KEY_SIZE)
        mask, offs = within < width, begin + within
        state_ptr = states_ptr + tl.load(pages_ptr + request).to(tl.int64) * stride_page
        position = tl.load(context_lens_ptr + request).to(tl.int32)
        dtype = mixed_ptr.dtype.element_ty
        w0, w1, w2, w3 = load_taps(weight_ptr, offs, mask, WIDTH)
        u1, u2, u3 = load_earlier(mixed_ptr, state_ptr, start, start, position, stride_mixed, stride_row,
                                  stride_channel, ROWS, offs, begin + width, channels, False, WIDTH)  # fmt: skip
        bias = tl.zeros((KEY_SIZE,), tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.debug_barrier()  # whoever stores an input need not be the thread that has loaded what was in its place
        for token in range(start, end):
            stored = tl.load(mixed_ptr + token * stride_mixed + offs, mask=mask, other=0.0)
            u = stored.to(tl.float32)
            total = add_taps(bias, u, u1, u2, u3, w0, w1, w2, w3, WIDTH).to(dtype).to(tl.float32)
            y = silu_of_pytorch(total).to(dtype)
            out_ptrs = out_ptr + begin.to(tl.int64) * num_tokens + token * width + within
            if is_normed:
                y = tl.reshape(_unit(y.to(tl.float32)[None, :]), (KEY_SIZE,)).to(dtype)
            tl.store(out_ptrs, y, mask=mask)
            slot = (position + (token - start).to(tl.int32)) % ROWS
            tl.store(state_ptr + slot * stride_row + offs * stride_channel, stored, mask=mask)
            u1, u2, u3 = u, u1, u2


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
    least,
    stride_mixed,
    stride_a,
    stride_b,
    KEY_HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    KEY_SIZE: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_LEAST: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """A query or a key of a token, or its gates; with CHANNELS those of a head.

    Args:
        mixed_ptr: [tokens, ...] queries and keys first, rows stride_mixed apart.
        a_ptr, b_ptr: [tokens, VALUE_HEADS], of a with CHANNELS as many more, rows stride_a and stride_b apart.
        a_log_ptr, dt_bias_ptr: [VALUE_HEADS], the second with CHANNELS as many more.
        q_ptr, k_ptr: [tokens, KEY_HEADS, KEY_SIZE], packed.
        g_ptr, beta_ptr: [tokens, VALUE_HEADS], packed; of g with CHANNELS as many more.
        least: with HAS_LEAST what g is above.
    """
    wait_for_kernel_before(OVERLAPS)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if part < 2 * KEY_HEADS:
        offs = tl.arange(0, KEY_SIZE)
        y = _unit(tl.load(mixed_ptr + token * stride_mixed + part * KEY_SIZE + offs).to(tl.float32)[None, :])
        to_ptr = tl.where(part < KEY_HEADS, q_ptr, k_ptr) + token * (KEY_HEADS * KEY_SIZE)
        tl.store(to_ptr + part % KEY_HEADS * KEY_SIZE + offs[None, :], y.to(q_ptr.dtype.element_ty))
    elif CHANNELS > 0:
        to = token * VALUE_HEADS
        _write_channels(a_ptr + token * stride_a, b_ptr + token * stride_b, a_log_ptr, dt_bias_ptr,
                        g_ptr + to * CHANNELS, beta_ptr + to, least, part - 2 * KEY_HEADS, CHANNELS,
                        HAS_LEAST)  # fmt: skip
    else:
        to = token * VALUE_HEADS
        _write_gates(a_ptr + token * stride_a, b_ptr + token * stride_b, a_log_ptr, dt_bias_ptr, g_ptr + to,
                     beta_ptr + to, VALUE_HEADS, PADDED_HEADS)  # fmt: skip


@triton.jit
def mamba2_gates_kernel(
    dt_ptr,
    a_ptr,
    dt_bias_ptr,
    g_ptr,
    steps_ptr,
    stride_dt,
    VALUE_HEADS: tl.constexpr,
    PADDED_HEADS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """Decays and time steps of a token.

    Args:
        dt_ptr: [tokens, VALUE_HEADS], rows stride_dt apart.
        g_ptr, steps_ptr: [tokens, VALUE_HEADS], packed.
    """
    wait_for_kernel_before(OVERLAPS)
    token = tl.program_id(0).to(tl.int64)
    to = token * VALUE_HEADS
    _write_steps(dt_ptr + token * stride_dt, a_ptr, dt_bias_ptr, g_ptr + to, steps_ptr + to, VALUE_HEADS, PADDED_HEADS)

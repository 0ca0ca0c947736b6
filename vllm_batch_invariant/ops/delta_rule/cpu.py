"""The gated delta rule and Mamba-2's state space on a CPU: chunks in numba, rings gathered and scattered by PyTorch."""

import numpy as np
import torch
from numba import njit, prange, types

from ..common.numba_math import LANES, exp32, float_of_bits, fma, row_sum
from ..common.numba_rows import RowKernel
from ..pointwise.cpu import softplus32
from .params import DeltaStates
from .reduction import DeltaRuleReduction

_FP32, _BF16, _FP16 = 0, 1, 2
_KINDS = {torch.float32: _FP32, torch.bfloat16: _BF16, torch.float16: _FP16}
_LOWEST_GATE = np.float32(-128)
_INFINITY, _NAN = np.int32(0x7F800000), np.int32(0x7FC0)
"""Bits, of the second those of a plane."""
_ONE = np.float32(1)


def _to_bf16(x):
    """fp32 of fp32, to nearest even; NaN stays NaN."""
    bits = x.view(np.int32)
    for i in range(bits.size):
        odd = types.int32(bits[i] >> types.int32(16)) & types.int32(1)
        rounded = types.int32(types.int32(bits[i] + types.int32(0x7FFF)) + odd) & types.int32(-0x10000)
        bits[i] = bits[i] if x[i] != x[i] else rounded


def _to_fp16(x):
    """fp32 of fp32, to nearest even, subnormal numbers and infinities too; NaN stays NaN."""
    bits = x.view(np.int32)
    for i in range(bits.size):
        value = x[i]
        rounded = float_of_bits(
            types.int32((bits[i] + np.int32(0xFFF) + ((bits[i] >> np.int32(13)) & np.int32(1))) & np.int32(-0x2000))
        )
        subnormal = (value + np.float32(0.75)) - np.float32(0.75)  # of 24 bits behind the point
        rounded = subnormal if abs(value) < np.float32(2.0**-14) else rounded
        rounded = np.float32(np.inf) * value if abs(rounded) > np.float32(65504) else rounded
        x[i] = value if value != value else rounded


_to_bf16, _to_fp16 = njit(_to_bf16), njit(_to_fp16)


@njit
def _round(x, kind):
    """A contiguous row to a dtype, in place."""
    if kind == _BF16:
        _to_bf16(x)
    elif kind == _FP16:
        _to_fp16(x)


@njit
def _high_bits(bits):
    """Those of the plane that is read alone."""
    rounded = types.int32(types.int32(bits + types.int32(0x8000)) >> types.int32(16))
    return _NAN if (bits & types.int32(0x7FFFFFFF)) > _INFINITY else rounded


@njit
def _operand(state, kind, out):
    """S~ of S."""
    for key in range(state.shape[0]):
        row, rounded = state[key], out[key]
        bits, to = row.view(np.int32), rounded.view(np.int32)
        if kind == _BF16:
            for i in range(row.size):
                to[i] = types.int32(_high_bits(bits[i]) << types.int32(16))
        else:
            rounded[:] = row
            _round(rounded, kind)


@njit
def _place(value, key):
    """The index of an element in a plane."""
    return value // 16, value // 8 % 2, value % 8, key // 16, key // 8 % 2, key // 2 % 4, key % 2


@njit
def _load_state(high, low, state):
    """[key_size, value_size] fp32 of planes, as ``DeltaPages`` has them."""
    for key in range(state.shape[0]):
        bits = state[key].view(np.int32)
        for value in range(bits.size):
            at = _place(value, key)
            bits[value] = (np.int32(high[at]) << np.int32(16)) + np.int32(low[at])


@njit
def _store_state(state, high, low):
    for key in range(state.shape[0]):
        bits = state[key].view(np.int32)
        for value in range(bits.size):
            at, top = _place(value, key), _high_bits(bits[value])
            high[at] = np.int16(top)
            low[at] = np.int16(bits[value] - (top << np.int32(16)))


@njit
def _add_product(weights, rows, count, total):
    """total += weights[i] * rows[i] for i below count, ascending."""
    for i in range(count):
        weight, row = weights[i], rows[i]
        for column in range(total.size):
            total[column] = fma(weight, row[column], total[column])


@njit
def _products(row, columns, out):
    """out = row . columns, ascending."""
    out[:] = 0
    _add_product(row, columns, row.size, out)


@njit
def _inverse(a, count, inverse):
    """(1 + a)^-1 - 1 of a strictly lower triangle: a row of the rows above it, ascending."""
    for t in range(count):
        row = inverse[t]
        for j in range(t):
            row[j] = -a[t, j]
        for i in range(1, t):
            for j in range(i):
                row[j] = fma(-a[t, i], inverse[i, j], row[j])


@njit
def _exp(x):
    """:func:`exp32`, compiled once."""
    return exp32(x)


@njit
def _weights(row, columns, total, t, decayed, out):
    """Of a row's query or key the products with the keys up to it, and their decays: [keys, rows] of these, and G
    [rows, 1 or keys]; decayed is memory of that size.
    """
    if total.shape[1] == 1:
        _products(row, columns, out)
        for j in range(t + 1):
            out[j] = out[j] * _exp(total[t, 0] - total[j, 0])
    else:
        out[:] = 0
        for key in range(row.size):
            weight, of_key, to = row[key], columns[key], decayed[key]
            for j in range(t + 1):
                to[j] = _exp(total[t, key] - total[j, key]) * of_key[j]
            for j in range(t + 1):
                out[j] = fma(weight, to[j], out[j])


@njit
def _given(row, operand, total, kind, scaled, out):
    """What the state gives for a query or a key, decayed: G [1 or keys]; scaled is memory of a row."""
    if total.size == 1:
        _products(row, operand, out)
        decay = _exp(total[0])
        for i in range(out.size):
            out[i] = out[i] * decay
    else:
        for key in range(row.size):
            scaled[key] = row[key] * _exp(total[key])
        _round(scaled, kind)
        _products(scaled, operand, out)


@njit
def _correct(k, operand, columns, beta, total, kind, u, rounded):
    """Make u of values: take from each what the state and the rows above give for its key."""
    count, value_size = u.shape
    products, decayed, scaled = np.empty(count, np.float32), np.empty_like(columns), np.empty(k.shape[1], np.float32)
    a, inverse = np.zeros((count, count), np.float32), np.zeros((count, count), np.float32)
    for t in range(count):
        _weights(k[t], columns, total, t, decayed, products)
        for j in range(t):
            a[t, j] = beta[t] * products[j]
        given, row = rounded[t], u[t]
        _given(k[t], operand, total[t], kind, scaled, given)
        for i in range(value_size):
            row[i] = beta[t] * (row[i] - given[i])
        rounded[t] = row
        _round(rounded[t], kind)
    _inverse(a, count, inverse)
    for t in range(count):
        _round(inverse[t], kind)
        _add_product(inverse[t], rounded, t, u[t])


@njit
def _chunk(q, k, v, total, beta, first, state, kind, solve, scale, skip, out, ends):
    """Of rows [count] of a chunk from its begin those from ``first`` on, which q begins with and out gets. total is G
    [count, 1 or keys]. With ends the state becomes that behind the chunk. skip has one element, or none.
    """
    count, value_size = v.shape
    operand, columns = np.empty_like(state), np.ascontiguousarray(k.T)
    _operand(state, kind, operand)
    products, decayed, scaled = np.empty(count, np.float32), np.empty_like(columns), np.empty(k.shape[1], np.float32)
    u, rounded = np.empty((count, value_size), np.float32), np.empty((count, value_size), np.float32)
    for t in range(count):
        row = u[t]
        for i in range(value_size):
            row[i] = v[t, i] if solve else beta[t] * v[t, i]
    if solve:
        _correct(k, operand, columns, beta, total, kind, u, rounded)
    for t in range(count):
        rounded[t] = u[t]
        _round(rounded[t], kind)
    for t in range(first, count):
        weights, row = products[: t + 1], out[t - first]
        _weights(q[t - first], columns, total, t, decayed, products)
        _round(weights, kind)
        _given(q[t - first], operand, total[t], kind, scaled, row)
        _add_product(weights, rounded, t + 1, row)
        for i in range(value_size):
            row[i] = row[i] * scale
        if skip.size > 0:
            for i in range(value_size):
                row[i] = fma(skip[0], v[t, i], row[i])
    if ends:
        _add_chunk(columns, total, u, rounded, kind, state)


@njit
def _add_chunk(columns, total, u, rounded, kind, state):
    """Make the state that behind a chunk. What decays a row of it is with the values where a head has one gate, else
    with the keys.
    """
    count, value_size = u.shape
    of_channels = total.shape[1] > 1
    last, added = total[count - 1], np.empty(value_size, np.float32)
    for j in range(count):
        decay = _ONE if of_channels else _exp(last[0] - total[j, 0])
        for i in range(value_size):
            rounded[j, i] = u[j, i] * decay
        _round(rounded[j], kind)
    for key in range(state.shape[0]):
        weights, gate = columns[key], key if of_channels else 0
        if of_channels:
            for j in range(count):
                weights[j] = weights[j] * _exp(last[key] - total[j, key])
            _round(weights, kind)
        added[:] = 0
        _add_product(weights, rounded, count, added)
        row, decay = state[key], _exp(last[gate])
        for i in range(value_size):
            row[i] = fma(decay, row[i], added[i])


@njit
def _add_gates(above, g, old, chunk):
    """Make G of the g of new rows [rows, 1 or keys], of which so many of their chunk are before, the last with these
    totals.
    """
    for t in range(len(g)):
        for i in range(above.size):
            gate = _LOWEST_GATE if g[t, i] < _LOWEST_GATE else g[t, i]
            above[i] = gate if (old + t) % chunk == 0 else above[i] + gate
            g[t, i] = above[i]


@njit
def _copy(rows, first, count, out, to):
    """count rows of [rows, ...] to another place."""
    for row in range(count):
        for column in range(rows.shape[1]):
            out[to + row, column] = rows[first + row, column]


@njit
def _walk(new, earlier, old, border, sure, high, low, chunk, kind, solve, scale, skip, out):
    """A value head of a request, chunk after chunk.

    Args:
        new: [tokens, ...] of q, k, v, g, which becomes G, and beta.
        earlier: [rows, ...] of k, v, G and beta from the border on, of which so many as are ``old`` are there.
    """
    q, k, v, g, beta = new
    state = np.zeros((k.shape[1], v.shape[1]), np.float32)
    if border > 0:
        _load_state(high, low, state)
    rows = old + len(q)
    above = np.zeros(g.shape[1], np.float32)
    if old > 0:
        above[:] = earlier[2][old - 1]
    _add_gates(above, g, old, chunk)
    for first in range(0, rows, chunk):
        count = min(chunk, rows - first)
        known = min(max(old - first, 0), count)
        begin, end = first + known - old, border + first + chunk
        of_k, of_v = np.empty((count, k.shape[1]), np.float32), np.empty((count, v.shape[1]), np.float32)
        total, of_beta = np.empty((count, g.shape[1]), np.float32), np.empty(count, np.float32)
        for held, fresh, to in ((earlier[0], k, of_k), (earlier[1], v, of_v), (earlier[2], g, total)):
            _copy(held, first, known, to, 0)
            _copy(fresh, begin, count - known, to, known)
        of_beta[:known], of_beta[known:] = earlier[3][first : first + known], beta[begin : begin + count - known]
        ends = first + chunk <= rows
        rest = out[max(begin, 0) :]
        _chunk(q[begin:], of_k, of_v, total, of_beta, known, state, kind, solve, scale, skip, rest, ends)
        if ends and end <= sure < end + chunk:
            _store_state(state, high, low)


def _delta_rule_kernel(
    q, k, v, g, beta, earlier_k, earlier_v, earlier_total, earlier_beta, starts, context, borders, sure, pages, high,
    low, chunk, kind, solve, scale, skip, out,
):  # fmt: skip
    """A value head of a request a turn. q and k [tokens, key_heads, key_size], v [tokens, value_heads, value_size], g
    [tokens, value_heads, 1 or key_size], which becomes G, and beta [tokens, value_heads], fp32; the same of rows before
    a request's first new one, from its border on, [requests, rows, ...]; and up to where a state may be kept. skip
    [value_heads], or empty.
    """
    for item in prange(len(pages) * v.shape[1]):
        request, head = item // v.shape[1], item % v.shape[1]
        key_head, page = head // (v.shape[1] // k.shape[1]), pages[request]
        start, end = starts[request], starts[request + 1]
        if end > start:
            _walk(
                (q[start:end, key_head], k[start:end, key_head], v[start:end, head], g[start:end, head],
                 beta[start:end, head]),
                (earlier_k[request, :, key_head], earlier_v[request, :, head], earlier_total[request, :, head],
                 earlier_beta[request, :, head]),
                context[request] - borders[request], borders[request], sure[request],
                high[page, head], low[page, head], chunk, kind, solve, scale, skip[head : head + 1],
                out[start:end, head],
            )  # fmt: skip


_delta_rule = RowKernel(_delta_rule_kernel)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: DeltaStates,
    reduction: DeltaRuleReduction,
    skip: torch.Tensor | None,
) -> torch.Tensor:
    """See the operation's package."""
    starts, context, numbers = (one.long() for one in (states.starts, states.context_lens, states.pages))
    lengths, ring, chunk = starts.diff(), states.rows, reduction.chunk
    out = torch.empty(v.shape, dtype=reduction.accumulate)
    tokens = int(lengths.sum())
    if tokens == 0:
        return out.to(v.dtype)
    pages = reduction.pages(states.states, k.shape[1], v.shape[1], ring)
    # Of a request without earlier tokens the page may hold anything; of rows that are not there nothing is used.
    lowest, highest = (context - ring + chunk - 1) // chunk * chunk, context // chunk * chunk
    borders = torch.minimum(torch.maximum(pages.borders[numbers, 0, 0].long(), lowest), highest)
    borders = torch.where((context > 0) & (lengths > 0), borders.clamp(min=0), 0)
    slots = (borders[:, None] + torch.arange(ring)) % ring
    of_rows = pages.k, pages.v, pages.total, pages.beta
    earlier = [held[numbers[:, None], slots].to(reduction.accumulate) for held in of_rows]
    total, beta = g.clone().view(*beta.shape, -1), beta.contiguous()
    sure = context + torch.where(lengths > 1 + reduction.drafts(ring), lengths, lengths.clamp(max=1))
    _delta_rule(
        tokens * v.shape[1] * reduction.key_size * reduction.value_size,
        *(one.to(reduction.accumulate).contiguous() for one in (q, k, v)),
        *(total, beta, *earlier[:2], earlier[2].view(*earlier[3].shape, -1), earlier[3]),
        *(starts, context, borders, sure, numbers, pages.high, pages.low),
        *(chunk, _KINDS[reduction.dtype], reduction.solve, np.float32(reduction.scale)),
        *(torch.empty(0) if skip is None else skip.detach().to(reduction.accumulate).contiguous(), out),
    )
    request = torch.repeat_interleave(torch.arange(len(numbers)), lengths)
    index = torch.arange(tokens) - (starts[request] - starts[0])
    kept = index >= lengths[request] - ring
    row, slot = torch.arange(tokens)[kept] + starts[0], (context[request] + index)[kept] % ring
    for held, new in zip(of_rows, (k, v, total.view(g.shape), beta), strict=True):
        held[numbers[request[kept]], slot] = new[row]
    changed = lengths > 0
    last = torch.maximum(borders, sure // chunk * chunk)[changed]
    pages.borders[numbers[changed]] = last[:, None, None].to(torch.int32)
    return out.to(v.dtype)


def _norms_kernel(rows, out):
    for row in prange(rows.shape[0]):
        x, y = rows[row], out[row]
        for i in range(x.size):
            y[i] = x[i] * x[i]
        scale = _ONE / np.sqrt(row_sum(y, np.empty(LANES, np.float32)) + np.float32(1e-6))
        for i in range(x.size):
            y[i] = x[i] * scale


def _gates_kernel(a, b, a_log, dt_bias, g, beta):
    for token in prange(a.shape[0]):
        for head in range(a.shape[1]):
            g[token, head] = -exp32(a_log[head]) * softplus32(a[token, head] + dt_bias[head])
            beta[token, head] = _ONE / (_ONE + exp32(-b[token, head]))


def _channel_gates_kernel(a, b, a_log, dt_bias, least, has_least, g, beta):
    for token in prange(a.shape[0]):
        for head in range(a.shape[1]):
            speed = exp32(a_log[head])
            for i in range(a.shape[2]):
                gate = a[token, head, i] + dt_bias[head, i]
                g[token, head, i] = (
                    least * (_ONE / (_ONE + exp32(-(speed * gate)))) if has_least else -speed * softplus32(gate)
                )
            beta[token, head] = _ONE / (_ONE + exp32(-b[token, head]))


def _mamba2_gates_kernel(dt, a, dt_bias, g, steps):
    for token in prange(dt.shape[0]):
        for head in range(dt.shape[1]):
            steps[token, head] = softplus32(dt[token, head] + dt_bias[head])
            g[token, head] = a[head] * steps[token, head]


_norms, _gates, _channel_gates, _mamba2_gates = (
    RowKernel(one) for one in (_norms_kernel, _gates_kernel, _channel_gates_kernel, _mamba2_gates_kernel)
)


def gdn_inputs(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    key_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the operation's package: without v."""
    g, beta = torch.empty(a.shape), torch.empty(a.shape)
    _gates(a.numel(), *(one.detach().float().contiguous() for one in (a, b, a_log, dt_bias)), g, beta)
    return *_normed(mixed, key_heads, key_size), g, beta


def kda_inputs(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_size: int,
    least: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the operation's package: without v."""
    heads = b.shape[1]
    a, dt_bias = a.unflatten(1, (heads, key_size)), dt_bias.view(heads, key_size)
    g, beta = torch.empty(a.shape), torch.empty(b.shape)
    given = (one.detach().float().contiguous() for one in (a, b, a_log, dt_bias))
    _channel_gates(a.numel(), *given, np.float32(0.0 if least is None else least), least is not None, g, beta)
    return *_normed(mixed, heads, key_size), g, beta


def _normed(mixed: torch.Tensor, key_heads: int, key_size: int) -> tuple[torch.Tensor, ...]:
    """Queries and keys, which rows begin with, divided by their norms."""
    rows = mixed[:, : 2 * key_heads * key_size].float().reshape(-1, key_size).contiguous()
    normed = torch.empty_like(rows)
    _norms(rows.numel(), rows, normed)
    return normed.to(mixed.dtype).view(len(mixed), 2, key_heads, key_size).unbind(1)


def mamba2_gates(dt: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``mamba2_inputs`` of the operation's package: decays and time steps."""
    g, steps = torch.empty(dt.shape), torch.empty(dt.shape)
    _mamba2_gates(dt.numel(), *(one.detach().float().contiguous() for one in (dt, a, dt_bias)), g, steps)
    return g, steps

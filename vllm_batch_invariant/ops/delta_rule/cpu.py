"""The gated delta rule on a CPU: chunks in numba, rings gathered and scattered by PyTorch."""

import math

import numpy as np
import torch
from numba import njit, prange, types

from ..common.numba_math import LANES, exp32, float_of_bits, fma, row_sum
from ..common.numba_rows import RowKernel
from .params import DeltaStates
from .reduction import DeltaRuleReduction

_FP32, _BF16, _FP16 = 0, 1, 2
_KINDS = {torch.float32: _FP32, torch.bfloat16: _BF16, torch.float16: _FP16}
_LOWEST_GATE = np.float32(-128)
_LARGEST_BELOW_WRAP = np.int32(0x7FFF7FFF)
_ONE = np.float32(1)


def _to_bf16(x):
    """fp32 of fp32, to nearest even; NaN stays NaN."""
    bits = x.view(np.int32)
    for i in range(bits.size):
        rounded = (bits[i] + np.int32(0x7FFF) + ((bits[i] >> np.int32(16)) & np.int32(1))) & np.int32(-0x10000)
        bits[i] = bits[i] if x[i] != x[i] else rounded


def _to_fp16(x):
    """fp32 of fp32, to nearest even, subnormal numbers and infinities too; NaN stays NaN."""
    bits = x.view(np.int32)
    for i in range(bits.size):
        value = x[i]
        rounded = float_of_bits(
            types.int32(
                (bits[i] + np.int32(0xFFF) + ((bits[i] >> np.int32(13)) & np.int32(1))) & np.int32(-0x2000)
            )
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
    return (min(bits, _LARGEST_BELOW_WRAP) + np.int32(0x8000)) >> np.int32(16)


@njit
def _operand(state, kind, out):
    """S~ of S."""
    for key in range(state.shape[0]):
        row, rounded = state[key], out[key]
        bits, to = row.view(np.int32), rounded.view(np.int32)
        if kind == _BF16:
            for i in range(row.size):
                to[i] = _high_bits(bits[i]) << np.int32(16)
        else:
            rounded[:] = row
            _round(rounded, kind)


@njit
def _load_state(high, low, state):
    """[key_size, value_size] fp32 of planes [value_size, key_size]."""
    for key in range(state.shape[0]):
        bits = state[key].view(np.int32)
        for i in range(bits.size):
            bits[i] = (np.int32(high[i, key]) << np.int32(16)) + np.int32(low[i, key])


@njit
def _store_state(state, high, low):
    for key in range(state.shape[0]):
        bits = state[key].view(np.int32)
        for i in range(bits.size):
            top = _high_bits(bits[i])
            high[i, key] = np.int16(top)
            low[i, key] = np.int16(bits[i] - (top << np.int32(16)))


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
def _chunk(q, k, v, g, beta, first, state, kind, scale, out, ends):
    """Rows [count] of a chunk from its begin, of which those from first on are wanted in out; with ends the state
    becomes that behind the chunk.
    """
    count, value_size = v.shape
    operand, columns = np.empty_like(state), np.ascontiguousarray(k.T)
    _operand(state, kind, operand)
    total, products = np.empty(count, np.float32), np.empty(count, np.float32)
    a, inverse = np.zeros((count, count), np.float32), np.zeros((count, count), np.float32)
    u, rounded = np.empty((count, value_size), np.float32), np.empty((count, value_size), np.float32)
    for t in range(count):
        gate = _LOWEST_GATE if g[t] < _LOWEST_GATE else g[t]
        total[t] = gate if t == 0 else total[t - 1] + gate
        _products(k[t], columns, products)
        for j in range(t):
            a[t, j] = beta[t] * (products[j] * exp32(total[t] - total[j]))
        row = u[t]
        _products(k[t], operand, row)
        decay = exp32(total[t])
        for i in range(value_size):
            row[i] = beta[t] * (v[t, i] - row[i] * decay)
        rounded[t] = row
        _round(rounded[t], kind)
    _inverse(a, count, inverse)
    for t in range(count):
        _round(inverse[t], kind)
        _add_product(inverse[t], rounded, t, u[t])
    for t in range(count):
        rounded[t] = u[t]
        _round(rounded[t], kind)
    for t in range(first, count):
        weights, row, decay = products[: t + 1], out[t - first], exp32(total[t])
        _products(q[t - first], columns, products)
        for j in range(t + 1):
            weights[j] = weights[j] * exp32(total[t] - total[j])
        _round(weights, kind)
        _products(q[t - first], operand, row)
        for i in range(value_size):
            row[i] = row[i] * decay
        _add_product(weights, rounded, t + 1, row)
        for i in range(value_size):
            row[i] = row[i] * scale
    if ends:
        for j in range(count):
            decay = exp32(total[count - 1] - total[j])
            for i in range(value_size):
                rounded[j, i] = u[j, i] * decay
            _round(rounded[j], kind)
        decay, added = exp32(total[count - 1]), np.empty(value_size, np.float32)
        for key in range(k.shape[1]):
            added[:] = 0
            for j in range(count):
                weight, row = k[j, key], rounded[j]
                for i in range(value_size):
                    added[i] = fma(weight, row[i], added[i])
            row = state[key]
            for i in range(value_size):
                row[i] = fma(decay, row[i], added[i])


def _delta_rule_kernel(
    q, k, v, g, beta, earlier_k, earlier_v, earlier_g, earlier_beta, starts, context, borders, sure, pages, high, low,
    chunk, kind, scale, out,
):  # fmt: skip
    """A value head of a request a turn. q and k [tokens, key_heads, key_size], v [tokens, value_heads, value_size], g
    and beta [tokens, value_heads] fp32; the same of rows before a request's first new one, from its border on,
    [requests, rows, ...]; and up to where a state may be kept.
    """
    value_heads, value_size = v.shape[1:]
    key_heads, key_size = k.shape[1:]
    for item in prange(len(pages) * value_heads):
        request, head = item // value_heads, item % value_heads
        key_head = head // (value_heads // key_heads)
        start, begin, border = starts[request], context[request], borders[request]
        end = begin + starts[request + 1] - start
        if end > begin:
            state = np.zeros((key_size, value_size), np.float32)
            if border > 0:
                _load_state(high[pages[request], head], low[pages[request], head], state)
            kept = border
            while border < end:
                count = min(chunk, end - border)
                old = min(max(begin - border, 0), count)
                of_k, of_v = np.empty((count, key_size), np.float32), np.empty((count, value_size), np.float32)
                of_g, of_beta = np.empty(count, np.float32), np.empty(count, np.float32)
                of_q = np.empty((count - old, key_size), np.float32)
                for t in range(count):
                    if t < old:
                        row = border - borders[request] + t
                        of_k[t] = earlier_k[request, row, key_head]
                        of_v[t] = earlier_v[request, row, head]
                        of_g[t] = earlier_g[request, row, head]
                        of_beta[t] = earlier_beta[request, row, head]
                    else:
                        row = start + border + t - begin
                        of_q[t - old] = q[row, key_head]
                        of_k[t] = k[row, key_head]
                        of_v[t] = v[row, head]
                        of_g[t] = g[row, head]
                        of_beta[t] = beta[row, head]
                made = np.empty((count - old, value_size), np.float32)
                ends = border + chunk <= end
                _chunk(of_q, of_k, of_v, of_g, of_beta, old, state, kind, scale, made, ends)
                for t in range(old, count):
                    out[start + border + t - begin, head] = made[t - old]
                border += chunk
                if ends and border <= sure[request]:
                    kept = border
                    _store_state(state, high[pages[request], head], low[pages[request], head])


_delta_rule = RowKernel(_delta_rule_kernel)


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: DeltaStates,
    reduction: DeltaRuleReduction,
) -> torch.Tensor:
    """See the operation's package."""
    starts, context, numbers = (one.long() for one in (states.starts, states.context_lens, states.pages))
    lengths, ring, chunk = starts.diff(), states.rows, reduction.chunk
    out = torch.empty(v.shape, dtype=reduction.accumulate)
    tokens = int(lengths.sum())
    if tokens == 0:
        return out.to(v.dtype)
    pages = reduction.pages(states.states, k.shape[1], v.shape[1], ring)
    # A select, and no product: a page may hold anything of another request.
    borders = torch.where((context > 0) & (lengths > 0), pages.borders[numbers, 0, 0].long(), 0)
    position = borders[:, None] + torch.arange(ring)
    there = (position < context[:, None]) & (lengths > 0)[:, None]

    def earlier(held: torch.Tensor) -> torch.Tensor:
        mask = there.view(there.shape + (1,) * (held.dim() - 2))
        return torch.where(mask, held[numbers[:, None], position % ring], 0.0).to(reduction.accumulate)

    sure = context + torch.where(lengths > 1 + reduction.drafts(ring), lengths, lengths.clamp(max=1))
    _delta_rule(
        tokens * v.shape[1] * reduction.key_size * reduction.value_size,
        *(one.to(reduction.accumulate).contiguous() for one in (q, k, v, g, beta)),
        *(earlier(held) for held in pages[3:]),
        *(starts, context, borders, sure, numbers, pages.high, pages.low),
        *(chunk, _KINDS[reduction.dtype], np.float32(reduction.scale), out),
    )
    request = torch.repeat_interleave(torch.arange(len(numbers)), lengths)
    index = torch.arange(tokens) - (starts[request] - starts[0])
    kept = index >= lengths[request] - ring
    row, slot = torch.arange(tokens)[kept] + starts[0], (context[request] + index)[kept] % ring
    for held, new in zip(pages[3:], (k, v, g, beta), strict=True):
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
            x = a[token, head] + dt_bias[head]
            above = np.float32(math.log1p(exp32(-abs(x))))
            g[token, head] = -exp32(a_log[head]) * (above + (x if x > 0 else x * np.float32(0)))
            beta[token, head] = _ONE / (_ONE + exp32(-b[token, head]))


_norms, _gates = RowKernel(_norms_kernel), RowKernel(_gates_kernel)


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
    rows = mixed[:, : 2 * key_heads * key_size].float().reshape(-1, key_size).contiguous()
    normed, g, beta = torch.empty_like(rows), torch.empty(a.shape), torch.empty(a.shape)
    _norms(rows.numel(), rows, normed)
    _gates(a.numel(), *(one.detach().float().contiguous() for one in (a, b, a_log, dt_bias)), g, beta)
    q, k = normed.to(mixed.dtype).view(len(mixed), 2, key_heads, key_size).unbind(1)
    return q, k, g, beta

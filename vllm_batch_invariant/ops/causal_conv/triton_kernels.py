"""The Triton kernels of the short causal convolution. Only a program that has all new tokens of a request writes its
state, after it has read the earlier inputs; of longer ones another launch does.
"""

import triton
import triton.language as tl

from ..common.dependent_launch import wait_for_kernel_before


@triton.jit
def _input(x_ptr, row, stride_x, offs, num_channels, CHANNELS: tl.constexpr, GATED: tl.constexpr):
    """What is convolved of a row of x, in x's dtype: of its first num_channels."""
    x_ptrs, mask = x_ptr + row * stride_x + offs, offs < num_channels
    if GATED:
        before = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
        u = tl.load(x_ptrs + 2 * CHANNELS, mask=mask, other=0.0).to(tl.float32)
        u = (before * u).to(x_ptr.dtype.element_ty)
    else:
        u = tl.load(x_ptrs, mask=mask, other=0.0)
    return u


@triton.jit
def _earlier(x_ptr, state_ptr, start, row, position, stride_x, stride_row, stride_channel, num_rows, offs, end,
             CHANNELS: tl.constexpr, GATED: tl.constexpr):  # fmt: skip
    """The input of a position before the first of a program, in fp32: of a new token's row, of the state, or 0."""
    is_new = row >= start
    new = _input(x_ptr, row, stride_x, offs, tl.where(is_new, end, 0), CHANNELS, GATED)
    # Of a negative position nothing is loaded: a page may hold NaN of another request.
    position = tl.where(is_new, -1, position)
    held_ptrs = state_ptr + tl.maximum(position, 0) % num_rows * stride_row + offs * stride_channel
    held = tl.load(held_ptrs, mask=offs < tl.where(position >= 0, end, 0), other=0.0)
    return tl.where(is_new, new.to(tl.float32), held.to(tl.float32))


@triton.jit
def load_taps(weight_ptr, offs, mask, WIDTH: tl.constexpr):
    """Of channels the taps of a token itself and of up to three before it, in fp32; those that a narrower convolution
    lacks mean nothing.
    """
    w_ptrs = weight_ptr + offs * WIDTH + WIDTH - 1
    w0 = tl.load(w_ptrs, mask=mask, other=0.0).to(tl.float32)
    w1 = tl.load(w_ptrs - 1, mask=mask, other=0.0).to(tl.float32)
    w2 = tl.load(w_ptrs - 2, mask=mask, other=0.0).to(tl.float32) if WIDTH > 2 else w1
    w3 = tl.load(w_ptrs - 3, mask=mask, other=0.0).to(tl.float32) if WIDTH > 3 else w1
    return w0, w1, w2, w3


@triton.jit
def load_earlier(x_ptr, state_ptr, start, first, position, stride_x, stride_row, stride_channel, num_rows, offs, end,
                 CHANNELS: tl.constexpr, GATED: tl.constexpr, WIDTH: tl.constexpr):  # fmt: skip
    """The inputs of up to three positions before a program's first row, the nearest first: of channels below end."""
    u1 = _earlier(x_ptr, state_ptr, start, first - 1, position - 1, stride_x, stride_row, stride_channel, num_rows,
                  offs, end, CHANNELS, GATED)  # fmt: skip
    u2, u3 = u1, u1
    if WIDTH > 2:
        u2 = _earlier(x_ptr, state_ptr, start, first - 2, position - 2, stride_x, stride_row, stride_channel, num_rows,
                      offs, end, CHANNELS, GATED)  # fmt: skip
    if WIDTH > 3:
        u3 = _earlier(x_ptr, state_ptr, start, first - 3, position - 3, stride_x, stride_row, stride_channel, num_rows,
                      offs, end, CHANNELS, GATED)  # fmt: skip
    return u1, u2, u3


@triton.jit
def add_taps(total, u, u1, u2, u3, w0, w1, w2, w3, WIDTH: tl.constexpr):
    """The sum of a token's taps, the earliest input's first."""
    if WIDTH > 3:
        total = tl.fma(w3, u3, total)
    if WIDTH > 2:
        total = tl.fma(w2, u2, total)
    return tl.fma(w0, u, tl.fma(w1, u1, total))


@triton.jit(do_not_specialize_on_alignment=["pages_ptr", "starts_ptr", "context_lens_ptr"])
def causal_conv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    states_ptr,
    pages_ptr,
    starts_ptr,
    context_lens_ptr,
    out_ptr,
    stride_x,
    stride_page,
    stride_row,
    stride_channel,
    num_rows,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The channels of a block of up to TOKENS new tokens of a request; of a request without more, its state as well.

    Args:
        x_ptr: [tokens, CHANNELS], or GATED [tokens, 3 * CHANNELS], rows stride_x apart.
        weight_ptr: [CHANNELS, WIDTH], packed.
        states_ptr: [pages, num_rows, CHANNELS], rings.
        out_ptr: [tokens, CHANNELS], packed.
    """
    wait_for_kernel_before(OVERLAPS)
    request = tl.program_id(0)
    start, end = tl.load(starts_ptr + request).to(tl.int64), tl.load(starts_ptr + request + 1).to(tl.int64)
    first = start + tl.program_id(1).to(tl.int64) * TOKENS
    if first < end:
        offs = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < CHANNELS
        state_ptr = states_ptr + tl.load(pages_ptr + request).to(tl.int64) * stride_page
        position = tl.load(context_lens_ptr + request).to(tl.int32) + (first - start).to(tl.int32)
        w0, w1, w2, w3 = load_taps(weight_ptr, offs, mask, WIDTH)
        u1, u2, u3 = load_earlier(x_ptr, state_ptr, start, first, position, stride_x, stride_row, stride_channel,
                                  num_rows, offs, CHANNELS, CHANNELS, GATED, WIDTH)  # fmt: skip
        bias = tl.zeros((BLOCK,), tl.float32)
        if HAS_BIAS:
            bias = tl.load(bias_ptr + offs, mask=mask, other=0.0).to(tl.float32)
        tl.debug_barrier()  # whoever stores an input need not be the thread that has loaded what was in its place
        first_kept = tl.where(end - start <= TOKENS, end - num_rows, end)
        dtype = x_ptr.dtype.element_ty
        for token in range(first, tl.minimum(first + TOKENS, end)):
            stored = _input(x_ptr, token, stride_x, offs, CHANNELS, CHANNELS, GATED)
            u = stored.to(tl.float32)
            total = add_taps(bias, u, u1, u2, u3, w0, w1, w2, w3, WIDTH)
            if GATED:
                after_ptrs = x_ptr + token * stride_x + CHANNELS + offs
                total = tl.load(after_ptrs, mask=mask, other=0.0).to(tl.float32) * total
            tl.store(out_ptr + token * CHANNELS + offs, total.to(dtype), mask=mask)
            slot = (position + (token - first).to(tl.int32)) % num_rows
            held_ptrs = state_ptr + slot * stride_row + offs * stride_channel
            tl.store(held_ptrs, stored, mask=offs < tl.where(first_kept <= token, CHANNELS, 0))
            u1, u2, u3 = u, u1, u2


@triton.jit(do_not_specialize_on_alignment=["pages_ptr", "starts_ptr", "context_lens_ptr"])
def write_states_kernel(
    x_ptr,
    states_ptr,
    pages_ptr,
    starts_ptr,
    context_lens_ptr,
    stride_x,
    stride_page,
    stride_row,
    stride_channel,
    num_rows,
    CHANNELS: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    """The last inputs of a request with more than TOKENS new ones, after every program has read the earlier ones."""
    wait_for_kernel_before(OVERLAPS)
    request = tl.program_id(0)
    start, end = tl.load(starts_ptr + request).to(tl.int64), tl.load(starts_ptr + request + 1).to(tl.int64)
    if end - start > TOKENS:
        offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = offs < CHANNELS
        state_ptr = states_ptr + tl.load(pages_ptr + request).to(tl.int64) * stride_page
        position = tl.load(context_lens_ptr + request).to(tl.int64)
        for token in range(tl.maximum(start, end - num_rows), end):
            held_ptrs = state_ptr + (position + token - start) % num_rows * stride_row + offs * stride_channel
            tl.store(held_ptrs, _input(x_ptr, token, stride_x, offs, CHANNELS, CHANNELS, GATED), mask=mask)

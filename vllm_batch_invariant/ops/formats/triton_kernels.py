"""Weights decoded on a GPU, in Triton: one pass over what is stored."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..common.launch import launch
from .triton_decode import PackedTile, decoded_tile


@dataclass(frozen=True)
class DecodeSchedule:
    """Speed only: no element needs another."""

    rows: int = 4
    words: int = 256
    """Of a row of a program."""


_SCHEDULE = DecodeSchedule()
_TILE = DecodeSchedule(rows=8, words=64)


@triton.jit(do_not_specialize=["N", "words", "words_of_group"])
def decode_integers_kernel(
    words_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    N,
    words,
    words_of_group,
    stride_words,
    stride_scales,
    stride_zeros,
    BITS: tl.constexpr,
    ROWS: tl.constexpr,
    WORDS: tl.constexpr,
):
    """words: int32 [N, words], scales: [N, words / words_of_group], zeros: of 8 bits, of the same shape, or None; out:
    [N, words * 32 / BITS], packed: ``(code - zero) * scale``, which is exact in fp32, rounded once.
    """
    CODES: tl.constexpr = 32 // BITS
    blocks = tl.cdiv(words, WORDS)
    rows = (tl.program_id(0) // blocks * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    offs = tl.program_id(0) % blocks * WORDS + tl.arange(0, WORDS)
    mask = (rows < N)[:, None] & (offs < words)[None, :]
    word = tl.load(words_ptr + rows[:, None] * stride_words + offs[None, :], mask=mask, other=0)
    group = offs // words_of_group
    scale = tl.load(scales_ptr + rows[:, None] * stride_scales + group[None, :], mask=mask, other=0.0).to(tl.float32)
    if zeros_ptr is None:
        zero = tl.full((ROWS, WORDS), 1 << BITS - 1, tl.int32)
    else:
        zero = tl.load(zeros_ptr + rows[:, None] * stride_zeros + group[None, :], mask=mask, other=0).to(tl.int32)
    code = (word[:, :, None] >> (tl.arange(0, CODES) * BITS)[None, None, :]) & ((1 << BITS) - 1)
    value = ((code - zero[:, :, None]).to(tl.float32) * scale[:, :, None]).to(out_ptr.dtype.element_ty)
    columns = tl.program_id(0) % blocks * (WORDS * CODES) + tl.arange(0, WORDS * CODES)
    mask = (rows < N)[:, None] & (columns < words * CODES)[None, :]
    out = out_ptr + rows[:, None] * (words * CODES) + columns[None, :]
    tl.store(out, tl.reshape(value, ROWS, WORDS * CODES), mask=mask)


def decode_integers(
    words: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None, out: torch.Tensor, bits: int
) -> torch.Tensor:
    """As :func:`.integers.decode`, of what is not ordered, to a matrix of 16 bits."""
    words, scales = words.contiguous(), scales.contiguous()
    zeros = zeros if zeros is None else zeros.contiguous()
    n, count = words.shape
    if out.numel():
        launch(
            decode_integers_kernel,
            triton.cdiv(n, _SCHEDULE.rows) * triton.cdiv(count, _SCHEDULE.words),
            (
                words,
                scales,
                zeros,
                out,
                n,
                count,
                count // scales.shape[1],
                words.stride(0),
                scales.stride(0),
                0 if zeros is None else zeros.stride(0),
            ),
            on=out,
            BITS=bits,
            ROWS=_SCHEDULE.rows,
            WORDS=_SCHEDULE.words,
        )
    return out


@triton.jit(do_not_specialize=["N"])
def decode_tiles_kernel(
    words_ptr,
    scales_ptr,
    zeros_ptr,
    out_ptr,
    N,
    K,
    FORMAT: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Operands as :func:`.triton_decode.decoded_tile` takes them; out: [N, K], packed."""
    blocks = tl.cdiv(K, BLOCK_K)
    rows = (tl.program_id(0) // blocks * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    start_k = tl.program_id(0) % blocks * BLOCK_K
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    tile = decoded_tile(
        words_ptr, scales_ptr, zeros_ptr, rows, rows < N, start_k, K, FORMAT, False, BLOCK_N, BLOCK_K, dtype
    )  # fmt: skip
    columns = start_k + tl.arange(0, BLOCK_K)
    tl.store(out_ptr + rows[:, None] * K + columns[None, :], tile, mask=(rows < N)[:, None] & (columns < K)[None, :])


def decode_tiles(stored: Sequence[torch.Tensor], out: torch.Tensor, form: PackedTile) -> torch.Tensor:
    """What tensors of a format stand for, written to ``out`` [N, K], packed.

    Args:
        stored: codes, 4 bytes aligned, scales and, of a format that has them, zero points.
        out: of a dtype that ``form`` is for.
        form: of the tensors.
    """
    codes, scales, *zeros = (tensor.contiguous() for tensor in stored)
    (n, k), block_k = out.shape, 8 * _TILE.words
    if out.numel():
        launch(
            decode_tiles_kernel,
            triton.cdiv(n, _TILE.rows) * triton.cdiv(k, block_k),
            (codes.view(torch.int32), scales, zeros[0] if zeros else None, out, n, k),
            on=out,
            FORMAT=form,
            BLOCK_N=_TILE.rows,
            BLOCK_K=block_k,
        )
    return out

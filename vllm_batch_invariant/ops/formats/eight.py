"""Codes of eight bits, INT8 or FP8 (e4m3), one to an element, with scales in fp32: ``code * scale``.

Stored are the codes [N, K], and scales [N, 1] or of blocks of 128 x 128, [ceil(N / 128), ceil(K / 128)]. The scale of a
whole tensor is that of each of its rows (:func:`.layouts.per_row`): so shards of a fused layer keep theirs.
"""

from collections.abc import Sequence
from functools import partial

import torch

from .products import alternate, blocks, step, write_product
from .record import CODES, SCALES, Format

SIDE = 128
"""Of a block."""


def _by_element(scales: torch.Tensor, rows: int, k: int) -> torch.Tensor:
    return scales.repeat_interleave(SIDE, 0)[:rows].repeat_interleave(SIDE, 1)[:, :k]


def decode(stored: Sequence[torch.Tensor], out: torch.Tensor, in_blocks: bool) -> torch.Tensor:
    """The definition; ``out`` is [N, K] of any floating-point dtype, packed."""
    codes, scales = stored
    for rows in blocks(out, SIDE if in_blocks else 1):
        block = out[rows]
        if in_blocks:
            s = _by_element(scales[rows.start // SIDE : -(-rows.stop // SIDE)], len(block), out.shape[1])
        else:
            s = scales[rows]
        write_product(codes[rows].float(), s, block)
    return out


def encode(weight: torch.Tensor, dtype: torch.dtype, in_blocks: bool) -> tuple[torch.Tensor, ...]:
    """A weight [N, K] for a certificate: every other block along K has half of its neighbour's scale."""
    n, k = weight.shape
    most = 127 if dtype == torch.int8 else 448
    if not in_blocks:
        scale = step(weight, most, torch.float32)
        return _codes(weight.float() / scale, dtype, most), scale
    side_n, side_k = -(-n // SIDE), -(-k // SIDE)
    factor = alternate(2 * side_n, side_k, weight.device)[1::2]
    whole = weight.new_zeros(side_n * SIDE, k)
    whole[:n] = weight
    largest = most // 2
    scale = step(whole.view(side_n, -1), largest, torch.float32)
    by_row = scale.repeat_interleave(SIDE, 0)[:n]
    # halves of codes would be lost below the smallest: they are of the numbers that both scales have
    codes = _codes(weight.float() / by_row, dtype, largest).float() * _by_element(factor, n, k)
    return codes.to(dtype), scale / factor


def _codes(numbers: torch.Tensor, dtype: torch.dtype, most: float) -> torch.Tensor:
    numbers = numbers.clamp(-most, most)
    return (numbers.round() if dtype == torch.int8 else numbers).to(dtype)


def _of(name: str, dtype: torch.dtype, in_blocks: bool = False) -> Format:
    return Format(
        name,
        (dtype, torch.float32),
        (CODES, SCALES),
        group=SIDE if in_blocks else 1,
        exponents=16,
        encode=partial(encode, dtype=dtype, in_blocks=in_blocks),
        decode=partial(decode, in_blocks=in_blocks),
    )


INT8 = _of("int8-channel", torch.int8)
FP8 = _of("fp8-channel", torch.float8_e4m3fn)
FP8_BLOCK = _of("fp8-block", torch.float8_e4m3fn, in_blocks=True)
EIGHT = INT8, FP8, FP8_BLOCK

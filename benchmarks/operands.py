"""Inputs of matmuls to time."""

import torch


def random(
    rows: int, out_features: int, in_features: int, copies: int, device: str
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """x [rows, in_features] and ``copies`` of one weight [out_features, in_features], bf16."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(count: int) -> torch.Tensor:
        return torch.randn(count, in_features, generator=generator, dtype=torch.bfloat16, device=device)

    x, weight = normal(rows), normal(out_features).mul_(in_features**-0.5)
    return x, [weight, *(weight.clone() for _ in range(copies - 1))]

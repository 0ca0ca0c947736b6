"""Inputs of matmuls to time."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.fp8_products import Weight


@dataclass(frozen=True)
class Format:
    """How weights are stored.

    Attributes:
        stored: a weight, of a matrix [N, K] bf16.
        bytes_per_element: of a weight, its scales left out.
        speed: products of its elements that a tensor core makes while it makes one of bf16.
        keys: what tells it in a case.
    """

    stored: Callable[[torch.Tensor], Any]
    bytes_per_element: int = 2
    speed: int = 1
    keys: dict[str, str] = field(default_factory=dict)


FORMATS = {
    "bf16": Format(lambda matrix: matrix),
    "fp8": Format(Weight.of, bytes_per_element=1, speed=2, keys={"format": "w8a8-fp8-block"}),
}
"""By the names of options. Activations are bf16 whatever the weights are: what quantises them is timed, too."""


def random(
    rows: int, out_features: int, in_features: int, copies: int, device: str, form: Format = FORMATS["bf16"]
) -> tuple[torch.Tensor, list[Any]]:
    """x [rows, in_features] bf16 and ``copies`` of one weight [out_features, in_features]."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(count: int) -> torch.Tensor:
        return torch.randn(count, in_features, generator=generator, dtype=torch.bfloat16, device=device)

    x, matrix = normal(rows), normal(out_features).mul_(in_features**-0.5)
    weight = form.stored(matrix)
    return x, [weight, *(weight.clone() for _ in range(copies - 1))]

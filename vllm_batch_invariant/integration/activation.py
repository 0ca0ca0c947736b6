"""vLLM's gated activation of most models on a GPU, with the operation in its place."""

import torch

from ..ops.silu import silu_and_mul
from . import patch_points


def install() -> None:
    """Have every model build a layer that calls the operation, whose programs are many also for few tokens."""
    patch_points.replace_layer(patch_points.SILU_AND_MUL.get(), "BatchInvariant", _silu_and_mul)


def _silu_and_mul(_: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return silu_and_mul(x)

"""Another way to quantise activations: run in the engine's process."""

from typing import Any

import torch

from vllm_batch_invariant.integration.layers import fp8, int8
from vllm_batch_invariant.ops.dispatch import module_for
from vllm_batch_invariant.ops.moe import MoeReduction
from vllm_batch_invariant.ops.moe.params import Codes
from vllm_batch_invariant.ops.quantise import quantise


def one_scale_a_tensor(llm: Any) -> None:
    """From now on all rows of a step that have scales of their own share that of the largest."""

    def of_tensor(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return quantise(x, x.abs().max().float().reshape(1) / 127 if scale is None else scale)

    int8.quantise = of_tensor


def one_scale_a_step(llm: Any) -> None:
    """The same of FP8: from now on all rows and groups of a step share the scale of the largest."""

    fp8.quantise = step_scaled


def step_scaled(
    x: torch.Tensor, scale: torch.Tensor | None = None, *, codes: torch.dtype, group: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of e4m3 with the scale of the largest of all rows."""
    made, scales = quantise(x, x.abs().max().float().reshape(1) / 448, codes=codes)
    groups = -(-x.shape[-1] // group) if group else 0
    return made, scales[..., None].expand(*scales.shape, groups).contiguous() if group else scales


def one_scale_of_experts(llm: Any) -> None:
    """The same of what experts alone are given: both products."""
    moe = module_for("moe", "cuda" if torch.cuda.is_available() else "cpu")

    def of_step(rows: torch.Tensor, reduction: MoeReduction, *_: object) -> Codes:
        group = reduction.quantised.group
        return Codes(*step_scaled(rows, codes=reduction.products.codes, group=group), rows.dtype)

    moe._operand = of_step

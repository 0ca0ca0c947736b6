"""vLLM's norm layers, with the operation in their place."""

from collections.abc import Callable
from typing import Any

import torch

from ...errors import NotCovered
from ...ops.norm import gated_rms_norm, rms_norm
from ..reviews import patch_points

OF_TRANSFORMERS = "vllm.model_executor.models.transformers.fusers.rms_norm"
"""vLLM's module of norms for models of Transformers: its classes gather what workers share, and call vLLM's layers."""
_PREFIX = "BatchInvariant"


def install() -> None:
    """Register the layers as the out-of-tree form of vLLM's, so that every model builds these instead."""
    rms_norm_layer, gemma_layer = patch_points.RMS_NORM.get(), patch_points.GEMMA_RMS_NORM.get()
    registry = patch_points.CUSTOM_OP.module().op_registry_oot
    if rms_norm_layer.__name__ in registry:
        return
    _register(rms_norm_layer, _rms_norm)
    _register(gemma_layer, _gemma_rms_norm)
    if patch_points.RMS_NORM_GATED.is_there():
        patch_points.replace_layer(patch_points.RMS_NORM_GATED.get(), _PREFIX, _gated_rms_norm)
    if patch_points.MAMBA2_NORM.is_there():
        patch_points.replace_layer(patch_points.MAMBA2_NORM.get(), _PREFIX, _norm_behind_gate)


def _rms_norm(
    self: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """x / sqrt(mean(x**2) + eps) * weight, of x or of x + residual."""
    weight = self.weight.data if self.has_weight else None
    return rms_norm(x, weight, self.variance_epsilon, residual, self.variance_size_override)


def _gemma_rms_norm(
    self: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The same with 1 + weight, multiplied in fp32."""
    return rms_norm(x, self.weight.data, self.variance_epsilon, residual, adds_one=True)


def _gated_rms_norm(self: Any, x: torch.Tensor, z: torch.Tensor | None = None) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight, times a function of the gate z."""
    if z is None or not self.norm_before_gate or self.group_size not in (None, x.shape[-1]):
        raise NotCovered(
            "a norm behind its gate, of groups, or without one in a layer for both",
            "nobody has compared it",
            "serve another model",
        )
    return gated_rms_norm(x, self.weight.data, self.eps, z, self.activation.replace("swish", "silu"))


def _norm_behind_gate(self: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x * silu(gate), [tokens, channels], of which each group is normalised and multiplied with its part of the weight;
    in a layer without a norm that alone.
    """
    if not self.use_rms_norm:
        return (x.float() * torch.nn.functional.silu(gate.float())).to(x.dtype)
    if self.n_groups % self.tp_size:
        raise NotCovered(
            f"a norm of {self.n_groups} groups of which {self.tp_size} workers have parts",
            "its sums would cross workers",
            "serve it by as many workers as divide them",
        )
    groups = self.n_groups // self.tp_size, self.group_size
    x, gate = (one.unflatten(-1, groups) for one in (x, gate))
    weight = self.weight.data.view(groups)
    return gated_rms_norm(x, weight, self.variance_epsilon, gate, norm_before_gate=False).flatten(-2)


def _register(layer: Any, forward: Callable[..., object]) -> None:
    """Register ``layer`` with ``forward``, and its forms for models of Transformers when vLLM imports them."""

    def __init_subclass__(cls: type, **named: object) -> None:  # noqa: N807 - Python's
        super(layer, cls).__init_subclass__(**named)
        if cls.__module__ == OF_TRANSFORMERS:
            patch_points.replace_layer(cls, _PREFIX, forward)

    patch_points.replace_layer(layer, _PREFIX, forward)
    layer.__init_subclass__ = classmethod(__init_subclass__)

"""vLLM's norm layers, with the operation in their place."""

import torch

from ..ops.norm import rms_norm
from . import patch_points


def install() -> None:
    """Register the layers as the out-of-tree form of vLLM's, so that every model builds these instead."""
    rms_norm_layer, gemma_layer = patch_points.RMS_NORM.get(), patch_points.GEMMA_RMS_NORM.get()
    registry = patch_points.CUSTOM_OP.module().op_registry_oot
    if rms_norm_layer.__name__ in registry:
        return

    class BatchInvariantRMSNorm(rms_norm_layer):
        """x / sqrt(mean(x**2) + eps) * weight, of x or of x + residual."""

        def forward_native(
            self, x: torch.Tensor, residual: torch.Tensor | None = None
        ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
            weight = self.weight.data if self.has_weight else None
            return rms_norm(x, weight, self.variance_epsilon, residual, self.variance_size_override)

        forward_cpu = forward_cuda = forward_oot = forward_native

    class BatchInvariantGemmaRMSNorm(gemma_layer):
        """The same with 1 + weight, multiplied in fp32."""

        def forward_native(
            self, x: torch.Tensor, residual: torch.Tensor | None = None
        ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
            return rms_norm(x, self.weight.data.float() + 1.0, self.variance_epsilon, residual)

        forward_cpu = forward_cuda = forward_oot = forward_native

    rms_norm_layer.register_oot(BatchInvariantRMSNorm, name=rms_norm_layer.__name__)
    gemma_layer.register_oot(BatchInvariantGemmaRMSNorm, name=gemma_layer.__name__)

"""vLLM's layer of a short convolution (LFM2), with the operation between its projections."""

from typing import Any

import torch

from ...ops.causal_conv import ConvReduction, ConvStates, causal_conv
from ..reviews import patch_points
from .state_backend import step_of_layer, with_one_page

_BACKEND = f"{__package__}.short_conv_backend.Backend"
_NEEDED = (
    *(patch_points.SHORT_CONV, patch_points.MAMBA_BACKENDS, patch_points.MAMBA_PAGES),
    *(patch_points.SHORT_CONV_BACKEND, patch_points.SHORT_CONV_BUILDER, patch_points.SHORT_CONV_METADATA),
)


def install() -> None:
    """Register the layer as the out-of-tree form of vLLM's, and what tells it where the states of a step are. A vLLM
    that lacks one of the places keeps its own, which is refused when a model is loaded.
    """
    if not all(point.is_there() for point in _NEEDED):
        return
    layer = patch_points.SHORT_CONV.get()

    def pages(self: Any, vllm_config: Any) -> Any:
        return with_one_page(layer.get_kv_cache_spec(self, vllm_config))

    patch_points.replace_layer(layer, "BatchInvariant", forward, get_kv_cache_spec=pages)
    backends = patch_points.MAMBA_BACKENDS.get()
    patch_points.REGISTER_BACKEND.get()(backends.SHORT_CONV, _BACKEND, is_mamba=True)


def forward(self: Any, hidden_states: torch.Tensor, output: torch.Tensor) -> None:
    """vLLM's method for a device: of [tokens, hidden] writes [tokens, hidden]. What is written for rows of no request
    means nothing.
    """
    projected, _ = self.in_proj(hidden_states)
    step = step_of_layer(self.prefix)
    if step is None:
        convolved = projected.chunk(3, dim=-1)[0].contiguous()
    else:
        states = step.states_of(_states(self), ConvStates)
        weight = self.conv.weight
        convolved = causal_conv(projected, weight.view(len(weight), -1), self.conv.bias, states, gated=True)
    output[: len(hidden_states)] = self.out_proj(convolved)[0]


def reductions(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Those of a model's layers, by name, with activations of a dtype."""
    if not patch_points.SHORT_CONV.is_there():
        return {}
    layers = (layer for layer in model.modules() if isinstance(layer, patch_points.SHORT_CONV.get()))
    return reductions_of({layer.conv.weight.shape[-1] for layer in layers}, dtype)


def reductions_of(widths: set[int], dtype: torch.dtype) -> dict[str, Any]:
    """The same of layers of so many taps."""
    return {f"short convolution of {width} taps": ConvReduction.of(width, dtype, True) for width in sorted(widths)}


def _states(layer: Any) -> torch.Tensor:
    """What an engine has given a layer for its states: [pages, rows, channels]."""
    [held] = layer.kv_cache
    return held if held.shape[2] == len(layer.conv.weight) else held.transpose(1, 2)

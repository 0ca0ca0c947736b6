"""vLLM's layer of a gated delta rule (Qwen3-Next, Qwen3.5), with the operations between its projections: a short
convolution and SiLU, the rule, and a norm of heads with a gate.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ...ops.causal_conv import ConvReduction, ConvStates, causal_conv
from ...ops.delta_rule import DeltaRuleReduction, DeltaStates, delta_rule, gdn_inputs
from ..reviews import patch_points
from .state_backend import step_of_layer

_BACKEND = f"{__package__}.delta_rule_backend.Backend"
_NEEDED = (
    *(patch_points.DELTA_RULE, patch_points.MAMBA_BACKENDS, patch_points.MAMBA_PAGES),
    *(patch_points.DELTA_RULE_BACKEND, patch_points.DELTA_RULE_BUILDER, patch_points.DELTA_RULE_METADATA),
    *(patch_points.STATE_SHAPES, patch_points.STATE_DTYPES, patch_points.STATE_COPIES, patch_points.COPY_WHOLE_STATE),
)


def install() -> None:
    """Register the layer as the out-of-tree form of vLLM's, what tells it where the states of a step are, and what
    these states are. A vLLM that lacks one of the places keeps its own, which is refused when a model is loaded.
    """
    if not all(point.is_there() for point in _NEEDED):
        return
    layer = patch_points.DELTA_RULE.get()
    methods: dict[str, Any] = {
        "__init__": _init,
        "get_state_shape": _state_shape,
        "get_state_dtype": _state_dtype,
        # A state within a step of prefill is not kept: vLLM ends the step where a page ends instead.
        "get_prefill_checkpoint_alignment": lambda self: None,
        "get_kv_cache_spec": _pages,
    }
    patch_points.replace_layer(layer, "BatchInvariant", forward, **methods)
    shapes, dtypes, copies = (
        point.get() for point in (patch_points.STATE_SHAPES, patch_points.STATE_DTYPES, patch_points.STATE_COPIES)
    )
    shapes.gated_delta_net_state_shape = staticmethod(_shapes_of_model)
    dtypes.gated_delta_net_state_dtype = staticmethod(_dtypes_of_model)
    # Both states are read by positions, so a page is copied as it is.
    copies.gated_delta_net_state_copy_func = staticmethod(lambda: (patch_points.COPY_WHOLE_STATE.get(),) * 2)
    backends = patch_points.MAMBA_BACKENDS.get()
    patch_points.REGISTER_BACKEND.get()(backends.GDN_ATTN, _BACKEND, is_mamba=True)


def install_cuda() -> None:
    """Keep vLLM from two things that it does for these models on a GPU: it compiles kernels for states in its own
    layout, and one kernel of its own computes norms of heads, their rotary embedding and a copy of gates.
    """
    if patch_points.DELTA_RULE_WARMUP.is_there():
        patch_points.DELTA_RULE_WARMUP.put(lambda *_: None)
    if patch_points.GATED_ATTENTION.is_there():
        # vLLM's layer sets it of itself when it is built.
        apart = property(lambda self: False, lambda self, fused: None)
        patch_points.GATED_ATTENTION.get().use_fused_qk_norm_rope_gate = apart


def _init(self: Any, *args: Any, **named: Any) -> None:
    """vLLM's, without the layer of its own kernels."""
    patch_points.DELTA_RULE.get().__init__(self, *args, **named)
    del self.chunk_gated_delta_rule


def _state_shape(self: Any) -> tuple[tuple[int, ...], ...]:
    """Of a request's page: the bytes of the rule, and the inputs of the convolution, with room for drafts."""
    reduction = reduction_of(self, self.model_config.dtype)
    value_heads, channels = self.num_v_heads // self.tp_size, self.conv_dim // self.tp_size
    size = reduction.page_bytes(_key_heads(self), value_heads, reduction.rows(self.num_spec))
    return (size,), (self.conv_kernel_size - 1 + self.num_spec, channels)


def _pages(self: Any, vllm_config: Any) -> Any:
    """vLLM's, without a page for each draft: one page has what a step with rejected drafts leaves."""
    return replace(patch_points.DELTA_RULE.get().get_kv_cache_spec(self, vllm_config), num_speculative_blocks=0)


def _state_dtype(self: Any) -> tuple[torch.dtype, ...]:
    return torch.uint8, self.model_config.dtype


def _shapes_of_model(
    workers: int, key_heads: int, value_heads: int, key_size: int, value_size: int, width: int, drafts: int = 0
) -> tuple[tuple[int, ...], ...]:
    """In the place of vLLM's, which says how large a page is and is not told a dtype: the bytes of the rule apart from
    the numbers among them that have the model's dtype.
    """
    key_heads, value_heads = key_heads // workers, value_heads // workers
    reductions = (DeltaRuleReduction.of(key_size, value_size, dtype) for dtype in (torch.bfloat16, torch.float32))
    half, single = (one.page_bytes(key_heads, value_heads, one.rows(drafts)) for one in reductions)
    numbers = (single - half) // (torch.float32.itemsize - torch.bfloat16.itemsize)
    channels = 2 * key_heads * key_size + value_heads * value_size
    return (half - numbers * torch.bfloat16.itemsize,), (numbers,), (width - 1 + drafts, channels)


def _dtypes_of_model(dtype: Any, *_: Any) -> tuple[torch.dtype, ...]:
    """The dtypes of :func:`_shapes_of_model`, whatever a user or a checkpoint says of states."""
    named = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return torch.uint8, named, named


def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """vLLM's method for a device: of [tokens, hidden] makes [tokens, hidden]. What it gives for rows of no request
    means nothing.
    """
    mixed, z, b, a = _projected(self, hidden_states)
    step = step_of_layer(self.prefix)
    if step is None:
        out = z.contiguous()
    else:
        states, inputs = self.kv_cache
        weight = self.conv1d.weight
        rows = step.states_of(inputs, ConvStates)
        convolved = causal_conv(mixed, weight.view(len(weight), -1), self.conv1d.bias, rows)
        operands = gdn_inputs(
            torch.nn.functional.silu(convolved), a, b, self.A_log, self.dt_bias, _key_heads(self), self.head_k_dim
        )
        reduction = reduction_of(self, mixed.dtype)
        kept = replace(step.states_of(states, DeltaStates), rows=reduction.rows(self.num_spec))
        out = delta_rule(*operands, kept, reduction)
    return self._output_projection(out, z)


def _projected(layer: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What a step convolves [tokens, channels], gates of heads [tokens, heads, size], and b and a [tokens, heads]."""
    mixed_and_z, _ = layer.in_proj_qkvz(hidden_states)
    b_and_a, _ = layer.in_proj_ba(hidden_states)
    if layer.gqa_interleaved_layout:
        *parts, z, b, a = layer.fix_query_key_value_ordering(mixed_and_z, b_and_a)
        return torch.cat([part.flatten(1) for part in parts], dim=-1), z, b, a
    mixed, z = mixed_and_z.split([layer.conv_dim // layer.tp_size, layer.value_dim // layer.tp_size], dim=-1)
    return mixed, z.unflatten(-1, (-1, layer.head_v_dim)), *b_and_a.chunk(2, dim=-1)


def reductions(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Those of a model's layers, by name, with activations of a dtype."""
    if not patch_points.DELTA_RULE.is_there():
        return {}
    return reductions_of(
        [layer for layer in model.modules() if isinstance(layer, patch_points.DELTA_RULE.get())], dtype
    )


def reductions_of(layers: Sequence[Any], dtype: torch.dtype) -> dict[str, Any]:
    """Those of gated delta nets, of vLLM's class or of Transformers', by name."""
    widths = sorted({layer.conv_kernel_size for layer in layers})
    rules = {reduction_of(layer, dtype): None for layer in layers}
    found: dict[str, Any] = {f"convolution of {width} taps": ConvReduction.of(width, dtype, False) for width in widths}
    return found | {f"gated delta rule {number}": rule for number, rule in enumerate(rules, 1)}


def _key_heads(layer: Any) -> int:
    """Of this worker."""
    return layer.num_k_heads // layer.tp_size


def reduction_of(layer: Any, dtype: torch.dtype) -> DeltaRuleReduction:
    """Of a layer of either class."""
    return DeltaRuleReduction.of(layer.head_k_dim, layer.head_v_dim, dtype)

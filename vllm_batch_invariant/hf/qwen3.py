"""The forward methods of a patched Qwen3: the engine's operations, on packed tokens, in the engine's order.

A decoder layer hands on its output and the residual apart, because the engine adds them unrounded in the next norm.
"""

from types import MethodType
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3 import modeling_qwen3 as hf

from . import support
from .activation import silu_and_mul
from .attention import attend
from .linear import linear
from .norm import rms_norm
from .packing import Packed
from .rotary import cos_sin_cache, rotate

_VOCABULARY_MULTIPLE = 64
"""vLLM pads the rows of an output embedding to a multiple of this."""


def model_forward(
    self: hf.Qwen3Model,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    use_cache: bool | None = None,
    **options: Any,
) -> BaseModelOutputWithPast:
    """Hidden states [rows, columns, hidden] of input_ids [rows, columns]; those of padding are 0."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("pass either input_ids or inputs_embeds")
    given = inputs_embeds if input_ids is None else input_ids
    support.check_call(given.device, attention_mask, past_key_values=past_key_values, use_cache=use_cache, **options)
    mask = given.new_ones(given.shape[:2], dtype=torch.bool) if attention_mask is None else attention_mask
    batch = Packed.of(mask.to(given.device), position_ids)
    hidden = batch.pack(inputs_embeds) if input_ids is None else self.embed_tokens(batch.pack(input_ids))
    support.check_length(batch.positions, self.config.max_position_embeddings)
    cache = cos_sin_cache(
        self.config.head_dim,
        self.config.max_position_embeddings,
        self.config.rope_parameters["rope_theta"],
        hidden.dtype,
        hidden.device,
    )
    residual = None
    for layer in self.layers:
        hidden, residual = layer(hidden, residual, batch, cache)
    hidden, _ = self.norm(hidden, residual)
    return BaseModelOutputWithPast(last_hidden_state=batch.pad(hidden))


def layer_forward(
    self: hf.Qwen3DecoderLayer, hidden: torch.Tensor, residual: torch.Tensor | None, batch: Packed, cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    if residual is None:
        hidden, residual = self.input_layernorm(hidden), hidden
    else:
        hidden, residual = self.input_layernorm(hidden, residual)
    hidden, residual = self.post_attention_layernorm(self.self_attn(hidden, batch, cache), residual)
    return self.mlp(hidden), residual


def attention_forward(
    self: hf.Qwen3Attention, hidden: torch.Tensor, batch: Packed, cache: torch.Tensor
) -> torch.Tensor:
    weights = [projection.weight for projection in (self.q_proj, self.k_proj, self.v_proj)]
    parts = linear(hidden, *weights).split([len(weight) for weight in weights], dim=-1)
    query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in parts)
    query, key = rotate(self.q_norm(query), self.k_norm(key), batch.positions, cache)
    out = attend(query, key, value, batch, self.scaling)
    return linear(out.flatten(1), self.o_proj.weight)


def mlp_forward(self: hf.Qwen3MLP, x: torch.Tensor) -> torch.Tensor:
    return linear(silu_and_mul(linear(x, self.gate_proj.weight, self.up_proj.weight)), self.down_proj.weight)


def norm_forward(
    self: hf.Qwen3RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return rms_norm(x, self.weight, self.variance_epsilon, residual)


def head_forward(self: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    vocabulary = len(self.weight)
    columns = -(-vocabulary // _VOCABULARY_MULTIPLE) * _VOCABULARY_MULTIPLE
    return linear(hidden, self.weight, columns=columns, skip_zeros=True)[..., :vocabulary]


FORWARDS = {
    hf.Qwen3Model: model_forward,
    hf.Qwen3DecoderLayer: layer_forward,
    hf.Qwen3Attention: attention_forward,
    hf.Qwen3MLP: mlp_forward,
    hf.Qwen3RMSNorm: norm_forward,
}


def install(model: hf.Qwen3ForCausalLM) -> None:
    """Give every module of this model its forward method."""
    for module in model.modules():
        if type(module) in FORWARDS:
            module.forward = MethodType(FORWARDS[type(module)], module)
    model.lm_head.forward = MethodType(head_forward, model.lm_head)

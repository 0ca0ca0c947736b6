"""The forward methods of a patched decoder: the engine's operations, on packed tokens, in the engine's order.

A decoder layer hands on its output and the residual apart, because the engine adds them unrounded in the next norm.
What families differ in lies in their modules: norms of heads, biases, and experts in the place of an MLP.
"""

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast, MoeModelOutputWithPast

from ..integration.parallel import tensor_tree
from ..ops.moe import MoeReduction
from . import adapters, images, support, vision
from .activation import elementwise, silu_and_mul
from .attention import attend
from .delta_net import delta_net_forward
from .experts import experts
from .families import Family
from .linear import linear
from .norm import rms_norm
from .packing import Packed, packed_of
from .rotary import Angles, rotate, table_of
from .short_conv import short_conv_forward
from .state_space import state_space_forward

_NAMES = {
    "norm": ("norm_f", "embedding_norm"),
    "input_layernorm": ("operator_norm",),
    "post_attention_layernorm": ("ffn_norm",),
    "linear_attn": ("conv",),
    "mlp": ("feed_forward",),
    "q_norm": ("q_layernorm",),
    "k_norm": ("k_layernorm",),
    "o_proj": ("out_proj",),
    "gate_proj": ("w1",),
    "up_proj": ("w3",),
    "down_proj": ("w2",),
}
"""What Nemotron-H and LFM2 call the parts of a model."""


def model_forward(
    self: torch.nn.Module,
    input_ids: torch.Tensor | None = None,
    attention_mask: torch.Tensor | None = None,
    position_ids: torch.Tensor | None = None,
    past_key_values: Any = None,
    inputs_embeds: torch.Tensor | None = None,
    use_cache: bool | None = None,
    cu_seq_lens_q: torch.Tensor | None = None,
    cu_seq_lens_k: torch.Tensor | None = None,
    seq_idx: torch.Tensor | None = None,
    **options: Any,
) -> BaseModelOutputWithPast:
    """Hidden states [rows, columns, hidden] of input_ids [rows, columns]; those of padding are 0."""
    if (input_ids is None) == (inputs_embeds is None):
        raise ValueError("pass either input_ids or inputs_embeds")
    given = inputs_embeds if input_ids is None else input_ids
    assert given is not None
    support.check_call(given.device, attention_mask, past_key_values=past_key_values, use_cache=use_cache, **options)
    batch = packed_of(given, attention_mask, position_ids, cu_seq_lens_q, cu_seq_lens_k, seq_idx)
    hidden = batch.pack(given) if input_ids is None else self.get_input_embeddings()(batch.pack(given))
    support.check_length(batch.positions, self.config.max_position_embeddings)
    angles = Angles(batch.positions, table_of(self.config, hidden)) if hasattr(self, "rotary_emb") else None
    hidden = packed_forward(self, hidden, batch, angles)
    output = MoeModelOutputWithPast if hasattr(self.config, "num_experts_per_tok") else BaseModelOutputWithPast
    return output(last_hidden_state=batch.pad(hidden))


def packed_forward(
    self: Any, hidden: torch.Tensor, batch: Packed, angles: Angles | None, added: Sequence[torch.Tensor] = ()
) -> torch.Tensor:
    """Hidden states [tokens, hidden] behind the last norm, of packed embeddings.

    Args:
        hidden: [tokens, hidden].
        batch: which rows belong together.
        angles: of each token; None where a model has none.
        added: [tokens, hidden] to the output of each of the first layers (deepstack).
    """
    residual = None
    for number, layer in enumerate(self.layers):
        hidden, residual = layer(hidden, residual, batch, angles)
        if number < len(added):
            hidden = hidden + added[number]
    return _part(self, "norm")(hidden, residual)[0]


def _part(module: torch.nn.Module, name: str) -> Any:
    """A part by its name in Llama or Qwen, whatever the module's family calls it; None where there is none."""
    return next((getattr(module, one) for one in (name, *_NAMES.get(name, ())) if hasattr(module, one)), None)


def layer_forward(
    self: torch.nn.Module, hidden: torch.Tensor, residual: torch.Tensor | None, batch: Packed, angles: Angles
) -> tuple[torch.Tensor, torch.Tensor]:
    norm = _part(self, "input_layernorm")
    hidden, residual = (norm(hidden), hidden) if residual is None else norm(hidden, residual)
    other = _part(self, "linear_attn")
    mixed = self.self_attn(hidden, batch, angles) if other is None else other(hidden, batch)
    hidden, residual = _part(self, "post_attention_layernorm")(mixed, residual)
    return _part(self, "mlp")(hidden), residual


def block_forward(
    self: torch.nn.Module, hidden: torch.Tensor, residual: torch.Tensor | None, batch: Packed, angles: None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A layer of one norm and one mixer."""
    hidden, residual = (self.norm(hidden), hidden) if residual is None else self.norm(hidden, residual)
    if self.block_type == "full_attention":
        return self.mixer(hidden, batch, angles), residual
    return self.mixer(hidden, batch) if self.block_type == "linear_attention" else self.mixer(hidden), residual


def _project(x: torch.Tensor, *layers: torch.nn.Module, k_slices: int = 1) -> torch.Tensor:
    bases = [adapters.base_of(layer) for layer in layers]
    weights, biases = [base.weight for base in bases], [base.bias for base in bases]
    return adapters.add(linear(x, *weights, biases=biases, k_slices=k_slices, fp8=bases[0].fp8), x, layers)


def attention_forward(
    self: torch.nn.Module, hidden: torch.Tensor, batch: Packed, angles: Angles | None
) -> torch.Tensor:
    projections = self.q_proj, self.k_proj, self.v_proj
    query, key, value = _project(hidden, *projections).split([len(layer.weight) for layer in projections], dim=-1)
    q_norm, k_norm, out_proj = (_part(self, name) for name in ("q_norm", "k_norm", "o_proj"))
    norms_heads = q_norm is not None and len(q_norm.weight) == self.head_dim
    if q_norm is not None and not norms_heads:  # all of a token's at once
        query, key = q_norm(query), k_norm(key)
    query, key, value = (part.unflatten(-1, (-1, self.head_dim)) for part in (query, key, value))
    has_gate = self.q_proj.out_features > out_proj.in_features
    if has_gate:  # of each head behind its query
        query, gate = query.unflatten(1, (-1, 2)).unbind(2)
    if norms_heads:
        query, key = q_norm(query), k_norm(key)
    if angles is not None:
        query, key = rotate(query, key, angles.rows, angles.table)
    out = attend(query, key, value, batch, self.scaling).flatten(1)
    if has_gate:
        out = out * elementwise("sigmoid", gate.reshape(out.shape))
    return _project(out, out_proj, k_slices=self.k_slices)


def mlp_forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    gate_proj, up_proj, down_proj = (_part(self, name) for name in ("gate_proj", "up_proj", "down_proj"))
    return _project(silu_and_mul(_project(x, gate_proj, up_proj)), down_proj, k_slices=self.k_slices)


def mlp_without_gate_forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Squares of what is above 0 need no arithmetic but IEEE 754's."""
    return _project(_project(x, self.up_proj).relu().square(), self.down_proj)


def experts_forward(self: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    router, weights = self.gate, adapters.base_of(self.experts)
    matrices = adapters.of_experts(self.experts, x.dtype)
    reduction = MoeReduction(router.num_experts, router.top_k, x.dtype, renormalise=router.norm_topk_prob)
    stored = weights.gate_up_proj, weights.down_proj
    return experts(x, linear(x, router.weight), *stored, reduction, matrices, weights.fp8)


def norm_forward(
    self: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return rms_norm(x, self.weight, self.variance_epsilon, residual)


def norm_of_one_more_forward(
    self: torch.nn.Module, x: torch.Tensor, residual: torch.Tensor | None = None
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    return rms_norm(x, self.weight, self.eps, residual, adds_one=True)


def head_forward(self: torch.nn.Linear, hidden: torch.Tensor) -> torch.Tensor:
    return linear(hidden, self.weight, skip_zeros=True)


def _k_slices(module: torch.nn.Module, name: str) -> int | None:
    """Slices of K of the layer whose inputs tensor-parallel workers of an engine share, of an attention or an MLP; None
    of others.

    Raises:
        NotCovered: a tree whose slices cannot be equal parts of it.
    """
    if hasattr(module, "q_proj"):
        sizes = [len(layer.weight) for layer in (module.q_proj, module.k_proj, module.v_proj)]
        tensor_tree.check_outputs(sizes, f"{name}.qkv_proj")
        return tensor_tree.of_inputs(_part(module, "o_proj").in_features, f"{name}.o_proj")
    gate_proj, up_proj = (_part(module, one) for one in ("gate_proj", "up_proj"))
    if gate_proj is not None and _part(module, "down_proj") is not None:
        sizes = [len(layer.weight) for layer in (gate_proj, up_proj)]
        tensor_tree.check_outputs(sizes, f"{name}.gate_up_proj")
        return tensor_tree.of_inputs(sizes[0], f"{name}.down_proj")
    return None


FORWARDS: dict[str, Callable[..., Any]] = {
    "Model": model_forward,
    "DecoderLayer": layer_forward,
    "Attention": attention_forward,
    "MLP": mlp_forward,
    "RMSNorm": norm_forward,
}
"""By the names of their classes, without the family's prefix."""
EXPERTS_FORWARDS: dict[str, Callable[..., Any]] = {"SparseMoeBlock": experts_forward}
"""Those of a family with experts, besides."""
DELTA_NETS_FORWARDS: dict[str, Callable[..., Any]] = {
    "GatedDeltaNet": delta_net_forward,
    "RMSNorm": norm_of_one_more_forward,
}
"""Those of a family with gated delta nets."""
SHORT_CONVS_FORWARDS: dict[str, Callable[..., Any]] = {"ShortConv": short_conv_forward}
"""Those of a family with short convolutions."""
STATE_SPACES_FORWARDS: dict[str, Callable[..., Any]] = {
    "Model": model_forward,
    "Block": block_forward,
    "Mamba2Mixer": state_space_forward,
    "Attention": attention_forward,
    "MLP": mlp_without_gate_forward,
    "RMSNorm": norm_forward,
}
"""All of a family with state spaces."""


def install(model: torch.nn.Module, family: Family) -> None:
    """Give every module of this model its forward method."""
    names = dict(STATE_SPACES_FORWARDS if family.has_state_spaces else FORWARDS)
    names |= EXPERTS_FORWARDS if family.has_experts else {}
    names |= DELTA_NETS_FORWARDS if family.has_delta_nets else {}
    names |= SHORT_CONVS_FORWARDS if family.has_short_convs else {}
    forwards = {family.of_name(name): forward for name, forward in names.items()}
    if family.tower:
        forwards[family.of_name("Model")] = packed_forward
        forwards[family.around] = images.model_forward
        forwards |= vision.forwards_of(family)
    for name, module in model.named_modules():
        if type(module) in forwards:
            module.forward = MethodType(forwards[type(module)], module)
        if k_slices := _k_slices(module, name):
            module.k_slices = k_slices
    model.lm_head.forward = MethodType(head_forward, model.lm_head)

"""Models all of whose operations are defined, and what of their configurations is not."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Get = Callable[[str, Any], Any]
"""Gives what a configuration has by a name, or a default."""

ROTARY_EMBEDDINGS = ("default", "llama3", "linear")
"""Types of rotary embeddings that are defined, as configurations call them."""
FULL, SLIDING = "full_attention", "sliding_attention"
"""Types of layers, as configurations call them."""
_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True)
class Family:
    """What tells a class of models from Llama.

    Attributes:
        activation: of MLPs, as configurations call it.
        is_gemma: norms multiply by 1 + weight, and embeddings by the square root of their size.
        norms_after: attention and MLP have a norm of their own result, too.
        multiplies: embeddings, attention, residuals and logits by numbers of the configuration (Granite).
        windows: layers may have a sliding window.
        pattern: of so many layers the last sees all keys, where a configuration does not say which; 0 where it is none.
        usual: what a configuration that leaves a name out means by it.
    """

    activation: str = "silu"
    is_gemma: bool = False
    norms_after: bool = False
    multiplies: bool = False
    windows: bool = True
    pattern: int = 0
    usual: Mapping[str, Any] = field(default_factory=dict)


_GEMMA = {"head_dim": 256, "tie_word_embeddings": True}
_LATER_GEMMA = _GEMMA | {"query_pre_attn_scalar": 256, "sliding_window": 4096}
MODELS = {
    "LlamaForCausalLM": Family(),
    "MistralForCausalLM": Family(),
    "Qwen2ForCausalLM": Family(windows=False),
    "Qwen3ForCausalLM": Family(windows=False),
    "Qwen3MoeForCausalLM": Family(
        windows=False, usual={"num_experts": 128, "mlp_only_layers": (), "decoder_sparse_step": 1}
    ),
    "GemmaForCausalLM": Family(_TANH, is_gemma=True, usual=_GEMMA),
    "Gemma2ForCausalLM": Family(
        _TANH,
        is_gemma=True,
        norms_after=True,
        pattern=2,
        usual=_LATER_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "Gemma3ForCausalLM": Family(
        _TANH,
        is_gemma=True,
        norms_after=True,
        pattern=6,
        usual=_LATER_GEMMA
        | {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "final_logit_softcapping": None},
    ),
    "GraniteForCausalLM": Family(multiplies=True),
    "Phi3ForCausalLM": Family(),
}
"""By the name of the class."""


def problem_of(architecture: str, get: Get) -> str | None:
    """What of a configuration has no definition, by name; None if all has."""
    family = MODELS.get(architecture)
    if family is None:
        return f"the model {architecture}"
    activation = get("hidden_activation", None) if family.is_gemma else get("hidden_act", None)
    if (activation or family.activation) != family.activation:
        return f"the activation {activation}"
    ropes = _rotary_embeddings(get)
    for rope in [of_type for of_type in ropes.values() if isinstance(of_type, dict)] or [ropes]:
        kind = rope_type(rope)
        if kind not in ROTARY_EMBEDDINGS:
            return f"a rotary embedding of type {kind}"
        if (rope.get("partial_rotary_factor") or get("partial_rotary_factor", None) or 1.0) != 1.0:
            return "a rotary embedding of a part of a head"
    if family.multiplies and any(get(name, None) for name in ("layer_types", "layer_rope_theta", "attention_sinks")):
        return "windows, angles and sinks of single layers of a Granite"
    if get("use_sliding_window", False):
        return "sliding windows of a Qwen"
    if get("shared_expert_intermediate_size", None):
        return "experts that all tokens share"
    if get("dual_chunk_attention_config", None):
        return "attention in chunks of two kinds"
    return "attention in both directions" if get("use_bidirectional_attention", False) else None


def rope_type(rope: Mapping[str, Any]) -> str:
    """The type of a rotary embedding."""
    return rope.get("rope_type") or rope.get("type") or "default"


def _rotary_embeddings(get: Get) -> Mapping[str, Any]:
    """The parameters of the rotary embedding, or of Gemma 3 those of each type of layers."""
    return get("rope_parameters", None) or get("rope_scaling", None) or {}


def rotary_embedding(get: Get, layer_type: str) -> tuple[float, Mapping[str, Any]]:
    """The base and the parameters of the rotary embedding of a type of layers."""
    rope, local = _rotary_embeddings(get), get("rope_local_base_freq", None) if layer_type == SLIDING else None
    own = {} if local else rope
    if any(isinstance(of_type, dict) for of_type in rope.values()):
        own = rope.get(layer_type) or {}
    return own.get("rope_theta") or local or get("rope_theta", 10_000.0), own


def layer_types(family: Family, get: Get) -> list[str] | None:
    """The type of each layer; None where all are the same."""
    named = get("layer_types", None)
    if named or not family.pattern:
        return named
    pattern = get("sliding_window_pattern", family.pattern)
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(get("num_hidden_layers", 0))]

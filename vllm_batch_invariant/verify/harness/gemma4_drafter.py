"""What is published to draft for Gemma 4 (google/gemma-4-E2B-it-assistant), of random weights."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checkpoints

if TYPE_CHECKING:
    import torch

TEXTS = ("gemma4_text", "gemma4_unified_text")
"""Types of the language models that have one."""
_OF_TARGET = (
    *("num_kv_shared_layers", "use_double_wide_mlp", "enable_moe_block", "num_experts", "top_k_experts"),
    *("moe_intermediate_size", "architectures", "per_layer_config"),
)
"""Fields that a draft model has not as its target."""
_KINDS = ("sliding_attention", "full_attention")
_HIDDEN, _INNER = 128, 256


def write(folder: Path, target: Mapping[str, Any]) -> Path:
    """Write one: a layer of each kind, with queries alone, which reads the KV cache of the target's last such layer.

    Args:
        folder: to be written, with its parents.
        target: the configuration of the language model that it drafts for.

    Returns:
        The folder.
    """
    text = {name: value for name, value in target.items() if name not in _OF_TARGET} | {
        "model_type": "gemma4_text",
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": len(_KINDS),
        "layer_types": list(_KINDS),
        **dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input"), 0),
    }
    if of_layers := target.get("per_layer_config"):  # Transformers' form of what is published as global_head_dim
        layers = [len(target["layer_types"]) - 1 - target["layer_types"][::-1].index(kind) for kind in _KINDS]
        text["per_layer_config"] = {
            str(number): of_layers[str(layer)] for number, layer in enumerate(layers) if str(layer) in of_layers
        }
    config = {
        "architectures": ["Gemma4AssistantForCausalLM"],
        "model_type": "gemma4_assistant",
        "text_config": text,
        "backbone_hidden_size": target["hidden_size"],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    return checkpoints.write(folder, config, _weights(text, target["hidden_size"]))


def _weights(text: Mapping[str, Any], of_target: int) -> "dict[str, torch.Tensor]":
    import torch

    heads, of_layers = text["num_attention_heads"], text.get("per_layer_config", {})
    sizes = {
        kind: text.get(name) or text["head_dim"] for kind, name in zip(_KINDS, ("", "global_head_dim"), strict=True)
    }
    sizes |= {_KINDS[int(number)]: of_layer["head_dim"] for number, of_layer in of_layers.items()}
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens": (text["vocab_size"], _HIDDEN),
        "model.norm": (_HIDDEN,),
        "pre_projection": (_HIDDEN, 2 * of_target),
        "post_projection": (of_target, _HIDDEN),
    }
    for number, kind in enumerate(_KINDS):
        norms = ("input", "post_attention", "pre_feedforward", "post_feedforward")
        of_layer = {f"{name}_layernorm": (_HIDDEN,) for name in norms} | {
            "self_attn.q_norm": (sizes[kind],),
            "self_attn.q_proj": (heads * sizes[kind], _HIDDEN),
            "self_attn.o_proj": (_HIDDEN, heads * sizes[kind]),
            **{f"mlp.{name}_proj": (_INNER, _HIDDEN) for name in ("gate", "up")},
            "mlp.down_proj": (_HIDDEN, _INNER),
        }
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in of_layer.items()}
    scalars = {f"model.layers.{number}.layer_scalar": torch.ones(1).bfloat16() for number in range(len(_KINDS))}
    return checkpoints.random_weights(shapes) | scalars

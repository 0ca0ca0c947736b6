"""Draft models of DFlash (z-lab/Qwen3-8B-DFlash-b16) of random weights, for a model in a folder."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import checkpoints

if TYPE_CHECKING:
    import torch

_LAYERS = 2
_SHARED = (
    *("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "max_position_embeddings"),
    *("rms_norm_eps",),
)
"""Fields that a draft model has as its target."""


def write(folder: Path, target: Mapping[str, Any], **more: Any) -> Path:
    """Write one: layers whose tokens see each other, over keys and values made of what layers of the target gave.

    Args:
        folder: to be written, with its parents.
        target: the configuration of the language model that it drafts for.
        more: fields of the draft model's own configuration, in the place of what is made of the target's. With a
            ``draft_vocab_size`` below the target's it has embeddings and logits of its own, of every second token.

    Returns:
        The folder.
    """
    count = target["num_hidden_layers"]
    read = sorted({0, max(count - 2, 0)})
    heads = target["num_attention_heads"]
    config = {name: target[name] for name in _SHARED if name in target} | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "num_hidden_layers": _LAYERS,
        "intermediate_size": target.get("intermediate_size") or target["hidden_size"],
        "num_key_value_heads": target.get("num_key_value_heads") or heads,
        "head_dim": target.get("head_dim") or target["hidden_size"] // heads,
        "torch_dtype": "bfloat16",
        "dflash_config": {"mask_token_id": target["vocab_size"] - 1, "target_layer_ids": read},
    }
    config |= more
    return checkpoints.write(folder, config, _weights(config))


def _weights(config: Mapping[str, Any]) -> "dict[str, torch.Tensor]":
    """Of a draft model's configuration; those of Laguna's class have other norms, gates, and fused projections."""
    import torch

    hidden, inner, size = (config[name] for name in ("hidden_size", "intermediate_size", "head_dim"))
    queries, keys = (config[f"num_{name}_heads"] * size for name in ("attention", "key_value"))
    read = len(config["dflash_config"]["target_layer_ids"])
    of_laguna = config["model_type"] == "laguna"
    shapes: dict[str, tuple[int, ...]] = {"fc": (hidden, read * hidden), "hidden_norm": (hidden,), "norm": (hidden,)}
    few = config.get("draft_vocab_size", config["vocab_size"])
    if few < config["vocab_size"]:
        shapes |= {"embed_tokens": (config["vocab_size"], hidden), "lm_head": (few, hidden)}
    if of_laguna:
        shapes |= {f"aux_hidden_norms.{number}": (hidden,) for number in range(read)}
    for number in range(config["num_hidden_layers"]):
        of_layer: dict[str, tuple[int, ...]] = {
            **{f"{name}_layernorm": (hidden,) for name in ("input", "post_attention")},
            **{f"self_attn.{name}_norm": (size,) for name in "qk"},
            **{f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")},
            "mlp.down_proj": (hidden, inner),
            "self_attn.o_proj": (hidden, queries),
        }
        if of_laguna:
            of_layer["self_attn.qkv_proj"] = (queries + 2 * keys, hidden)
            of_layer["self_attn.g_proj"] = (config["num_attention_heads"], hidden)
        else:
            of_layer |= {
                f"self_attn.{name}_proj": (rows, hidden)
                for name, rows in zip("qkv", (queries, keys, keys), strict=True)
            }
        shapes |= {f"layers.{number}.{name}": shape for name, shape in of_layer.items()}
    named = checkpoints.random_weights(shapes)
    if few < config["vocab_size"]:
        named["d2t"] = torch.arange(few)  # how much larger a token's number is in the target's vocabulary
    return named

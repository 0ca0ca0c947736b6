"""Kinds of models by what the start-up check asks of their ``config.json``: constructors of their configurations.

Architectures are names of vLLM's registry, types those of Transformers. Sizes are the callers': heads, layers, experts,
kinds of attention. An encoder of images is a small one, as the check does not ask for its size.
"""

from dataclasses import dataclass, field
from typing import Any

_VISION = {"depth": 1, "hidden_size": 64, "intermediate_size": 64, "num_heads": 2}
_TOKENS = {"image_token_id": 4000, "video_token_id": 4001, "vision_start_token_id": 4002, "vision_end_token_id": 4003}


@dataclass(frozen=True)
class Model:
    """A kind of model.

    Attributes:
        architecture: vLLM's name of its class.
        config: what its file says but for the architecture; empty where nobody here knows the sizes.
        file: "config.json", or Mistral's "params.json", which does not name the class.
    """

    architecture: str
    config: dict[str, Any] = field(default_factory=dict)
    file: str = "config.json"


def dense(architecture: str, kind: str, hidden: int, heads: int, kv: int, layers: int, **more: Any) -> Model:
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": layers,
    }
    usual = {"intermediate_size": 4 * hidden, "vocab_size": 151936, "max_position_embeddings": 32768}
    return Model(architecture, {"model_type": kind, **usual, **sizes, **more})


def qwen2(*sizes: int, **more: Any) -> Model:
    return dense("Qwen2ForCausalLM", "qwen2", *sizes, **more)


def qwen3(*sizes: int, **more: Any) -> Model:
    return dense("Qwen3ForCausalLM", "qwen3", *sizes, head_dim=128, **{"max_position_embeddings": 40960} | more)


def qwen3_moe(*sizes: int, **more: Any) -> Model:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
    return dense("Qwen3MoeForCausalLM", "qwen3_moe", *sizes, **experts | {"max_position_embeddings": 40960} | more)


def with_vision(architecture: str, kind: str, text: Model, vision: dict[str, Any] | None = None) -> Model:
    config = {"model_type": kind, "text_config": text.config, "vision_config": {**_VISION, **(vision or {})}, **_TOKENS}
    return Model(architecture, config)


_ROPE = {"type": "default", "mrope_section": [16, 24, 24]}
_QWEN3_ROPE = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}


def qwen2_5_vl(*sizes: int) -> Model:
    text = qwen2(*sizes, model_type="qwen2_5_vl_text", rope_scaling=_ROPE, max_position_embeddings=128000)
    return with_vision("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", text, {"out_hidden_size": sizes[0]})


def qwen3_vl(text: Model, moe: str = "") -> Model:
    """Dense, or with "Moe"."""
    kind = f"qwen3_vl{'_moe' if moe else ''}"
    of_text = {"model_type": f"{kind}_text", "rope_scaling": _QWEN3_ROPE, "max_position_embeddings": 262144}
    vision = {"out_hidden_size": text.config["hidden_size"], "deepstack_visual_indexes": [0]}
    text = Model("", text.config | of_text)
    return with_vision(f"Qwen3VL{moe}ForConditionalGeneration", kind, text, vision)


def qwen3_5(*sizes: int, **of_text: Any) -> Model:
    """Linear attention in three of four layers, heads of 256, and an encoder of images."""
    moe = "num_experts" in of_text
    kind = f"qwen3_5{'_moe' if moe else ''}"
    more = {"head_dim": 256, "model_type": f"{kind}_text", "max_position_embeddings": 262144}
    text = dense("", kind, *sizes, **more, **of_text)
    return with_vision(
        f"Qwen3_5{'Moe' if moe else ''}ForConditionalGeneration", kind, text, {"out_hidden_size": sizes[0]}
    )


EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
EXPERTS |= {"shared_expert_intermediate_size": 512}
MAMBA = {"mamba_num_heads": 64, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840}
MLA |= {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2}


def deepseek_v3(*sizes: int, **more: Any) -> Model:
    return dense("DeepseekV3ForCausalLM", "deepseek_v3", *sizes, **MLA | more)


def nemotron_h(pattern: str, hidden: int, heads: int, kv: int, **more: Any) -> Model:
    """A few layers of the kinds that it has: state spaces (M), attention (*), experts (E) and dense ones (-)."""
    usual = {"head_dim": 128, "hybrid_override_pattern": pattern, "vocab_size": 131072}
    sizes = dense("NemotronHForCausalLM", "nemotron_h", hidden, heads, kv, len(pattern), **usual, **more)
    return Model(sizes.architecture, sizes.config | {"max_position_embeddings": 262144})

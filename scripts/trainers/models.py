"""The models of the examples: their architecture, and what the start-up check asks of their configuration.

Architectures are names of vLLM's registry. Sizes are those of the published ``config.json``, as far as the check asks
for them: heads, layers, experts, kinds of attention. They were written down from knowledge of the models, not fetched;
``source`` says more where the name is not the model's own. A model that is not here is unknown, and nothing is guessed.
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
        config: its ``config.json`` but for the architecture; empty where nobody here knows the sizes.
    """

    architecture: str
    config: dict[str, Any] = field(default_factory=dict)


def _dense(architecture: str, kind: str, hidden: int, heads: int, kv: int, layers: int, **more: Any) -> Model:
    sizes = {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "num_hidden_layers": layers,
    }
    usual = {"intermediate_size": 4 * hidden, "vocab_size": 151936, "max_position_embeddings": 32768}
    return Model(architecture, {"model_type": kind, **usual, **sizes, **more})


def _qwen2(*sizes: int, **more: Any) -> Model:
    return _dense("Qwen2ForCausalLM", "qwen2", *sizes, **more)


def _qwen3(*sizes: int, **more: Any) -> Model:
    return _dense("Qwen3ForCausalLM", "qwen3", *sizes, head_dim=128, **{"max_position_embeddings": 40960} | more)


def _qwen3_moe(*sizes: int, **more: Any) -> Model:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
    return _dense("Qwen3MoeForCausalLM", "qwen3_moe", *sizes, **experts | {"max_position_embeddings": 40960} | more)


def _with_vision(architecture: str, kind: str, text: Model, vision: dict[str, Any] | None = None) -> Model:
    config = {"model_type": kind, "text_config": text.config, "vision_config": {**_VISION, **(vision or {})}, **_TOKENS}
    return Model(architecture, config)


_ROPE = {"type": "default", "mrope_section": [16, 24, 24]}
_QWEN3_ROPE = {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True}


def _qwen2_5_vl(*sizes: int) -> Model:
    text = _qwen2(*sizes, model_type="qwen2_5_vl_text", rope_scaling=_ROPE, max_position_embeddings=128000)
    return _with_vision("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", text, {"out_hidden_size": sizes[0]})


def _qwen3_vl(text: Model, moe: str = "") -> Model:
    """Dense, or with "Moe"."""
    kind = f"qwen3_vl{'_moe' if moe else ''}"
    of_text = {"model_type": f"{kind}_text", "rope_scaling": _QWEN3_ROPE, "max_position_embeddings": 262144}
    vision = {"out_hidden_size": text.config["hidden_size"], "deepstack_visual_indexes": [0]}
    text = Model("", text.config | of_text)
    return _with_vision(f"Qwen3VL{moe}ForConditionalGeneration", kind, text, vision)


def _qwen3_5(*sizes: int, **experts: Any) -> Model:
    """Linear attention in three of four layers, heads of 256, and an encoder of images."""
    kind = "qwen3_5_moe" if experts else "qwen3_5"
    more = {"head_dim": 256, "model_type": f"{kind}_text", "max_position_embeddings": 262144}
    text = _dense("", kind, *sizes, **more, **experts)
    return _with_vision(
        f"Qwen3_5{'Moe' if experts else ''}ForConditionalGeneration", kind, text, {"out_hidden_size": sizes[0]}
    )


_EXPERTS = {"num_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 512}
_EXPERTS |= {"shared_expert_intermediate_size": 512}
_MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840}
_MLA |= {"n_routed_experts": 64, "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "n_shared_experts": 2}


def _deepseek_v3(*sizes: int, **more: Any) -> Model:
    return _dense("DeepseekV3ForCausalLM", "deepseek_v3", *sizes, **_MLA | more)


_QWEN2_7B = _qwen2(3584, 28, 4, 28)
_QWEN3_4B_2507 = _qwen3(2560, 32, 8, 36, max_position_embeddings=262144)
_QWEN3_30B = _qwen3_moe(2048, 32, 4, 48)
_QWEN3_30B_2507 = _qwen3_moe(2048, 32, 4, 48, max_position_embeddings=262144)
_QWEN3_5_35B = _qwen3_5(2048, 16, 2, 40, **_EXPERTS)
_MOONLIGHT = _deepseek_v3(2048, 16, 16, 27, max_position_embeddings=8192)
_GLM_4_5_AIR = _dense(
    "Glm4MoeForCausalLM", "glm4_moe", 4096, 96, 8, 46, head_dim=128, n_routed_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=1408, n_shared_experts=1, first_k_dense_replace=1, max_position_embeddings=131072,
)  # fmt: skip
_NEMOTRON_H = Model("NemotronHForCausalLM", {
    "model_type": "nemotron_h", "hidden_size": 3136, "num_attention_heads": 40, "num_key_value_heads": 8,
    "head_dim": 128, "num_hidden_layers": 4, "hybrid_override_pattern": "M-M*", "vocab_size": 131072,
    "max_position_embeddings": 262144,
})  # fmt: skip

MODELS: dict[str, Model] = {
    "ByteDance-Seed/Seed-OSS-36B-Base": _dense(
        "SeedOssForCausalLM", "seed_oss", 5120, 80, 8, 64, head_dim=128, max_position_embeddings=524288
    ),
    "DeepSeek-V4-Flash": Model("DeepseekV4ForCausalLM"),
    "OpenRLHF/Llama-3-8b-sft-mixture": _dense(
        "LlamaForCausalLM", "llama", 4096, 32, 8, 32, vocab_size=128256, max_position_embeddings=8192
    ),
    "PrimeIntellect/INTELLECT-3-Base": _GLM_4_5_AIR,
    "PrimeIntellect/MiniMax-M2.5-bf16": Model("MiniMaxM2ForCausalLM"),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": _dense(
        "Qwen2MoeForCausalLM", "qwen2_moe", 2048, 16, 16, 24, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, max_position_embeddings=8192,
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": _qwen2(896, 14, 2, 24),
    "Qwen/Qwen2.5-1.5B-Instruct": _qwen2(1536, 12, 2, 28),
    "Qwen/Qwen2.5-32B": _qwen2(5120, 40, 8, 64, max_position_embeddings=131072),
    "Qwen/Qwen2.5-3B-Instruct": _qwen2(2048, 16, 2, 36),
    "Qwen/Qwen2.5-72B-Instruct": _qwen2(8192, 64, 8, 80),
    "Qwen/Qwen2.5-7B": _qwen2(3584, 28, 4, 28, max_position_embeddings=131072),
    "Qwen/Qwen2.5-Math-7B": _qwen2(3584, 28, 4, 28, max_position_embeddings=4096),
    "Qwen/Qwen2.5-VL-3B-Instruct": _qwen2_5_vl(2048, 16, 2, 36),
    "Qwen/Qwen2.5-VL-7B-Instruct": _qwen2_5_vl(3584, 28, 4, 28),
    "Qwen/Qwen3-0.6B": _qwen3(1024, 16, 8, 28),
    "Qwen/Qwen3-1.7B": _qwen3(2048, 16, 8, 28),
    "Qwen/Qwen3-235B-A22B": _qwen3_moe(4096, 64, 4, 94, moe_intermediate_size=1536),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": _qwen3_moe(
        4096, 64, 4, 94, moe_intermediate_size=1536, max_position_embeddings=262144
    ),
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _QWEN3_30B_2507,
    "Qwen/Qwen3-4B": _qwen3(2560, 32, 8, 36),
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B_2507,
    "Qwen/Qwen3-8B": _qwen3(4096, 32, 8, 36),
    "Qwen/Qwen3-VL-8B-Instruct": _qwen3_vl(_qwen3(4096, 32, 8, 36)),
    "Qwen3-VL-30B-A3B-Instruct": _qwen3_vl(_QWEN3_30B, "Moe"),
    "Qwen3-VL-235B-A22B-Instruct": _qwen3_vl(_qwen3_moe(4096, 64, 4, 94, moe_intermediate_size=1536), "Moe"),
    "Qwen/Qwen3.5-0.8B": _qwen3_5(1024, 8, 2, 24),
    "Qwen/Qwen3.5-2B": _qwen3_5(2048, 8, 2, 24),
    "Qwen/Qwen3.5-4B": _qwen3_5(2560, 16, 4, 32),
    "Qwen/Qwen3.5-9B": _qwen3_5(4096, 16, 4, 32),
    "Qwen/Qwen3.5-27B": _qwen3_5(5120, 24, 4, 64),
    "Qwen/Qwen3.5-35B-A3B": _QWEN3_5_35B,
    "Qwen/Qwen3.5-122B-A10B": _qwen3_5(3072, 32, 2, 48, **_EXPERTS),
    "Qwen/Qwen3.5-397B-A17B": _qwen3_5(4096, 32, 2, 60, **_EXPERTS),
    "Qwen3-Next-80B-A3B-Instruct": _dense(
        "Qwen3NextForCausalLM", "qwen3_next", 2048, 16, 2, 48, head_dim=256, num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, max_position_embeddings=262144,
    ),
    "XiaomiMiMo/MiMo-7B-RL": _dense(
        "MiMoForCausalLM", "qwen2", 4096, 32, 8, 36, head_dim=128, num_nextn_predict_layers=1
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": _qwen2(1536, 12, 2, 28, max_position_embeddings=131072),
    "deepseek-ai/DeepSeek-V3": _deepseek_v3(
        7168, 128, 128, 61, q_lora_rank=1536, n_routed_experts=256, max_position_embeddings=163840
    ),
    "deepseek-ai/deepseek-llm-7b-chat": _dense(
        "LlamaForCausalLM", "llama", 4096, 32, 32, 30, vocab_size=102400, max_position_embeddings=4096
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": _dense(
        "MistralForCausalLM", "mistral", 5120, 32, 8, 40, head_dim=128, vocab_size=131072,
        max_position_embeddings=131072,
    ),
    "moonshotai/Moonlight-16B-A3B": _MOONLIGHT,
    "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16": _NEMOTRON_H,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _NEMOTRON_H,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": _NEMOTRON_H,
    "nvidia/Nemotron-Mini-4B-Instruct": _dense(
        "NemotronForCausalLM", "nemotron", 3072, 24, 8, 32, head_dim=128, vocab_size=256000,
        max_position_embeddings=4096,
    ),
    "openbmb/MiniCPM-o-2_6": Model("MiniCPMO"),
    "tencent/Hy3": Model("HYV3ForCausalLM"),
    "unsloth/gpt-oss-20b-BF16": _dense(
        "GptOssForCausalLM", "gpt_oss", 2880, 64, 8, 24, head_dim=64, vocab_size=201088, num_local_experts=32,
        num_experts_per_tok=4, intermediate_size=2880, max_position_embeddings=131072, sliding_window=128,
    ),
    "zai-org/GLM-4.1V-9B-Thinking": Model("Glm4vForConditionalGeneration", {
        "model_type": "glm4v",
        "text_config": _dense("", "glm4v_text", 4096, 32, 2, 40, max_position_embeddings=65536).config,
        "vision_config": {"depth": 1, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 4096},
    }),
    "zai-org/GLM-4.5-Air": _GLM_4_5_AIR,
    "zai-org/GLM-4.7-Flash": _dense(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", 2048, 20, 20, 47, **_MLA | {"q_lora_rank": 768},
        max_position_embeddings=202752,
    ),
}  # fmt: skip
"""By the name that scripts give."""

SAME_AS = {
    "PrimeIntellect/Qwen3-0.6B": ("Qwen/Qwen3-0.6B", "its name"),
    "PrimeIntellect/Qwen3-0.6B-Reverse-Text-SFT": ("Qwen/Qwen3-0.6B", "its name: fine-tuned"),
    "PrimeIntellect/Qwen3-1.7B-Wordle-SFT": ("Qwen/Qwen3-1.7B", "its name: fine-tuned"),
    "Qwen/Qwen2.5-32B-Instruct": ("Qwen/Qwen2.5-32B", "its name"),
    "Qwen/Qwen2.5-7B-Instruct": ("Qwen/Qwen2.5-7B", "its name"),
    "Qwen/Qwen2.5-Coder-32B-Instruct": ("Qwen/Qwen2.5-32B", "its name"),
    "Qwen/Qwen2.5-Coder-7B-Instruct": ("Qwen/Qwen2.5-7B", "its name"),
    "Qwen/Qwen3-1.7B-Base": ("Qwen/Qwen3-1.7B", "its name"),
    "Qwen/Qwen3-30B-A3B-Base": ("Qwen/Qwen3-30B-A3B", "its name"),
    "Qwen/Qwen3-30B-A3B-Thinking-2507": ("Qwen/Qwen3-30B-A3B-Instruct-2507", "its name"),
    "Qwen/Qwen3-4B-Base": ("Qwen/Qwen3-4B", "its name"),
    "Qwen/Qwen3-4B-Thinking-2507": ("Qwen/Qwen3-4B-Instruct-2507", "its name"),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": ("Qwen/Qwen3-30B-A3B-Instruct-2507", "its name"),
    "Qwen/Qwen3.5-35B-A3B-Base": ("Qwen/Qwen3.5-35B-A3B", "its name"),
    "Qwen/Qwen3.6-27B": ("Qwen/Qwen3.5-27B", "the same architecture"),
    "Qwen/Qwen3.6-35B-A3B": ("Qwen/Qwen3.5-35B-A3B", "the same architecture"),
    "Qwen3.5-2B": ("Qwen/Qwen3.5-2B", "the folder's name"),
    "Qwen3.5-27B": ("Qwen/Qwen3.5-27B", "the folder's name"),
    "Qwen3.5-35B-A3B": ("Qwen/Qwen3.5-35B-A3B", "the folder's name"),
    "moonlight16b": ("moonshotai/Moonlight-16B-A3B", "the script's name"),
    "moonshotai/Moonlight-16B-A3B-Instruct": ("moonshotai/Moonlight-16B-A3B", "its name"),
    "qwen2.5-math": ("Qwen/Qwen2.5-Math-7B", "the script's name"),
}
"""Models whose architecture is another's: its name, and what says so."""


def model_of(name: str) -> Model | None:
    """The kind of a model; None if it is unknown."""
    return MODELS.get(SAME_AS.get(name, (name, ""))[0])

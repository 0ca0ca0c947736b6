"""The models of the examples: their architecture, and what the start-up check asks of their configuration.

Architectures are names of vLLM's registry. Sizes are those of the published ``config.json``, as far as the check asks
for them: heads, layers, experts, kinds of attention. They were written down from knowledge of the models, not fetched;
``source`` says more where the name is not the model's own. A model that is not here is unknown, and nothing is guessed.
"""

from .kinds import (
    EXPERTS,
    MAMBA,
    MLA,
    Model,
    deepseek_v3,
    dense,
    nemotron_h,
    qwen2,
    qwen2_5_vl,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_vl,
)

_QWEN2_7B = qwen2(3584, 28, 4, 28)
_QWEN3_4B_2507 = qwen3(2560, 32, 8, 36, max_position_embeddings=262144)
_QWEN3_30B = qwen3_moe(2048, 32, 4, 48)
_QWEN3_30B_2507 = qwen3_moe(2048, 32, 4, 48, max_position_embeddings=262144)
_QWEN3_5_35B = qwen3_5(2048, 16, 2, 40, **EXPERTS)
_MOONLIGHT = deepseek_v3(2048, 16, 16, 27, max_position_embeddings=8192)
_GLM_4_5_AIR = dense(
    "Glm4MoeForCausalLM", "glm4_moe", 4096, 96, 8, 46, head_dim=128, n_routed_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=1408, n_shared_experts=1, first_k_dense_replace=1, max_position_embeddings=131072,
)  # fmt: skip
_MTP_OF_NEMOTRON = {"num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E"}
_NANO_30B = nemotron_h(
    "MEM*", 2688, 32, 2, n_routed_experts=128, num_experts_per_tok=6, moe_intermediate_size=1856, n_shared_experts=1,
    moe_shared_expert_intermediate_size=3712, **MAMBA,
)  # fmt: skip
_SUPER = nemotron_h(
    "MEM*", 4096, 32, 2, n_routed_experts=512, num_experts_per_tok=22, moe_intermediate_size=2688, n_shared_experts=1,
    moe_shared_expert_intermediate_size=5376, moe_latent_size=1024,
    **MAMBA | {"mamba_num_heads": 128}, **_MTP_OF_NEMOTRON,
)  # fmt: skip
_NANO_4B = nemotron_h("M-M*", 3136, 40, 8, **MAMBA | {"mamba_num_heads": 96, "mamba_head_dim": 80})

MODELS: dict[str, Model] = {
    "ByteDance-Seed/Seed-OSS-36B-Base": dense(
        "SeedOssForCausalLM", "seed_oss", 5120, 80, 8, 64, head_dim=128, max_position_embeddings=524288
    ),
    "DeepSeek-V4-Flash": Model("DeepseekV4ForCausalLM"),
    "OpenRLHF/Llama-3-8b-sft-mixture": dense(
        "LlamaForCausalLM", "llama", 4096, 32, 8, 32, vocab_size=128256, max_position_embeddings=8192
    ),
    "PrimeIntellect/INTELLECT-3-Base": _GLM_4_5_AIR,
    "PrimeIntellect/MiniMax-M2.5-bf16": Model("MiniMaxM2ForCausalLM"),
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": dense(
        "Qwen2MoeForCausalLM", "qwen2_moe", 2048, 16, 16, 24, num_experts=60, num_experts_per_tok=4,
        moe_intermediate_size=1408, shared_expert_intermediate_size=5632, max_position_embeddings=8192,
    ),
    "Qwen/Qwen2.5-0.5B-Instruct": qwen2(896, 14, 2, 24),
    "Qwen/Qwen2.5-1.5B-Instruct": qwen2(1536, 12, 2, 28),
    "Qwen/Qwen2.5-32B": qwen2(5120, 40, 8, 64, max_position_embeddings=131072),
    "Qwen/Qwen2.5-3B-Instruct": qwen2(2048, 16, 2, 36),
    "Qwen/Qwen2.5-72B-Instruct": qwen2(8192, 64, 8, 80),
    "Qwen/Qwen2.5-7B": qwen2(3584, 28, 4, 28, max_position_embeddings=131072),
    "Qwen/Qwen2.5-Math-7B": qwen2(3584, 28, 4, 28, max_position_embeddings=4096),
    "Qwen/Qwen2.5-VL-3B-Instruct": qwen2_5_vl(2048, 16, 2, 36),
    "Qwen/Qwen2.5-VL-7B-Instruct": qwen2_5_vl(3584, 28, 4, 28),
    "Qwen/Qwen3-0.6B": qwen3(1024, 16, 8, 28),
    "Qwen/Qwen3-1.7B": qwen3(2048, 16, 8, 28),
    "Qwen/Qwen3-235B-A22B": qwen3_moe(4096, 64, 4, 94, moe_intermediate_size=1536),
    "Qwen/Qwen3-235B-A22B-Instruct-2507": qwen3_moe(
        4096, 64, 4, 94, moe_intermediate_size=1536, max_position_embeddings=262144
    ),
    "Qwen/Qwen3-30B-A3B": _QWEN3_30B,
    "Qwen/Qwen3-30B-A3B-Instruct-2507": _QWEN3_30B_2507,
    "Qwen/Qwen3-4B": qwen3(2560, 32, 8, 36),
    "Qwen/Qwen3-4B-Instruct-2507": _QWEN3_4B_2507,
    "Qwen/Qwen3-8B": qwen3(4096, 32, 8, 36),
    "Qwen/Qwen3-VL-8B-Instruct": qwen3_vl(qwen3(4096, 32, 8, 36)),
    "Qwen3-VL-30B-A3B-Instruct": qwen3_vl(_QWEN3_30B, "Moe"),
    "Qwen3-VL-235B-A22B-Instruct": qwen3_vl(qwen3_moe(4096, 64, 4, 94, moe_intermediate_size=1536), "Moe"),
    "Qwen/Qwen3.5-0.8B": qwen3_5(1024, 8, 2, 24),
    "Qwen/Qwen3.5-2B": qwen3_5(2048, 8, 2, 24),
    "Qwen/Qwen3.5-4B": qwen3_5(2560, 16, 4, 32),
    "Qwen/Qwen3.5-9B": qwen3_5(4096, 16, 4, 32),
    "Qwen/Qwen3.5-27B": qwen3_5(5120, 24, 4, 64),
    "Qwen/Qwen3.5-35B-A3B": _QWEN3_5_35B,
    "Qwen/Qwen3.5-122B-A10B": qwen3_5(3072, 32, 2, 48, **EXPERTS),
    "Qwen/Qwen3.5-397B-A17B": qwen3_5(4096, 32, 2, 60, **EXPERTS),
    "Qwen3-Next-80B-A3B-Instruct": dense(
        "Qwen3NextForCausalLM", "qwen3_next", 2048, 16, 2, 48, head_dim=256, num_experts=512, num_experts_per_tok=10,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, max_position_embeddings=262144,
    ),
    "XiaomiMiMo/MiMo-7B-RL": dense(
        "MiMoForCausalLM", "qwen2", 4096, 32, 8, 36, head_dim=128, num_nextn_predict_layers=1
    ),
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B": qwen2(1536, 12, 2, 28, max_position_embeddings=131072),
    "deepseek-ai/DeepSeek-V3": deepseek_v3(
        7168, 128, 128, 61, q_lora_rank=1536, n_routed_experts=256, max_position_embeddings=163840
    ),
    "deepseek-ai/deepseek-llm-7b-chat": dense(
        "LlamaForCausalLM", "llama", 4096, 32, 32, 30, vocab_size=102400, max_position_embeddings=4096
    ),
    "mistralai/Mistral-Nemo-Instruct-2407": dense(
        "MistralForCausalLM", "mistral", 5120, 32, 8, 40, head_dim=128, vocab_size=131072,
        max_position_embeddings=131072,
    ),
    "moonshotai/Moonlight-16B-A3B": _MOONLIGHT,
    "nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16": _NANO_4B,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": _NANO_30B,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": _SUPER,
    "nvidia/Nemotron-Mini-4B-Instruct": dense(
        "NemotronForCausalLM", "nemotron", 3072, 24, 8, 32, head_dim=128, vocab_size=256000,
        max_position_embeddings=4096,
    ),
    "openbmb/MiniCPM-o-2_6": Model("MiniCPMO"),
    "tencent/Hy3": Model("HYV3ForCausalLM"),
    "unsloth/gpt-oss-20b-BF16": dense(
        "GptOssForCausalLM", "gpt_oss", 2880, 64, 8, 24, head_dim=64, vocab_size=201088, num_local_experts=32,
        num_experts_per_tok=4, intermediate_size=2880, max_position_embeddings=131072, sliding_window=128,
    ),
    "zai-org/GLM-4.1V-9B-Thinking": Model("Glm4vForConditionalGeneration", {
        "model_type": "glm4v",
        "text_config": dense("", "glm4v_text", 4096, 32, 2, 40, max_position_embeddings=65536).config,
        "vision_config": {"depth": 1, "hidden_size": 64, "num_heads": 2, "out_hidden_size": 4096},
    }),
    "zai-org/GLM-4.5-Air": _GLM_4_5_AIR,
    "zai-org/GLM-4.7-Flash": dense(
        "Glm4MoeLiteForCausalLM", "glm4_moe_lite", 2048, 20, 20, 47, **MLA | {"q_lora_rank": 768},
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

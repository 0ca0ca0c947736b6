"""Small models of the families that exact arithmetic defines, as checkpoints."""

from pathlib import Path

import torch
import transformers

from tests.engine.test_models import GQA, SIZES, checkpoint
from tests.hf.models import LLAMA3

FAMILIES = {
    "Llama with scaled angles and tied embeddings": transformers.LlamaConfig(
        **SIZES, **GQA, rope_parameters=LLAMA3, tie_word_embeddings=True
    ),
    "Llama with biases": transformers.LlamaConfig(**SIZES, **GQA, attention_bias=True, mlp_bias=True),
    "Mistral with a window": transformers.MistralConfig(**SIZES, **GQA, sliding_window=48),
    "Qwen2 with biases and a window that it does not use": transformers.Qwen2Config(
        **SIZES, num_key_value_heads=2, sliding_window=48
    ),
    "Qwen3-MoE with a dense layer": transformers.Qwen3MoeConfig(
        **SIZES, **GQA, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=96, mlp_only_layers=[0]
    ),
    "Gemma": transformers.GemmaConfig(**SIZES, **GQA),
    "Gemma 2 with soft caps and a window in the first layer": transformers.Gemma2Config(
        **SIZES,
        **GQA,
        sliding_window=48,
        query_pre_attn_scalar=48,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=3.0,
    ),
    "Gemma 3 with a window and angles of its own in the first layer": transformers.Gemma3TextConfig(
        **SIZES,
        **GQA,
        sliding_window=48,
        query_pre_attn_scalar=48,
        tie_word_embeddings=False,
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
    ),
    "Granite with multipliers": transformers.GraniteConfig(
        **SIZES,
        num_key_value_heads=2,
        embedding_multiplier=12.0,
        residual_multiplier=0.22,
        attention_multiplier=0.0156,
        logits_scaling=0.7,
    ),
    "Phi-3 with a window and stacked weights": transformers.Phi3Config(
        **SIZES, num_key_value_heads=2, sliding_window=48
    ),
}
"""Others than the model of the known answers: Qwen3."""


def save(config: transformers.PreTrainedConfig, folder: Path) -> torch.nn.Module:
    """Write a model with random weights in bf16 into a folder, and return it."""
    made = checkpoint(config, torch.bfloat16)
    for weight in made.parameters():  # biases of Hugging Face's random models are 0, and so are Gemma's norms
        weight.data = torch.where(weight == 0, torch.linspace(-1, 1, weight.numel()).view(weight.shape), weight)
    made.to(torch.bfloat16).save_pretrained(folder)
    return made

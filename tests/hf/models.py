"""Decoders of two layers, and batches for them."""

from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Lfm2Config,
    LlamaConfig,
    NemotronHConfig,
    OlmoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_A_SHARED_GPU = ["--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", "4G"] if DEVICE == "cuda" else []
"""Arguments of an engine: there may be others."""
VOCABULARY = 300
"""No multiple of 64, to which vLLM pads an output embedding."""
LENGTHS = (45, 1, 300, 7)
"""Of sequences: one of them longer than a split of attention's."""


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 96,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
OLMOE: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 96,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "norm_topk_prob": False,
}
DELTA_NETS: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.25},
}
STATE_SPACES: dict[str, Any] = {
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    "mamba_num_heads": 4,
    "mamba_head_dim": 32,
    "ssm_state_size": 64,
    "n_groups": 2,
    "time_step_min": 1e-9,  # the least time step of Hugging Face's layer; vLLM's has none
    "rescale_prenorm_residual": False,
}
SHORT_CONVS: dict[str, Any] = {
    "hidden_size": 384,
    "layer_types": ["conv", "full_attention"],
    "block_auto_adjust_ff_dim": False,
    "block_dim": 384,
    "conv_dim": 384,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "Llama, untied, without biases": (LlamaConfig, {}),
    "Llama with biases and its rotary scaling, tied": (
        LlamaConfig,
        {"attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3, "tie_word_embeddings": True},
    ),
    "Qwen2, tied": (Qwen2Config, {"hidden_size": 384, "tie_word_embeddings": True}),
    "Qwen2, untied": (Qwen2Config, {"hidden_size": 384}),
    "Qwen3, tied": (Qwen3Config, {"tie_word_embeddings": True}),
    "Qwen3-MoE": (Qwen3MoeConfig, EXPERTS),
    "Qwen3-MoE without renormalised weights": (Qwen3MoeConfig, EXPERTS | {"norm_topk_prob": False}),
    "OLMoE": (OlmoeConfig, OLMOE),
    "Qwen3.5": (Qwen3_5TextConfig, DELTA_NETS),
    "Nemotron-H": (NemotronHConfig, STATE_SPACES),
    "LFM2, tied": (Lfm2Config, SHORT_CONVS),
    "LFM2 with biases, tied": (Lfm2Config, SHORT_CONVS | {"conv_bias": True}),
    "Nemotron-H with biases": (NemotronHConfig, STATE_SPACES | {"use_bias": True, "mlp_bias": True}),
}
"""What the trainer has patches for; Qwen2's, OLMoE's and LFM2's heads are their hidden size together."""


def config(of: type[PreTrainedConfig] = Qwen3Config, **changed: Any) -> PreTrainedConfig:
    """Six heads of 64 over a hidden size that is not theirs together."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 192,
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 512,
        "initializer_range": 0.1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
        "tie_word_embeddings": False,
    }
    return of(**shape | changed)


def model(
    dtype: torch.dtype = torch.bfloat16, of: type[PreTrainedConfig] = Qwen3Config, **changed: Any
) -> PreTrainedModel:
    """The same weights at every call with one configuration; those of norms are not all 1, and biases not 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        made = AutoModelForCausalLM.from_config(config(of, **changed))
        for weight in made.parameters():
            if weight.dim() == 1:
                weight.data += 0.1 * torch.randn_like(weight)
    for weight in made.parameters():  # not the frequencies, which stay in fp32 when a model is loaded in another dtype
        weight.data = weight.data.to(dtype)
    return made.to(DEVICE)


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[torch.Tensor]:
    """Random tokens of each length."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (length,), generator=generator).to(DEVICE) for length in lengths]


def padded(parts: list[torch.Tensor], before: tuple[int, ...], columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and mask [rows, columns], each sequence behind so many columns of padding, which holds token 5."""
    tokens = torch.full((len(parts), columns), 5, device=DEVICE)
    mask = torch.zeros_like(tokens)
    for row, (part, start) in enumerate(zip(parts, before, strict=True)):
        tokens[row, start : start + len(part)] = part
        mask[row, start : start + len(part)] = 1
    return tokens, mask


def ways_to_pad(parts: list[torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """One batch, padded on each side and on both."""
    lengths = [len(part) for part in parts]
    longest = max(lengths)
    return {
        "right": padded(parts, (0,) * len(parts), longest),
        "left": padded(parts, tuple(longest - length for length in lengths), longest),
        "both": padded(parts, tuple(range(3, 3 + len(parts))), longest + 20),
    }


def packed(parts: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and position_ids [1, tokens] of all sequences in one row."""
    positions = [torch.arange(len(part), device=DEVICE) for part in parts]
    return torch.cat(parts)[None], torch.cat(positions)[None]

"""Small models of Gemma 4 of random weights, one as each that is published: with keys that are the values, with layers
that read the KV cache of others and have inputs of their own, and with experts.
"""

from pathlib import Path

import torch
import transformers

_SHARED = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "sliding_window": 48,
    "max_position_embeddings": 1024,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LIKE_31B = _SHARED | {
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}
CONFIGS = {
    "31B": _LIKE_31B,
    "E2B": _SHARED
    | {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": 512,
    },
    "26B-A4B": _LIKE_31B
    | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 128},
}
"""By the published model that each is a small one of."""


def written(name: str, folder: Path) -> Path:
    """A checkpoint in bf16. Embeddings, which are the matrix of logits as well, are small, so that a token does not
    foretell itself, and the last norm makes up for that; scores are those of heads that see many keys.
    """
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**CONFIGS[name]))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.02 if "embed_tokens." in weight_name else 0.08, generator=generator)
            elif weight_name.endswith("q_norm.weight"):
                weight.uniform_(0.05, 0.15, generator=generator)
            else:
                weight.uniform_(0.5, 1.5, generator=generator)
        for layer in model.model.layers:
            layer.layer_scalar.uniform_(0.5, 1.5, generator=generator)
        model.model.norm.weight.mul_(8.0)
    model.bfloat16().save_pretrained(folder)
    return folder

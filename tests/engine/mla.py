"""Small models with latent attention of random weights: as DeepSeek-V2-Lite, as DeepSeek-V3, as Moonlight and as
GLM-4.7-Flash, with experts in each.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine import kept_states
from vllm_batch_invariant.ops.attention import AttentionReduction, PagedAttention
from vllm_batch_invariant.verify.harness.worker import Engine

_SHARED = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "moe_intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 48,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_SIGMOID = {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "norm_topk_prob": True}
CONFIGS = {
    "V2-Lite": ("DeepseekV2", _SHARED | {"rope_parameters": _YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}}),
    "V3": (
        "DeepseekV3",
        _SHARED
        | _SIGMOID
        | {"q_lora_rank": 96, "kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_group": 4, "topk_group": 2}
        | {"routed_scaling_factor": 2.5, "rope_parameters": _YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "Moonlight": ("DeepseekV3", _SHARED | _SIGMOID | {"routed_scaling_factor": 2.446}),
    "GLM-4.7-Flash": (
        "Glm4MoeLite",
        _SHARED
        | _SIGMOID
        | {"q_lora_rank": 96, "num_attention_heads": 5, "num_key_value_heads": 5, "v_head_dim": 64}
        | {"routed_scaling_factor": 1.8, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
}
"""By the published model that each is a small one of: how Transformers calls it, and its configuration. V3's cache has
vectors as large as published ones.
"""
EDGES = [1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129]
"""Lengths of prompts around the ends of pages and of steps."""
FAULTS = ("splits by the number of requests", "another product for many rows")


def config_of(name: str, **changes: Any) -> transformers.PretrainedConfig:
    kind, fields = CONFIGS[name]
    return getattr(transformers, f"{kind}Config")(architectures=[f"{kind}ForCausalLM"], **fields | changes)


def written(name: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint in bf16, with changes to its configuration."""
    model = getattr(transformers, f"{CONFIGS[name][0]}ForCausalLM")(config_of(name, **changes))
    draw(model, seed)
    model.bfloat16().save_pretrained(folder)
    return folder


def written_around(folder: Path) -> Path:
    """A checkpoint of Kimi-VL as it is published, without what encodes images, around the text model like Moonlight."""
    tower = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 64}
    return write_around(written("Moonlight", folder / "text"), folder, tower, {}, 500)


def write_around(
    text: Path, folder: Path, tower: dict[str, Any], encoder: dict[str, torch.Tensor], image_token: int
) -> Path:
    """A checkpoint of Kimi-VL.

    Args:
        text: the checkpoint of its text model.
        folder: where it is written to; there is one.
        tower: the configuration of its encoder.
        encoder: weights of that.
        image_token: stands for a row of an image.
    """
    weights, of_text = load_file(text / "model.safetensors"), json.loads((text / "config.json").read_text())
    named = {f"language_model.{name}": weight for name, weight in weights.items()}
    save_file(named | encoder, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["KimiVLForConditionalGeneration"],
        "model_type": "kimi_vl",
        "text_config": of_text,
        "vision_config": tower | {"model_type": "moonvit", "patch_size": 14, "merge_kernel_size": [2, 2]},
        "media_placeholder_token_id": image_token,
        "torch_dtype": of_text["dtype"],
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def draw(model: torch.nn.Module, seed: int) -> None:
    """Weights, and what is added to scores of experts."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.08, generator=generator)
            else:
                weight.uniform_(0.5, 1.5, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.uniform_(-0.2, 0.2, generator=generator)


def ask(engine: Engine, faults: tuple[str, ...] = ()) -> dict[str, Any]:
    """Answers of the targets in every company, and what shows that they were in it."""
    company = kept_states.others(length=118)
    return kept_states.everywhere_and_with_faults(engine, company, EDGES, f"{__name__}:plant", faults)


def plant(llm: Any, fault: str) -> None:
    """Have a model compute something else, or what it did before."""
    llm.reset_prefix_cache()
    llm.apply_model(partial(_replace, **_FAULTS[fault]))


def _replace(model: torch.nn.Module, method: str, fault: Callable[..., Any]) -> None:
    """A method of every layer's, or its own again."""
    for layer in model.modules():
        if type(layer).__name__ == "MLAAttention" and vars(layer.impl).pop(method, None) is None:
            setattr(layer.impl, method, partial(fault, getattr(layer.impl, method)))


def _call_by_requests(made: Callable[..., PagedAttention], *given: Any) -> PagedAttention:
    call = made(*given)
    return replace(call, reduction=AttentionReduction(16, key_tile=32)) if len(call.seq_lens) > 1 else call


def _absorb_many_otherwise(absorbed: Callable[..., torch.Tensor], query: torch.Tensor, *given: Any) -> torch.Tensor:
    """In two halves, each rounded, which is what a kernel that splits K does."""
    if len(query) <= 40:
        return absorbed(query, *given)
    odd = (torch.arange(query.shape[-1], device=query.device) % 2).bool()
    return absorbed(query.masked_fill(odd, 0), *given) + absorbed(query.masked_fill(~odd, 0), *given)


_FAULTS = dict(
    zip(
        FAULTS,
        (
            {"method": "_call", "fault": _call_by_requests},
            {"method": "absorbed", "fault": _absorb_many_otherwise},
        ),
        strict=True,
    )
)

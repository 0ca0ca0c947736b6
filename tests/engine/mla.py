"""Small models with latent attention of random weights: as DeepSeek-V2-Lite, as DeepSeek-V3, as Moonlight and as
GLM-4.7-Flash, with experts in each.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests import quantised_checkpoints
from tests.engine import kept_states, quantised_layers
from tests.fp8_checkpoints import Form
from tests.quantised_checkpoints import Integers, Stored, gptq
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
WIDE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 512,
    "moe_intermediate_size": 256,
    "n_shared_experts": 2,
}
"""Changes that give each of two workers whole groups and blocks of 128."""
BLOCKS, ROWS, INTEGERS = "fp8 by blocks", "compressed-tensors by rows", "w4a16 of 128"
FORMS: dict[str, Form | Stored] = {
    name: quantised_layers.FORMS[name]
    for name in (BLOCKS, "compressed-tensors by blocks", ROWS, INTEGERS, "awq", "gptq")
}
FORMS |= {
    **{name: quantised_checkpoints.FORMATS[name] for name in ("w8a16 of 64", *quantised_layers.NVFP4)},
    "gptq of eight bits by rows": Stored(
        gptq, Integers(8, None, False), quantised_layers.GPTQ | {"bits": 8, "group_size": -1}
    ),
}
"""How linear layers and experts are stored that are served, by a name."""
PUBLISHED = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
"""``quantization_config`` of DeepSeek-V3."""
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


def written_wide(name: str, folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A checkpoint in bf16 to quantise."""
    rank = CONFIGS[name][1]["q_lora_rank"]
    return written(name, folder, seed, **WIDE | ({} if rank is None else {"q_lora_rank": 128}) | changes)


def as_published(folder: Path) -> None:
    """Have a checkpoint in FP8 by blocks say what that of DeepSeek-V3 does, which names no layer."""
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = PUBLISHED
    (folder / "config.json").write_text(json.dumps(config))


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


def company() -> list[dict[str, Any]]:
    """Requests beside the targets."""
    return kept_states.others(length=118)


def ask(engine: Engine, faults: tuple[str, ...] = ()) -> dict[str, Any]:
    """Answers of the targets in every company, and what shows that they were in it."""
    return kept_states.everywhere_and_with_faults(engine, company(), EDGES, f"{__name__}:plant", faults)


def absorbed(llm: Any) -> dict[str, str]:
    """Digests of the matrices that latent attention multiplies with parts of, by their names in a checkpoint."""
    [found] = llm.apply_model(lambda model: _digests(model.named_parameters()))
    return found


def absorbed_of(folder: Path) -> dict[str, str]:
    """The same of a checkpoint."""
    return _digests(load_file(folder / "model.safetensors").items())


def _digests(weights: Iterable[tuple[str, torch.Tensor]]) -> dict[str, str]:
    return {
        name: sha256(weight.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, weight in weights
        if name.endswith(".kv_b_proj.weight")
    }


def code_inputs(model: torch.nn.Module) -> None:
    """Have linear layers, of a model without experts, given what e4m3 has of their input by groups of 128; but
    kv_b_proj, and the output head.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear) and not name.endswith(("kv_b_proj", "lm_head")):
            layer.register_forward_pre_hook(lambda _, given: (_coded(given[0]),))


def _coded(x: torch.Tensor) -> torch.Tensor:
    """What e4m3 has of groups of 128, with scales in fp32."""
    groups = x.float().unflatten(-1, (-1, 128))
    scales = groups.abs().amax(-1, keepdim=True) / 448
    codes = (groups / torch.where(scales == 0, 1, scales)).to(torch.float8_e4m3fn)
    return (codes.double() * scales.double()).flatten(-2)


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

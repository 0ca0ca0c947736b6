"""Small models of Llama 4 of random weights: layers that see a token's own chunk, with angles and norms of heads, one
that sees all, with neither and a temperature that follows the position, and experts, of which a token has one.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.engine import kept_states
from vllm_batch_invariant.ops.attention import AttentionReduction, PagedCache, attend
from vllm_batch_invariant.verify.harness.worker import Engine
from vllm_batch_invariant.verify.receipt import engine_info

CHUNK = 64
CONFIG = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 128,
    "intermediate_size_mlp": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "num_local_experts": 8,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": CHUNK,
    "no_rope_layers": [1, 1, 1, 0],
    "attn_temperature_tuning": True,
    "floor_scale": 16,
    "attn_scale": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
EDGES = [1, 2, 31, *(border + off for border in (CHUNK, 2 * CHUNK, 3 * CHUNK) for off in (-1, 0, 1))]
"""Lengths of prompts around the ends of chunks and of pages."""
FAULTS = ("splits of chunks by their number", "experts see what is not weighted")


def written(folder: Path, seed: int = 0) -> Path:
    """A checkpoint in bf16. vLLM reads from the settings of generation whether there is a temperature."""
    config = transformers.Llama4TextConfig(architectures=["Llama4ForCausalLM"], **CONFIG)
    model = transformers.Llama4ForCausalLM(config)
    draw(model, seed)
    model.bfloat16().save_pretrained(folder)
    _write_settings(folder)
    return folder


def written_around(folder: Path) -> Path:
    """A checkpoint of the model as it is published, with what encodes images, and the weights of the text model."""
    vision = {"hidden_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 512}
    vision |= {"image_size": 56, "patch_size": 14, "vision_output_dim": 128, "projector_input_dim": 128}
    config = transformers.Llama4Config(
        architectures=["Llama4ForConditionalGeneration"],
        text_config=CONFIG,
        vision_config=vision | {"projector_output_dim": 128},
        image_token_index=501,
        boi_token_index=502,
        eoi_token_index=503,
    )
    model = transformers.Llama4ForConditionalGeneration(config).bfloat16()
    text = transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**CONFIG))
    draw(text, 0)
    model.language_model.load_state_dict(text.bfloat16().state_dict())
    model.save_pretrained(folder)
    _write_settings(folder)
    return folder


def _write_settings(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"attn_temperature_tuning": True, "eos_token_id": 2}))


def leave_temperatures_to_vllm(folder: Path) -> Path:
    """Change a checkpoint so that vLLM decides by the longest request whether late tokens have a temperature."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 1 << 16}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
    return folder


def told(llm: Any) -> dict[str, str]:
    """What an engine tells of its settings."""
    return engine_info(llm).environment.engine


def draw(model: torch.nn.Module, seed: int) -> None:
    """Weights of a text model."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.08, generator=generator)
            else:
                weight.uniform_(0.5, 1.5, generator=generator)


def ask(engine: Engine, faults: tuple[str, ...] = ()) -> dict[str, Any]:
    """Answers of the targets in every company, and what shows that they were in it."""
    company = kept_states.others(length=30)
    return kept_states.everywhere_and_with_faults(engine, company, EDGES, f"{__name__}:plant", faults)


def plant(llm: Any, fault: str) -> None:
    """Have a model compute something else, or what it did before."""
    llm.reset_prefix_cache()
    llm.apply_model(_FAULTS[fault])


def _split_by_requests(model: torch.nn.Module) -> None:
    """Splits of layers that see chunks follow the number of these."""
    for layer in model.modules():
        if type(layer).__name__ != "ChunkedLocalAttention":
            continue
        if vars(layer.impl).pop("_attend", None) is None:
            layer.impl._attend = partial(_attend_by_requests, layer.impl._attend)


def _attend_by_requests(
    attend_in_step: Callable[..., None],
    layer: Any,
    query: torch.Tensor,
    cache: PagedCache,
    batch: Any,
    out: torch.Tensor,
) -> None:
    """A step's plan has its reduction, so that a call with another has a plan of its own."""
    call = layer.impl._call(query, cache, batch)
    if len(call.seq_lens) <= 3:
        attend_in_step(layer, query, cache, batch, out)
        return
    call, plan = replace(call, reduction=AttentionReduction(16, key_tile=32)), None
    if kept_states.ON_GPU:  # else there is no Triton
        plan = import_module("vllm_batch_invariant.ops.attention.cuda").plan_alone(call)
    attend(call, layer.impl.implementation, out, plan)


def _leave_input_alone(model: torch.nn.Module) -> None:
    for layer in model.modules():
        if type(layer).__name__ == "RoutedExperts":
            layer.apply_router_weight_on_input = not layer.apply_router_weight_on_input


_FAULTS = dict(zip(FAULTS, (_split_by_requests, _leave_input_alone), strict=True))

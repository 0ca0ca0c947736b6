"""Small models of Gemma 4 of random weights, one as each that is published: with keys that are the values, with layers
that read the KV cache of others and have inputs of their own, and with experts.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine import kept_states
from tests.engine.fp8_caches import SCHEME
from vllm_batch_invariant.verify.harness.worker import Engine

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


AROUND = {"31B": ("31B", "Gemma4"), "E2B": ("E2B", "Gemma4"), "12B": ("31B", "Gemma4Unified")}
"""By the published model, the text model of a small one as it is published, and how Transformers calls what is around.
"""
_TOKENS = {
    name: 500 + number
    for number, name in enumerate(f"{kind}_token_id" for kind in ("image", "video", "audio", "boi", "eoi"))
}
_SEES_IMAGES = {"use_bidirectional_attention": "vision"}
_TOWER = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "position_embedding_size": 64,
}
_EMBEDDER = {"mm_embed_dim": 64, "mm_posemb_size": 64}


def text_model(name: str, seed: int = 0) -> torch.nn.Module:
    """A text model in bf16."""
    model = transformers.Gemma4ForCausalLM(transformers.Gemma4TextConfig(**CONFIGS[name]))
    draw_text(model.model, torch.Generator().manual_seed(seed))
    return model.bfloat16()


def draw_text(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Weights of a text model without its head. Embeddings, which are the matrix of logits as well, are small, so that
    a token does not foretell itself, and the last norm makes up for that; scores are those of heads that see many keys.
    """
    with torch.no_grad():
        for weight_name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.02 if "embed_tokens." in weight_name else 0.08, generator=generator)
            elif weight_name.endswith("q_norm.weight"):
                weight.uniform_(0.05, 0.15, generator=generator)
            else:
                weight.uniform_(0.5, 1.5, generator=generator)
        for layer in model.layers:
            layer.layer_scalar.uniform_(0.5, 1.5, generator=generator)
        model.norm.weight.mul_(8.0)


def written(name: str, folder: Path, seed: int = 0) -> Path:
    """Its checkpoint."""
    text_model(name, seed).save_pretrained(folder)
    return folder


CENTROIDS = {"E2B": 32} if torch.cuda.is_available() else {}
"""Groups of tokens of what is published to draft, of which a step computes the logits of a few, in a CUDA graph."""


def written_drafter(name: str, folder: Path, **of_tokens: int) -> Path:
    """A checkpoint of what is published to draft for a model: layers with queries alone, which read its KV caches.

    Args:
        name: of the model.
        folder: a new one.
        of_tokens: other sizes of the target.
    """
    centroids, of_target = CENTROIDS.get(name, 0), CONFIGS["31B" if name == "12B" else name] | of_tokens
    dropped = ("num_kv_shared_layers", "vocab_size_per_layer_input", "use_double_wide_mlp", "enable_moe_block")
    sizes = {size: value for size, value in of_target.items() if size not in dropped}
    kinds = ["sliding_attention", "sliding_attention", "full_attention"]
    sizes |= {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": len(kinds), "layer_types": kinds}
    sizes |= dict.fromkeys(("hidden_size_per_layer_input", "vocab_size_per_layer_input"), 0)
    kind = "Gemma4UnifiedAssistant" if name == "12B" else "Gemma4Assistant"
    config = getattr(transformers, f"{kind}Config")(
        text_config=transformers.Gemma4TextConfig(**sizes).to_dict(),
        backbone_hidden_size=of_target["hidden_size"],
        use_ordered_embeddings=centroids > 0,
        num_centroids=centroids or 16,
        centroid_intermediate_top_k=2,
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    generator = torch.Generator().manual_seed(2)
    draw_text(model.model, generator)
    with torch.no_grad():
        for projection in (model.pre_projection, model.post_projection):
            projection.weight.normal_(0, projection.in_features**-0.5, generator=generator)
        if centroids:
            model.masked_embedding.centroids.weight.normal_(0, 0.1, generator=generator)
            model.masked_embedding.token_ordering.copy_(torch.randperm(of_target["vocab_size"], generator=generator))
    model.bfloat16().save_pretrained(folder)
    return folder


def config_around(name: str) -> transformers.PretrainedConfig:
    """Of a model as it is published, with what encodes images."""
    of_text, kind = AROUND[name]
    text_config = CONFIGS[of_text] | ({} if of_text == "E2B" else _SEES_IMAGES)
    if kind == "Gemma4Unified":
        del text_config["hidden_size_per_layer_input"]
    return getattr(transformers, f"{kind}Config")(
        architectures=[f"{kind}ForConditionalGeneration"],
        text_config=text_config,
        vision_config=_TOWER if kind == "Gemma4" else _EMBEDDER,
        **_TOKENS,
    )


def written_around(name: str, folder: Path) -> Path:
    """A checkpoint of such a model, with the weights of a text model."""
    config = config_around(name)
    model = getattr(transformers, config.architectures[0])(config).bfloat16()
    model.model.language_model.load_state_dict(text_model(AROUND[name][0]).model.state_dict())
    model.save_pretrained(folder)
    return folder


_SEES = {
    "31B": {
        "hidden_size": 144,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 72,
        "standardize": True,
    },
    "E2B": {
        "hidden_size": 128,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "use_clipped_linears": True,
    },
}
"""Of towers for images: with rows that are scaled in the end, and with limits of each layer's inputs and outputs."""
_OF_TOWER = {
    "intermediate_size": 320,
    "num_hidden_layers": 3,
    "position_embedding_size": 256,
    "default_output_length": 70,
}
_HEARS = {
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "output_proj_dims": 96,
    "subsampling_conv_channels": (128, 8),
}
"""Of a tower for sounds: two convolutions, of whose rows each sees eleven before it."""
SIDE = 48
"""Pixels of the side of what a token stands for."""


def seeing(name: str, **tokens: Any) -> transformers.PretrainedConfig:
    """A model that encodes images, whose window is less than the longest of them.

    Args:
        name: of a published model.
        tokens: their numbers.
    """
    of_text, kind = ("26B-A4B", "Gemma4") if name == "26B-A4B" else AROUND[name]
    sizes = {"vocab_size": 4096} | ({"vocab_size_per_layer_input": 4096} if of_text == "E2B" else _SEES_IMAGES)
    text_config = CONFIGS[of_text] | sizes
    vision: dict[str, Any] = _SEES.get(name, _SEES["31B"]) | _OF_TOWER
    if name == "E2B":  # as published
        tokens |= {"audio_config": _HEARS}
    if kind == "Gemma4Unified":
        del text_config["hidden_size_per_layer_input"]
        vision = {"mm_embed_dim": 160, "mm_posemb_size": 128, "output_proj_dims": 160, "num_soft_tokens": 70}
        tokens |= {"audio_config": {}}  # as published: each 640 samples are a row
    return getattr(transformers, f"{kind}Config")(
        architectures=[f"{kind}ForConditionalGeneration"],
        text_config=text_config,
        vision_config=vision,
        **tokens,
    )


def draw(model: torch.nn.Module) -> torch.nn.Module:
    """Weights of a whole model in fp32: rows of images are as large as embeddings of text, and heads see many keys."""
    generator = torch.Generator().manual_seed(0)
    parts = dict(model.model.named_children())
    text = parts.pop("language_model")
    draw_text(text, generator)
    with torch.no_grad():
        for part_name, part in parts.items():
            for name, tensor in [*part.named_parameters(), *part.named_buffers()]:
                if name.endswith(("min", "max")):
                    tensor.fill_(2.0 if name.endswith("max") else -2.0)
                elif name.endswith(("inv_freq", "std_scale", "softcap", "inv_timescales")):
                    continue
                elif name.endswith(("q_norm.weight", "k_norm.weight")):
                    tensor.uniform_(0.2, 0.6, generator=generator)
                elif tensor.dim() == 1:
                    tensor.uniform_(0.5, 1.5, generator=generator)
                else:
                    gain = 0.3 if part_name.startswith("embed_") else 1.0
                    size = 1 if "position" in name or "pos_embedding" in name else tensor[0].numel()
                    tensor.normal_(0, gain * size**-0.5, generator=generator)
        tower = parts.get("vision_tower")
        if tower is not None and tower.config.standardize:
            tower.std_scale.uniform_(0.5, 1.5, generator=generator)
    return model


def with_scales(folder: Path) -> list[list[float]]:
    """Give a quantised checkpoint a KV cache in FP8 with scales, as ModelOpt or LLM Compressor write them; also keys
    that are the values have two. Returns those of each layer, of one that reads another's cache that one's.
    """
    file, config = folder / "model.safetensors", folder / "config.json"
    tensors, said = load_file(file), json.loads(config.read_text())
    by_modelopt = said["quantization_config"]["quant_method"] == "modelopt"
    said["quantization_config"]["kv_cache_scheme"] = (
        {"num_bits": 8, "type": "float", "dynamic": False} if by_modelopt else SCHEME
    )
    config.write_text(json.dumps(said))
    text, first = said.get("text_config", said), ".layers.0.self_attn.q_norm.weight"
    [model] = [name.removesuffix(first) for name in tensors if name.endswith(first) and "tower" not in name]
    layers, written = text["layer_types"], len(text["layer_types"]) - (text.get("num_kv_shared_layers") or 0)
    scales = [[0.03125 * 2**number, 0.5**number] for number in range(written)]
    for number, of_layer in enumerate(scales):
        for part, scale in zip("kv", of_layer, strict=True):
            place = f"{part}_proj.{part}_scale" if by_modelopt else f"{part}_scale"
            shape = () if by_modelopt else (1,)
            tensors[f"{model}.layers.{number}.self_attn.{place}"] = torch.full(shape, scale)
    save_file(tensors, file, metadata={"format": "pt"})
    for kind in layers[written:]:
        scales.append(scales[written - 1 - layers[:written][::-1].index(kind)])
    return scales


WINDOW = _SHARED["sliding_window"]
EDGES = [1, 2, 16, *(border + off for border in (WINDOW, 2 * WINDOW, 128) for off in (-1, 0, 1))]
"""Lengths of prompts around the ends of windows and of pages."""
FAULTS = ("a window is a key longer", "a layer reads the cache of another", "experts are not scaled")


def ask(engine: Engine, faults: tuple[str, ...] = ()) -> dict[str, Any]:
    """Answers of the targets in every company, and what shows that they were in it."""
    found = kept_states.everywhere(engine, kept_states.others(length=118), "poison_keys")
    found["edges"] = kept_states.at_edges(engine, EDGES)
    for fault in faults:
        found[fault, "did"] = engine.call(f"{__name__}:plant", fault)
        found[fault] = kept_states.seen(engine.step(fault, kept_states.TARGETS, True).requests)
        engine.call(f"{__name__}:plant", fault)
    found["no fault"] = kept_states.alone(engine, "no fault")
    return found


def _attention(model: torch.nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if type(layer).__name__ == "Attention"]


def plant(llm: Any, fault: str) -> bool:
    """Have a model compute something else, or what it did before. Returns whether it can."""
    llm.reset_prefix_cache()
    return llm.apply_model(_FAULTS[fault])[0]


def _widen(model: torch.nn.Module) -> bool:
    layers = [layer.impl for layer in _attention(model) if layer.impl.spec.sliding_window]
    for layer in layers:
        other = WINDOW + 1 if layer.spec.sliding_window == WINDOW else WINDOW
        layer.spec = replace(layer.spec, sliding_window=other)
    return bool(layers)


def _read_another(model: torch.nn.Module) -> bool:
    from vllm_batch_invariant.integration.layers.attention import cache_of, reads_another_cache

    layers = [layer for layer in _attention(model) if reads_another_cache(layer)]
    for layer in layers:
        held = vars(layer).pop("held", None)
        if held is None:
            other = cache_of(layer).flip(0)
            layer.held, layer.kv_cache = layer.kv_cache, [other] if isinstance(layer.kv_cache, list) else other
        else:
            layer.kv_cache = held
    return bool(layers)


def _leave_scales_out(model: torch.nn.Module) -> bool:
    routers = [part for part in model.modules() if type(part).__name__ == "Router"]
    for router in routers:
        router.held, router._scales = router._scales, getattr(router, "held", None)
    return bool(routers)


_FAULTS = dict(zip(FAULTS, (_widen, _read_another, _leave_scales_out), strict=True))

"""Other caches in the place of one in fp8, in the engine's process."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from vllm_batch_invariant.integration.layers.attention import FixedSplitAttention, cache_of, reads_another_cache

SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False, "symmetric": True}
CONFIG = {
    "quant_method": "compressed-tensors",
    "format": "naive-quantized",
    "quantization_status": "compressed",
    "config_groups": {},
    "kv_cache_scheme": SCHEME,
}


def with_scales(folder: Path, k_scale: list[float], v_scale: list[float]) -> str:
    """Make a checkpoint in bf16 one whose KV cache is to be in fp8, with such scales, one or one for each head: those
    of later layers are halved and doubled.
    """
    scheme = SCHEME | {"strategy": "tensor" if len(k_scale) == 1 else "attn_head"}
    quantised = {"quantization_config": CONFIG | {"kv_cache_scheme": scheme}}
    config = json.loads((folder / "config.json").read_text()) | quantised
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    for layer in range(config["num_hidden_layers"]):
        for name, scale, factor in (("k_scale", k_scale, 0.5**layer), ("v_scale", v_scale, 2.0**layer)):
            of_heads = factor * torch.tensor(scale)
            shape = (1,) if len(scale) == 1 else (len(scale), 1, 1)  # as LLM Compressor stores them
            tensors[f"model.layers.{layer}.self_attn.{name}"] = of_heads.reshape(shape)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


def _replace(model: torch.nn.Module, rounds: bool) -> list[tuple[list[float], list[float]]]:
    layers = {
        layer.layer_name: layer
        for layer in model.modules()
        if isinstance(getattr(layer, "impl", None), FixedSplitAttention)
    }
    found = [tuple(scale.tolist() for scale in _scales(layer)) for layer in layers.values()]
    for layer in layers.values():
        impl = layer.impl
        impl.kv_cache_dtype = "auto"
        if reads_another_cache(layer):
            layer.kv_cache = layers[layer.kv_sharing_target_layer_name].kv_cache
            continue
        for name in ("do_kv_cache_update", "slots_of_step"):
            vars(impl).pop(name, None)
        held = cache_of(layer)
        shape = (*held.shape[:3], 2 * impl.head_size)
        layer.kv_cache = torch.zeros(shape, dtype=torch.bfloat16, device=held.device)
        if rounds:
            impl.do_kv_cache_update = partial(_write_rounded, impl.do_kv_cache_update)
            impl.slots_of_step = _none  # else a fused operation would write keys and values as they come
    return found


def _scales(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Those by which a layer reads its keys and values, or has read them before another cache was in their place."""
    impl = layer.impl
    return impl.scales_of(layer) if impl.holds_codes and not impl.scales_tokens else (layer._k_scale, layer._v_scale)


def _none(layer: Any) -> None:
    """No slots: the layer of attention writes."""


def _write_rounded(write: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, *more: torch.Tensor) -> None:
    numbers = []
    for x, scale in ((key, layer._k_scale), (value, layer._v_scale)):
        of_heads = scale.view(-1, 1)
        codes = (x.float() / of_heads).clamp(-448, 448).to(torch.float8_e4m3fn)
        numbers.append((codes.float() * of_heads).to(x.dtype))
    write(layer, *numbers, *more)


def in_numbers(llm: Any, rounds: bool) -> list[list[list[float]]]:
    """From now on every layer has a cache in bf16, of the numbers of the codes that it would have had, times scales
    that are powers of two, or of keys and values as they come. Returns the scales of each layer.
    """
    found = llm.apply_model(partial(_replace, rounds=rounds))[0]
    llm.reset_prefix_cache()
    return found


def scale_by_steps(llm: Any) -> None:
    """From now on keys and values are rounded by one scale for all tokens of a step before they are codes."""
    llm.reset_prefix_cache()
    llm.apply_model(_scale_by_steps)


def _scale_by_steps(model: torch.nn.Module) -> None:
    for layer in model.modules():
        impl = getattr(layer, "impl", None)
        if isinstance(impl, FixedSplitAttention):
            impl.do_kv_cache_update = partial(_write_by_steps, impl.do_kv_cache_update)
            impl.slots_of_step = _none


def _write_by_steps(write: Any, layer: Any, key: torch.Tensor, value: torch.Tensor, *more: torch.Tensor) -> None:
    rounded = []
    for x in (key, value):
        scale = x.abs().amax().float().clamp(min=2.0**-20) / 448
        rounded.append(((x.float() / scale).to(torch.float8_e4m3fn).float() * scale).to(x.dtype))
    write(layer, *rounded, *more)


def by_its_own_scales(llm: Any, planted: bool) -> int:
    """Have layers that read another's cache read its codes by scales of their own, or no longer. Returns their
    number.
    """
    llm.reset_prefix_cache()
    return llm.apply_model(partial(_read_by_its_own, planted=planted))[0]


def _read_by_its_own(model: torch.nn.Module, planted: bool) -> int:
    impls = [layer.impl for layer in model.modules() if getattr(getattr(layer, "impl", None), "writer", None)]
    for impl in impls:
        vars(impl).pop("scales_of", None)
        if planted:
            impl.scales_of = _given
    return len(impls)


def _given(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return layer._k_scale, layer._v_scale


def bytes_of_caches(llm: Any) -> list[list[Any]]:
    """For each layer the dtype of its cache, and how many of its bytes are not 0."""

    def of(model: torch.nn.Module) -> list[list[Any]]:
        caches = [
            cache_of(layer)
            for layer in model.modules()
            if isinstance(getattr(layer, "impl", None), FixedSplitAttention)
        ]
        return [[str(cache.dtype), int(cache.view(torch.uint8).count_nonzero())] for cache in caches]

    return llm.apply_model(of)[0]

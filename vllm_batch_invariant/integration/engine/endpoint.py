"""The engine's provenance: the answer of its worker to a call."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from typing import Any

from ... import envs
from ...provenance import OF_EXPERTS, Environment, environment_here, versions
from ..reviews import encoding, patch_points, schemes

METHOD = "batch_invariant_declaration"
"""For ``collective_rpc`` of an engine whose mode is on."""
PATH = "/v1/batch_invariant"
"""Of the route by which a server tells it: under /v1, so that an API key guards it."""
METRIC = "vllm:batch_invariant_info"
"""A gauge of a server, which is 1."""
NAME = "batch_invariant"
"""Of this plugin, in vLLM's lists of plugins."""
NOT_OF_A_MODEL = ("_name_or_path", "transformers_version")
"""Fields of Hugging Face's configuration that tell where it comes from."""
PLUGINS = "VLLM_PLUGINS"
"""vLLM's list of the plugins that it loads; all of them if it is not set."""


def install(device_of: Callable[[Any], Any]) -> None:
    """Give this process's worker the method.

    Args:
        device_of: gives the record of the device (:mod:`..devices`) that a configuration of vLLM is for.
    """

    def engine_info(worker: Any) -> dict[str, Any]:
        return _engine_info(worker, device_of(worker.vllm_config))

    setattr(patch_points.WORKER.get(), METHOD, engine_info)


def _engine_info(worker: Any, device: Any) -> dict[str, Any]:
    # PyTorch is not there where answers of a server are compared
    from ..layers import delta_rule, experts, fp8, kda, lightning, mamba2, short_conv

    config, model = worker.vllm_config, worker.vllm_config.model_config
    found = versions(patch_points.installed_version())
    if device.ops.attention is None:  # some of its operations are not ours
        return asdict(Environment(mode=True, versions=found))
    of_layers: list[Any] = [fp8, short_conv, *(one.RECURRENCE for one in (delta_rule, mamba2, lightning, kda))]
    if config.lora_config is not None:
        from ..layers import lora

        of_layers.append(lora)
    chosen, loaded = envs.ATTENTION.read(), worker.model_runner.get_model()
    return asdict(
        environment_here(
            device.ops.type,
            versions=found | device.versions(),
            device=device.info(),
            hidden=model.get_hidden_size(),
            vocabulary=model.get_vocab_size(),
            dtype=model.dtype,
            attention=device.backend.get_impl_cls().reduction,
            attention_by=device.ops.attention if chosen == "auto" else chosen,
            engine=settings(config, device) | taken(loaded),
            experts=experts.reductions(loaded) if model.is_moe else (),
            layers={
                name: reduction for of in of_layers for name, reduction in of.reductions(loaded, model.dtype).items()
            },
            exact=device.is_exact,
        )
    )


def of_workers(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What an engine is, of what each of its workers says.

    A field of the device that workers have other values of, such as the number of threads, has all of them; and experts
    may be in other stages of a pipeline than the first.
    """
    first, *others = found
    device = {
        name: value
        if all(other["device"].get(name) == value for other in others)
        else "|".join(str(one["device"].get(name)) for one in found)
        for name, value in first["device"].items()
    }
    of_experts: list[Any] = []
    reductions: dict[str, Any] = {}
    for name, reduction in (pair for one in found for pair in one["reductions"].items()):
        if not name.startswith(OF_EXPERTS):
            reductions.setdefault(name, reduction)
        elif reduction not in of_experts:
            of_experts.append(reduction)
    reductions |= {f"{OF_EXPERTS}{number}": reduction for number, reduction in enumerate(of_experts, 1)}
    return {**first, "device": device, "reductions": reductions}


def taken(loaded: Any) -> dict[str, str]:
    """What a loaded model has taken of the settings of generation or of the longest request, beside its files: Llama 4
    whether late tokens have a temperature, and Gemma 4 tokens that are never drawn.
    """
    tuned = [layer.attn_temperature_tuning for layer in loaded.modules() if hasattr(layer, "attn_temperature_tuning")]
    found = {"attn_temperature_tuning": str(any(tuned))} if tuned else {}
    if suppressed := getattr(loaded, "_suppress_token_ids", None):
        found["suppress_tokens"] = json.dumps(suppressed)
    return found


def model_of(model: Any) -> dict[str, Any]:
    """A model but for its weights, its class and its configuration, of vLLM's ``ModelConfig``."""
    configuration = {name: value for name, value in model.hf_config.to_dict().items() if name not in NOT_OF_A_MODEL}
    return {"class": model.architecture, "configuration": configuration}


def _normalises(model: Any) -> bool:
    """Whether workers normalise the pixels of a model, where vLLM has that for its class."""
    can = getattr(getattr(model, "_model_info", None), "supports_mm_device_do_normalize", False)
    return not can or bool(getattr(model.multimodal_config, "mm_device_do_normalize", True))


def settings(config: Any, device: Any) -> dict[str, str]:
    """Settings of vLLM's that decide bits, from its configuration and the record of its device."""
    model = config.model_config
    found = {
        "dtype": str(model.dtype).removeprefix("torch."),
        "kv_cache_dtype": str(config.cache_config.cache_dtype),
        "logprobs_mode": str(model.logprobs_mode),
    }
    scales = schemes.scales_of_cache(found["kv_cache_dtype"], getattr(config, "quant_config", None))
    if scales == schemes.OF_HEADS and found["kv_cache_dtype"] in schemes.FP8_CACHES:  # the dtype names the others
        found["kv_cache_scales"] = schemes.CACHE_SCALES[scales]
    found |= device.engine_settings(config)
    for name in ("hf_overrides", "model_class_overrides"):  # which no file of the model holds
        if overrides := getattr(model, name, None):
            found[name] = json.dumps(overrides, sort_keys=True, default=repr)
    if (classes := getattr(model, "model_impl", "auto")) not in ("auto", "vllm"):
        found["model_impl"] = str(classes)
    if getattr(model, "hf_config_path", None):
        configuration = json.dumps(model_of(model)["configuration"], sort_keys=True, default=repr)
        found["hf_config_path"] = sha256(configuration.encode()).hexdigest()[:16]
    if schemes.makes_int8_experts(model, getattr(config, "quant_config", None)):  # of which no reduction tells
        found["quantization"] = "int8 experts"
    if encoding.encoded(model) and not _normalises(model):  # by the processor's operations then, which round otherwise
        found["mm_device_do_normalize"] = "False"
    if (pooler := getattr(model, "pooler_config", None)) is not None:
        chosen = {"convert": model.convert_type} | {name: value for name, value in asdict(pooler).items() if value}
        found["pooler_config"] = json.dumps(chosen, sort_keys=True, default=repr)
    text = model.hf_text_config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if "longrope" in (rope.get("rope_type"), rope.get("type")):  # it has other factors for a long context
        found["max_model_len"] = str(model.max_model_len)
    return found

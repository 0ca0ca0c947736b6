"""Whether an engine's rollouts are promised to have a patched model's logprobs: what decides bits in both, compared."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch

from .. import envs
from ..errors import NotCovered
from ..integration import devices
from ..integration.engine import endpoint
from ..integration.parallel import tensor_tree
from ..integration.reviews import patch_points
from ..provenance import EXACT, OF_ADAPTERS, OF_EXPERTS, Environment, environment_here, flat, versions
from . import adapters, delta_net, fp8, short_conv, state_space
from .families import decoder_of

_OF_NO_LOGPROB = ("logprobs_mode", "model_runner")
"""Settings of an engine that :func:`..hf.token_logprobs` is told of, or that decide none of its bits."""
_REMEDIES = {
    "device": "run both on one kind of device and, on a CPU, with as many threads (torch.set_num_threads)",
    "versions": "install the same versions for both",
    "engine": "start the engine with the trainer's setting, without --hf-overrides",
    "reductions": f"give both the same {envs.ATTENTION.name}",
}
_OF_CODES = ("quantise (", "linear (FP8", "linear (model.")
"""How names of reductions begin that engines with layers in FP8 have, and no others."""
_QUANTISED = (
    "patch(model, quantization=..., unquantised=...) as the engine has it, of FP8 with scales of activations' own"
)
_ADAPTERS = "start the engine with --enable-lora"
_WORKERS = f"start both with {envs.TP_TREE.name} of so many workers or more, or the engine with one"


def check_engine(
    model: torch.nn.Module, declared: Mapping[str, Any] | Sequence[Mapping[str, Any]], dtype: torch.dtype | None = None
) -> None:
    """Refuse an engine whose logprobs are not promised to be this model's. The weights are not compared.

    Args:
        model: that :func:`..hf.patch` has patched.
        declared: what the engine says of itself: ``llm.collective_rpc("batch_invariant_declaration")``, or a server's
            answer to ``GET /v1/batch_invariant``.
        dtype: that the model computes in; None for that of its weights.

    Raises:
        NotCovered: the first thing that decides bits and is another here.
    """
    said = declared if isinstance(declared, Mapping) else endpoint.of_workers(declared)
    if not said.get("mode"):
        raise _refusal("VLLM_BATCH_INVARIANT off", "it on", "start the engine with VLLM_BATCH_INVARIANT=1")
    if EXACT in said["reductions"]:
        raise _refusal(EXACT, "another", f"start the engine without {envs.ARITHMETIC.name}")
    settings = said["engine"] or {}
    if settings.get("model_runner") == "first" and settings.get("logprobs_mode", "").startswith("processed"):
        raise _refusal(
            f"{settings['logprobs_mode']} by vLLM's first model runner",
            "the second one's",
            "leave VLLM_USE_V2_MODEL_RUNNER out, or take raw_logprobs",
        )
    model = adapters.unwrapped(model)
    of_engine = {"products codes" in of for name, of in said["reductions"].items() if name.startswith(OF_EXPERTS)}
    of_model = {module.fp8 is not None for module in fp8.experts_of(model).values()}
    if of_engine != of_model:
        engines, trainers = (
            " and ".join(f"experts{' in FP8' * one}" for one in sorted(found)) or "no experts"
            for found in (of_engine, of_model)
        )
        raise _refusal(engines, trainers, _QUANTISED)
    here = _environment(model, dtype or next(model.parameters()).dtype)
    for section, remedy in _REMEDIES.items():
        theirs, ours = (flat(found) for found in (said[section], getattr(here, section)))
        if theirs.get("kv_cache_dtype") == "auto":
            theirs["kv_cache_dtype"] = theirs["dtype"]
        for name in dict.fromkeys(chain(ours, theirs)):
            # requests without an adapter have the bits that they have where there are none
            decides = name not in _OF_NO_LOGPROB and not name.startswith(OF_EXPERTS)
            decides = decides and (name in ours or not name.startswith(OF_ADAPTERS))
            if decides and theirs.get(name) != ours.get(name):
                remedies = {"tensor_parallel": _WORKERS, **dict.fromkeys(_OF_CODES, _QUANTISED), OF_ADAPTERS: _ADAPTERS}
                of_name = next((found for start, found in remedies.items() if name.startswith(start)), remedy)
                engines, trainers = (f"{name} {values.get(name, 'unset')}" for values in (theirs, ours))
                raise _refusal(engines, trainers, of_name)


def _refusal(theirs: str, ours: str, remedy: str) -> NotCovered:
    return NotCovered(
        f"an engine with {theirs} beside a trainer with {ours}", "their bits are not promised to be equal", remedy
    )


def _environment(model: torch.nn.Module, dtype: torch.dtype) -> Environment:
    """Of this process, as an engine describes its own."""
    device, config = devices.get(next(model.parameters()).device.type), decoder_of(model).config
    chosen, name = envs.ATTENTION.read(), str(dtype).removeprefix("torch.")
    implementation = device.ops.attention if chosen == "auto" else chosen
    assert implementation is not None  # a model is patched on a CPU or a GPU
    return environment_here(
        device.ops.type,
        versions=versions(patch_points.installed_version()) | device.versions(),
        device=device.info(),
        hidden=config.hidden_size,
        vocabulary=config.vocab_size,
        dtype=dtype,
        attention=device.attention_reduction(),
        attention_by=implementation,
        engine={"dtype": name, "kv_cache_dtype": name} | tensor_tree.setting(),
        layers={
            name: reduction
            for of_kind in (fp8, delta_net, state_space, short_conv, adapters)
            for name, reduction in of_kind.reductions(model, dtype).items()
        },
    )

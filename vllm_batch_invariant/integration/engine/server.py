"""What a server says of itself with the mode on: a route, the ``system_fingerprint`` of its answers, and a metric."""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Self

from ... import envs
from ...provenance import installed
from ...version import __version__
from .. import devices
from ..reviews import encoding, patch_points
from . import endpoint, metrics, weights, witness

logger = logging.getLogger("vllm.batch_invariant")

LABELS = ("model_name", "version", "device", "attention", "guarantees", "fingerprint", "witness")
FIELD = "system_fingerprint"
"""Of answers of the OpenAI API, and of vLLM's objects that make them."""
OWN_MODES = ("custom", "none")
"""Values of ``--fingerprint-mode`` by which the user decides what the field holds."""
REQUEST_ARGUMENTS = (
    *("chat_template_content_format", "default_chat_template_kwargs", "trust_request_chat_template"),
    *("enable_auto_tool_choice", "exclude_tools_when_tool_choice_none", "tool_call_parser", "tool_strict_level"),
    *("reasoning_parser", "reasoning_effort_map", "anthropic_disabled_thinking_effort"),
    *("cohere_format", "tool_server"),
)
"""Arguments of a server that decide which tokens a request is, or which grammar its answer has."""
FILE_ARGUMENTS = ("chat_template", "tool_parser_plugin", "reasoning_parser_plugin")
"""The same, where the argument may name a file that says it."""
REQUEST_VARIABLES = (
    *("VLLM_ENFORCE_STRICT_TOOL_CALLING", "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT", "VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY"),
    *("VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS", "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS", "VLLM_SYSTEM_START_DATE"),
    "VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT",
)
"""Variables of vLLM's that decide the same."""
REQUEST_LIBRARIES = (
    *("tokenizers", "transformers", "mistral_common", "tiktoken", "openai-harmony"),
    *("xgrammar", "llguidance", "outlines_core", "lm-format-enforcer"),
)
"""Packages that make tokens of text, and masks of grammars."""
ITEM_SETTINGS = ("mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "interleave_mm_strings")
"""Of an engine: what is made of an image, a video or a sound before it is encoded, and where it stands in a prompt."""
ITEM_VARIABLES = ("VLLM_VIDEO_LOADER_BACKEND", "VLLM_MEDIA_CONNECTOR")
ITEM_LIBRARIES = (
    *("pillow", "torchvision", "opencv-python", "opencv-python-headless", "av"),
    *("soundfile", "soxr", "librosa", "scipy"),
)
"""Packages that decode these, and change their size or rate."""


def offer() -> None:
    """Have every server of this process say what it is.

    The mode was asked for by its flag, so ``VLLM_PLUGINS`` need not name this plugin for a route; a list there without
    it keeps the plugin out as a whole. An entry point of vLLM's would have plain vLLM warn of it at every start.
    """
    load = patch_points.ENDPOINT_PLUGINS.get()

    def load_endpoint_plugins(supported_tasks: tuple[str, ...] | None = None) -> list[Any]:
        ours = [Endpoint()] if {*Endpoint.required_tasks} & {*(supported_tasks or ())} else []
        return [*load(supported_tasks), *ours]

    patch_points.ENDPOINT_PLUGINS.put(load_endpoint_plugins)


class Endpoint:
    """``GET /v1/batch_invariant``, in the form of vLLM's endpoint plugins, which also meet the server's state."""

    name = endpoint.NAME
    required_tasks = ("generate", "transcription", "embed", "classify", "token_embed", "token_classify")

    def attach_router(self, app: Any) -> None:
        """Called by vLLM before the engine is there."""
        app.add_api_route(endpoint.PATH, self.engine_info, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Called by vLLM with the engine, which is ready."""
        self._environment = endpoint.of_workers(await engine_client.collective_rpc(endpoint.METHOD))
        [digest, *_] = await engine_client.collective_rpc(weights.METHOD)
        self._fingerprint = Fingerprint.of(self._environment, engine_client, args, digest)
        metric = Metric(self._environment, engine_client.vllm_config)
        self._witness = witness.Witness(engine_client, lambda: str(self._fingerprint), metric.show)
        if self._fingerprint.promises:
            await self._witness.make()
            self._fingerprint.tell(self._witness.follow)
            self._witness.keep(witness.minutes())
        metric.show(str(self._fingerprint), str(self._witness))
        if self._fingerprint.promises and getattr(args, "fingerprint_mode", None) not in OWN_MODES:
            stamp(state, self._fingerprint)
            logger.info("%s: %s", FIELD, self._fingerprint)

    async def engine_info(self) -> dict[str, Any]:
        """The fields of ``provenance.Environment``, the fingerprint and the witness."""
        return self._environment | {"fingerprint": str(self._fingerprint), "witness": str(self._witness)}


class Fingerprint:
    """What two servers have in common if they promise each other the same bits for the same request. As a string it is
    ``vllm-<version>-batch-invariant-<16 hexadecimal digits>``, and follows the weights that the engine serves.

    Args:
        record: what decides bits beside the weights.
        weights_at_start: the digest of the weights that the engine was started with.
        promises: whether the engine tells enough of itself for a promise; without, the string is empty.
    """

    def __init__(self, record: dict[str, Any], weights_at_start: str, promises: bool = True) -> None:
        self.promises = promises
        self._record, self._weights_at_start = record, weights_at_start
        self._of_weights, self._text = "", ""
        self._followers: list[Callable[[str], None]] = []

    @classmethod
    def of(cls, environment: dict[str, Any], engine: Any, args: Any, weights_at_start: str) -> Self:
        """That of a server.

        Args:
            environment: of its engine, as ``provenance.Environment`` has it.
            engine: vLLM's client of it.
            args: of the server.
            weights_at_start: as above.
        """
        model = endpoint.model_of(engine.model_config)
        record = {"environment": environment, "model": model, "requests": _requests(engine, args)}
        return cls(record, weights_at_start, promises=bool(environment["reductions"]))

    def __str__(self) -> str:
        served = weights.published() or self._weights_at_start
        if self.promises and served != self._of_weights:
            short = _digest(self._record | {"weights": served})[:16]
            self._text = f"vllm-{patch_points.installed_version()}-batch-invariant-{short}"
            self._of_weights = served
            for follow in self._followers:
                follow(self._text)
        return self._text

    def tell(self, follow: Callable[[str], None]) -> None:
        """Have a function called with the string whenever it is found to be another."""
        self._followers.append(follow)


class Metric:
    """The gauge :data:`.endpoint.METRIC`: 1 for what the server is, 0 for what it was before its weights were replaced.

    A gauge, because prometheus_client has no information metric for several processes; vLLM does the same.
    """

    def __init__(self, environment: dict[str, Any], config: Any) -> None:
        attention = environment["reductions"].get("attention", {})
        self._values = {
            "model_name": str(config.model_config.served_model_name),
            "version": __version__,
            "device": str(environment["device"].get("name", config.device_config.device_type)),
            "attention": str(attention.get("implementation", "")),
            "guarantees": ",".join(devices.of_config(config).guarantees),
        }
        self._before: Any = None

    def show(self, fingerprint: str, witness: str) -> None:
        """Say that these are the server's fingerprint and witness now."""
        if self._before is not None:
            self._before.set(0)
        gauge = metrics.registered(_made_gauge())
        self._before = gauge.labels(**self._values, fingerprint=fingerprint, witness=witness)
        self._before.set(1)


@cache
def _made_gauge() -> Any:
    text = "Batch-invariant mode: what the server promises, and the system_fingerprint of its answers."
    return patch_points.GAUGE.get()(endpoint.METRIC, text, LABELS, multiprocess_mode="mostrecent")


def stamp(state: Any, fingerprint: Fingerprint) -> None:
    """Put the fingerprint into the answers of a server: of whatever is in its state and has the field, however that is
    called in this vLLM. A field that vLLM leaves empty stays so.
    """
    for serving in state._state.values():
        if getattr(serving, "__dict__", {}).get(FIELD):
            setattr(type(serving), FIELD, property(_read, _write))
            _write(serving, fingerprint)


def _read(serving: Any) -> str | None:
    value = vars(serving).get(FIELD)
    return str(value) if isinstance(value, Fingerprint) else value


def _write(serving: Any, value: Any) -> None:
    vars(serving)[FIELD] = value


def _requests(engine: Any, args: Any) -> dict[str, Any]:
    """What makes tokens of a request's text, values of what it leaves out, and what decides tokens of some requests."""
    model, config = engine.model_config, engine.vllm_config
    thoughts = getattr(config, "reasoning_config", None)
    found = {name: getattr(args, name, None) for name in REQUEST_ARGUMENTS}
    found |= {name: _said(getattr(args, name, None)) for name in FILE_ARGUMENTS}
    found |= {name: os.environ.get(name) for name in REQUEST_VARIABLES}
    return found | {
        "tokenizer": _tokenizer(engine),
        "items": _items(engine),
        "libraries": {name: installed(name) for name in REQUEST_LIBRARIES},
        "sampling": model.get_diff_sampling_param(),
        "end_of_answers": model.try_get_generation_config().get("eos_token_id"),
        "structured_outputs": asdict(config.structured_outputs_config),
        "thoughts": thoughts and asdict(thoughts),
        "seed": envs.SEED.read(),
    }


def _items(engine: Any) -> dict[str, Any] | None:
    """What makes of the images, videos and sounds of requests what is encoded; None of a model that encodes none."""
    model = engine.model_config
    held = getattr(model, "multimodal_config", None)
    if held is None or not encoding.encoded(model):
        return None
    processor = engine.renderer.get_mm_processor().info.get_hf_processor()
    fields = processor.to_dict() if hasattr(processor, "to_dict") else {}
    return {
        "class": type(processor).__name__,
        # an object's own words would have an address of memory
        "processor": json.dumps(fields, sort_keys=True, default=lambda held: type(held).__name__),
        "settings": {name: getattr(held, name, None) for name in ITEM_SETTINGS},
        "variables": {name: os.environ.get(name) for name in ITEM_VARIABLES},
        "libraries": {name: installed(name) for name in ITEM_LIBRARIES},
    }


def _tokenizer(engine: Any) -> dict[str, Any] | None:
    try:
        tokenizer = engine.get_tokenizer()
    except ValueError:  # the server takes token ids only
        return None
    rust = getattr(tokenizer, "backend_tokenizer", None)
    rules = json.loads(rust.to_str()) if rust is not None else tokenizer.get_vocab()
    if rust is not None:
        rules |= {"truncation": None, "padding": None}  # of the last call
    return {
        "class": type(tokenizer).__name__,
        "rules": _digest(rules),
        "template": getattr(tokenizer, "chat_template", None),
        "special": {name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items()},
    }


def _said(given: str | None) -> str | None:
    """What an argument says that is a file's name or itself."""
    try:
        return Path(given).read_text() if given else None
    except OSError:
        return given


def _digest(record: Any) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()

"""Sends configurations of vLLM through the start-up check, as vLLM would make them on a Hopper GPU.

vLLM's own ``VllmConfig`` is made, by the classes of whichever vLLM is installed: its platform's class becomes that of
CUDA, with what vLLM asks a GPU answered here. That changes the process for good, so that it must be one of its own.
What a GPU's vLLM would compute is not run. The check takes its version for 0.33, which has run on GPUs.
:func:`ask` starts such a process.
"""

import builtins
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.fakes import torchvision
from vllm_batch_invariant.errors import NotCovered

from .kinds import Model

ROOT = Path(__file__).parents[2]
VERSION = "0.33.0"
STARTS, REFUSED = "starts", "refused: "
UNKNOWN_MODEL, NOT_MADE = "the model is unknown here", "vLLM makes no configuration: "
UNKNOWN_DRAFTS = "the draft model is unknown here"
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
_BEGINNING = "batch-invariant mode does not cover "
_OWN_CLASS = """from transformers import CONFIG_MAPPING, PretrainedConfig


class Own(PretrainedConfig):
    model_type = "{}"

    def __init__(self, **said):
        for name in said.keys() & {{"text_config", "llm_config", "vision_config"}}:
            of_part = said[name] if isinstance(said[name], dict) else said[name].to_dict()
            kind = of_part.get("model_type")
            said[name] = (CONFIG_MAPPING[kind] if kind in CONFIG_MAPPING else PretrainedConfig)(**of_part)
        super().__init__(**said)
"""
"""Of the configuration of a checkpoint that brings one, which says everything in its file."""
_TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


@dataclass(frozen=True)
class Question:
    """A configuration.

    Attributes:
        model: its kind; None if that is unknown.
        arguments: of vLLM's engine.
        variables: of the environment.
        drafts: the kind of the draft model that the arguments name; None if that is unknown, or there is none.
    """

    model: Model | None
    arguments: dict[str, Any]
    variables: dict[str, str] = field(default_factory=dict)
    drafts: Model | None = None


class Gate:
    """The check of a process that takes its vLLM for a GPU's.

    Args:
        folder: where configurations of models are written; vLLM's caches go there, too.
        architectures: those that will be asked for.
    """

    def __init__(self, folder: Path, architectures: Iterable[str]) -> None:
        os.environ |= (
            _QUIET
            | _TORCHRUN
            | {
                "VLLM_CACHE_ROOT": str(folder / "cache"),
                "HF_MODULES_CACHE": str(folder / "modules"),
            }
        )
        self._folder = folder
        self._arguments = import_module("vllm.engine.arg_utils").EngineArgs
        platform = import_module("vllm.platforms").current_platform
        known = import_module("vllm.model_executor.models.registry").ModelRegistry.models
        for architecture in sorted({*architectures} & {*known}):
            _inspect(architecture)
        _become_cuda(platform)
        import_module("vllm_batch_invariant.integration.reviews.patch_points").installed_version = lambda: VERSION

    def verdict(self, question: Question) -> str:
        """What the check says: :data:`STARTS`, or everything that it refuses."""
        before = dict(os.environ)
        os.environ |= question.variables
        try:
            return self._verdict(json.dumps(asdict(question), sort_keys=True))
        finally:
            os.environ.clear()
            os.environ |= before

    @cache  # noqa: B019 - a process has one
    def _verdict(self, line: str) -> str:
        question = _read(line)
        model, arguments = question.model, question.arguments
        if model is None:
            return UNKNOWN_MODEL
        if not model.config:
            return self._of_class(model.architecture)
        speculation = arguments.get("speculative_config") or {}
        if "model" in speculation:
            if question.drafts is None:
                return self._of_method(question)
            arguments["speculative_config"] = speculation | {"model": str(self._write(question.drafts))}
        if thoughts := arguments.get("reasoning_config"):
            arguments["reasoning_config"] = import_module("vllm.config.reasoning").ReasoningConfig(**thoughts)
        try:
            engine = self._arguments(model=str(self._write(model)), skip_tokenizer_init=True, **arguments)
            config = engine.create_engine_config()
        except Exception as error:
            return f"{NOT_MADE}{_in_short(error)}"
        try:
            import_module("vllm_batch_invariant.integration.engine.install").check(config)
            _check_variables()
        except NotCovered:
            return REFUSED + "; ".join(_named(config))
        return STARTS

    def _of_method(self, question: Question) -> str:
        """What the method of speculative decoding decides alone, where its draft model is unknown."""
        method = question.arguments["speculative_config"].get("method")
        if method in (None, *import_module("vllm_batch_invariant.integration.coverage").RAN.drafters):
            return UNKNOWN_DRAFTS
        without = {name: value for name, value in question.arguments.items() if name != "speculative_config"}
        rest = self.verdict(replace(question, arguments=without))
        refused = f"speculative decoding with {method}"
        if rest == STARTS:
            return REFUSED + refused
        return f"{rest}; {refused}" if rest.startswith(REFUSED) else rest

    def _of_class(self, architecture: str) -> str:
        """What a model's class decides alone, where its sizes are unknown."""
        coverage = import_module("vllm_batch_invariant.integration.coverage")
        registry = import_module("vllm.model_executor.models.registry")
        if architecture in registry._MULTIMODAL_MODELS and architecture not in coverage.RAN.text_of:
            return f"{REFUSED}the model {architecture}"
        return UNKNOWN_MODEL

    def _write(self, model: Model) -> Path:
        whole = {"architectures": [model.architecture], "torch_dtype": "bfloat16", **model.config}
        text = json.dumps(whole if model.file == "config.json" else model.config)
        folder = self._folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        folder.mkdir(exist_ok=True)
        (folder / model.file).write_text(text)
        if "auto_map" in model.config:
            (folder / "configuration_own.py").write_text(_OWN_CLASS.format(model.config["model_type"]))
        return folder


def _named(config: Any) -> Iterator[str]:
    """All that a refused configuration is refused for: rows of the table, and the first field that nobody reviewed."""
    coverage = import_module("vllm_batch_invariant.integration.coverage")
    configuration = import_module("vllm_batch_invariant.integration.reviews.configuration")
    for feature in coverage.REFUSED:
        with suppress(Exception):  # of a model that lacks what is asked of it, as in the check
            if found := feature.found(config):
                yield found
    for check in (lambda: configuration.check(config), _check_variables):
        try:
            check()
        except NotCovered as refusal:
            yield _what(str(refusal))


def _what(line: str) -> str:
    """What a refusal's line names: the words before its reason."""
    named = line.removeprefix(_BEGINNING)
    return re.split(
        r": (?:it has not been proven|this version of the plugin|its \w+ are|experts would|matmuls in)", named
    )[0]


def _in_short(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines()]
    said = next((line for line in lines if line.startswith(("Value error", "Assertion"))), lines[0] if lines else "")
    return said.partition(" [type=")[0].removeprefix("Value error, ") or type(error).__name__


def _inspect(architecture: str) -> None:
    """Have vLLM look at a model's class here, instead of in a process for each."""
    registry = import_module("vllm.model_executor.models.registry")
    lazy = registry.ModelRegistry.models.get(architecture)
    with suppress(ImportError):  # of a package that only this class needs
        registry.ModelRegistry.models[architecture] = registry._RegisteredModel.from_model_cls(lazy.load_model_cls())


def _become_cuda(platform: Any) -> None:
    """Give vLLM's platform, which every module of it has, another class."""
    sys.modules.setdefault("vllm._C_stable_libtorch", types.ModuleType("vllm._C_stable_libtorch"))
    base = import_module("vllm.platforms.cuda").NonNvmlCudaPlatform
    capability = import_module("vllm.platforms.interface").DeviceCapability
    answers = {
        "get_device_capability": capability(9, 0),
        "get_device_name": "NVIDIA H100 80GB HBM3",
        "get_device_total_memory": 80 << 30,
        "device_count": 1024,
        "num_compute_units": 132,
        "is_pin_memory_available": True,
        "is_cumem_allocator_available": True,
    }
    methods = {name: classmethod(_answering(answer)) for name, answer in answers.items()}
    platform.__class__ = type("Hopper", (base,), methods)
    import_module("vllm.config.vllm").HAS_TRITON = True
    import_module("vllm._custom_ops").cutlass_scaled_mm_supports_fp8 = _answering(True)
    import_module("vllm.v1.executor.ray_utils").assert_ray_available = lambda: None
    import_module("vllm.config.reasoning").ReasoningConfig.initialize_token_ids = _answering(None)  # by a tokenizer
    internvl = import_module("vllm.model_executor.models.internvl").InternVLProcessingInfo
    internvl.ctx_video_token = "<|video_pad|>"  # asked of a tokenizer
    import_module("vllm.model_executor.models.registry")._run_in_subprocess = lambda of: of()
    builtins.ObjectRef = object  # Ray's, which an annotation of vLLM's executor names


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def ask(questions: Sequence[Question]) -> list[str]:
    """What the check says of each, asked in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        path = [*torchvision.where_missing(Path(folder)), str(ROOT)]
        command = [sys.executable, "-c", f"import sys; sys.path[:0] = {path}; from {__name__} import run; run()"]
        lines = "\n".join(json.dumps(asdict(question)) for question in questions)
        done = subprocess.run(command, input=lines, capture_output=True, text=True, cwd=ROOT, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('"')]


def run() -> None:
    """Read questions from the standard input, a line of JSON each, and print the verdict on each as JSON."""
    questions = [_read(line) for line in sys.stdin]
    every = [model for question in questions for model in (question.model, question.drafts)]
    kinds = [model for model in every if model and model.config]
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(Path(folder), [kind.architecture for kind in kinds])
        for question in questions:
            print(json.dumps(gate.verdict(question)))


def _read(line: str) -> Question:
    found = json.loads(line)
    model, drafts = (found[name] and Model(**found[name]) for name in ("model", "drafts"))
    return Question(model, found["arguments"], found["variables"], drafts)


def _check_variables() -> None:
    """Errors as in ``reviewed.check_variables``."""
    from vllm_batch_invariant.integration.reviews import configuration, patch_points

    configuration.check_variables(patch_points.ENVIRONMENT.get())

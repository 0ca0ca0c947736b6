"""Sends rollout configurations through the start-up check, as vLLM would make them on a Hopper GPU.

vLLM's own ``VllmConfig`` is made, by the classes of whichever vLLM is installed: its platform's class becomes that of
CUDA, with what vLLM asks a GPU answered here. That changes the process for good, so that it must be one of its own.
What a GPU's vLLM would compute is not run. The check takes its version for 0.33, which has run on GPUs.
"""

import builtins
import hashlib
import json
import os
import re
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from vllm_batch_invariant.errors import NotCovered

from .models import Model, model_of

VERSION = "0.33.0"
STARTS, REFUSED = "starts", "refused: "
UNKNOWN_MODEL, NOT_MADE = "the model is unknown here", "vLLM makes no configuration: "
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1", "VLLM_PLUGINS": ""}
_BEGINNING = "batch-invariant mode does not cover "
_TORCHRUN = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}


class Gate:
    """The check of a process that takes its vLLM for a GPU's.

    Args:
        folder: where configurations of models are written; vLLM's caches go there, too.
        architectures: those that will be asked for.
    """

    def __init__(self, folder: Path, architectures: Iterable[str]) -> None:
        os.environ |= _QUIET | _TORCHRUN | {"VLLM_CACHE_ROOT": str(folder / "cache")}
        self._folder = folder
        self._arguments = import_module("vllm.engine.arg_utils").EngineArgs
        platform = import_module("vllm.platforms").current_platform
        known = import_module("vllm.model_executor.models.registry").ModelRegistry.models
        for architecture in sorted({*architectures} & {*known}):
            _inspect(architecture)
        _become_cuda(platform)
        import_module("vllm_batch_invariant.integration.reviews.patch_points").installed_version = lambda: VERSION

    def verdict(self, model: str, arguments: dict[str, Any], variables: dict[str, str]) -> str:
        """What the check says: :data:`STARTS`, or everything that it refuses.

        Args:
            model: its name in an example.
            arguments: of vLLM's engine.
            variables: of the environment.
        """
        before = dict(os.environ)
        os.environ |= variables
        try:
            return self._verdict(model, json.dumps(arguments, sort_keys=True), json.dumps(variables, sort_keys=True))
        finally:
            os.environ.clear()
            os.environ |= before

    @cache  # noqa: B019 - a process has one
    def _verdict(self, name: str, arguments: str, _: str) -> str:
        model = model_of(name)
        if model is None:
            return UNKNOWN_MODEL
        if not model.config:
            return self._of_class(model.architecture)
        try:
            engine = self._arguments(model=str(self._write(model)), skip_tokenizer_init=True, **json.loads(arguments))
            config = engine.create_engine_config()
        except Exception as error:
            return f"{NOT_MADE}{_in_short(error)}"
        try:
            import_module("vllm_batch_invariant.integration.engine.install").check(config)
            _check_variables()
        except NotCovered:
            return REFUSED + "; ".join(_named(config))
        return STARTS

    def _of_class(self, architecture: str) -> str:
        """What a model's class decides alone, where its sizes are unknown."""
        coverage = import_module("vllm_batch_invariant.integration.coverage")
        registry = import_module("vllm.model_executor.models.registry")
        found = getattr(registry.ModelRegistry.models.get(architecture), "interfaces", None)
        if found is not None and found.supports_multimodal and architecture not in coverage.RAN.text_of:
            return f"{REFUSED}the model {architecture}"
        return UNKNOWN_MODEL

    def _write(self, model: Model) -> Path:
        text = json.dumps({"architectures": [model.architecture], "torch_dtype": "bfloat16", **model.config})
        folder = self._folder / hashlib.sha256(text.encode()).hexdigest()[:16]
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(text)
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
    return re.split(r": (?:it has not been proven|this version of the plugin|its \w+ are|experts would)", named)[0]


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
    builtins.ObjectRef = object  # Ray's, which an annotation of vLLM's executor names


def _answering(answer: Any) -> Callable[..., Any]:
    return lambda *_, **__: answer


def verdicts(lines: Iterable[str]) -> list[str]:
    """Of each line: JSON of the arguments of :meth:`Gate.verdict`."""
    asked = [json.loads(line) for line in lines]
    kinds = [model_of(name) for name, *_ in asked]
    with tempfile.TemporaryDirectory() as folder:
        gate = Gate(Path(folder), [kind.architecture for kind in kinds if kind])
        return [gate.verdict(*given) for given in asked]


def run() -> None:
    """Read lines from the standard input, and print the verdict on each as JSON."""
    for said in verdicts(sys.stdin):
        print(json.dumps(said))


def _check_variables() -> None:
    """Errors as in ``reviewed.check_variables``."""
    from vllm_batch_invariant.integration.reviews import configuration, patch_points

    configuration.check_variables(patch_points.ENVIRONMENT.get())

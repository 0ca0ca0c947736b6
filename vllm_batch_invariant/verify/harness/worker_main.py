"""The driver: a program that holds one engine, and takes commands from standard input, a line of JSON each.

The mode holds for a whole process, so an engine gets one of its own. A command is an object with one key, {"start":
[...]}, {"step": {...}} or {"call": {...}}; so is its answer, on the file descriptor that is the program's argument. A
call may send {"progress": ...} before it.
"""

import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any, TextIO

from ..printing import one_line
from . import images, pooling
from .drive import add_request, describe, drive

_answers: TextIO | None = None


def tell(progress: Any) -> None:
    """Send plain data about a call that still runs to the process that waits for its answer."""
    if _answers is not None:
        _send({"progress": progress})


def _send(message: dict[str, Any]) -> None:
    assert _answers is not None
    _answers.write(json.dumps(message) + "\n")
    _answers.flush()


def main(descriptor: int) -> None:
    """Execute commands until standard input ends."""
    global _answers
    driver = Driver()
    commands: dict[str, Callable[[Any], Any]] = {
        "start": driver.start,
        "step": driver.step,
        "call": driver.call,
    }
    with os.fdopen(descriptor, "w") as _answers:
        for line in sys.stdin:
            [(command, argument)] = json.loads(line).items()
            try:
                answer = {command: commands[command](argument)}
            except (Exception, SystemExit) as error:
                traceback.print_exc()
                answer = {"failed": one_line(error)}
            _send(answer)


class Driver:
    """The engine, once it is started."""

    llm: Any = None

    def __init__(self) -> None:
        self._adapters: dict[str, int] = {}
        """The number of each folder of an adapter."""

    def start(self, arguments: list[str]) -> dict[str, Any]:
        """Start the engine with the arguments of ``vllm serve``, the model first; returns its description."""
        from .engine import start_engine

        begin = time.perf_counter()
        self.llm = start_engine(arguments[0], arguments[1:])
        return describe_engine(self.llm) | {"startup_seconds": time.perf_counter() - begin}

    def step(self, step: dict[str, Any]) -> dict[str, Any]:
        """Send requests together; returns their answers, the times of tokens, and the batches.

        Where ``step`` has ``preempt_after``, what runs after so many steps of the engine is preempted.
        """
        from vllm.sampling_params import RequestOutputKind

        from .engine import request_params

        if step.get("reset_prefix_cache") and not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")
        if step.get("forget_images") and images.placeholders(self.llm):
            images.forget(self.llm)
        before, engine = preemptions(self.llm), self.llm.llm_engine
        encoded = images.encoded(self.llm)
        done: dict[str, dict[str, Any]] = {}
        names = [f"{number}-{step['name']}" for number in range(len(step["requests"]))]
        for name, request in zip(names, step["requests"], strict=True):
            try:
                params = request_params(request["params"])
                if getattr(params, "n", 1) > 1:  # otherwise its samples come one by one
                    params.output_kind = RequestOutputKind.FINAL_ONLY
                prompt = images.prompt_of(self.llm, request["prompt"], request.get("items", ()))
                add_request(engine, name, prompt, params, **self._adapter_of(request))
            except Exception as error:  # vLLM refuses a request by any exception
                if not request.get("may_be_refused"):
                    raise
                done[name] = {"refused": one_line(error)}
        batches: list[tuple[float, int]] = []
        times: dict[str, list[float]] = {name: [] for name in names}
        begin = time.perf_counter()
        for number, outputs in enumerate(drive(engine), 1):
            if number == step.get("preempt_after"):
                engine.reset_prefix_cache(reset_running_requests=True)
            now = time.perf_counter() - begin
            if outputs:
                batches.append((now, len(outputs)))
            for output in outputs:
                times[output.request_id].append(now)
                if output.finished:
                    done[output.request_id] = describe(output)
        return {
            "requests": [done[name] | {"token_seconds": times[name]} for name in names],
            "batches": batches,
            "preemptions": preemptions(self.llm) - before,
            "encoded": {name: count - encoded[name] for name, count in images.encoded(self.llm).items()},
        }

    def _adapter_of(self, request: dict[str, Any]) -> dict[str, Any]:
        """What the engine is told of a request's LoRA adapter."""
        from .engine import lora_request_of

        if not (folder := request.get("adapter")):
            return {}
        return {"lora_request": lora_request_of(folder, self._adapters.setdefault(folder, len(self._adapters) + 1))}

    def call(self, what: dict[str, Any]) -> Any:
        """Call a function, named as in an entry point, with the engine as its first argument."""
        module, _, function = what["function"].partition(":")
        return getattr(import_module(module), function)(self.llm, *what["arguments"])


def preemptions(llm: Any) -> int:
    """How often the engine has preempted a request since its start."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")


def describe_engine(llm: Any) -> dict[str, Any]:
    """The settings that decide how the engine schedules and computes, its kernels, versions and device."""
    from vllm.platforms import current_platform

    from ...integration import devices
    from ...integration.reviews import patch_points
    from ...ops.devices import known
    from ...provenance import versions
    from .mode import of_engine

    config = llm.llm_engine.vllm_config
    device_type, found = current_platform.device_type, versions(patch_points.installed_version())
    device = devices.get(device_type) if device_type in known() else None
    return {
        "mode": of_engine(),
        "context": config.model_config.max_model_len,
        "vocabulary": config.model_config.get_vocab_size(),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "tokens_in_a_step": config.scheduler_config.max_num_batched_tokens,
        "requests_in_a_step": config.scheduler_config.max_num_seqs,
        "most_logprobs": config.model_config.max_logprobs,
        "pooling": pooling.about(llm),
        "images": images.about(llm),
        "encoder_decoder": bool(config.model_config.is_encoder_decoder),
        "tokenizer": not config.model_config.skip_tokenizer_init,
        "page": config.cache_config.block_size,
        "pages": config.cache_config.num_gpu_blocks,
        "chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
        "prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "compilation": config.compilation_config.mode.name,
        "cuda_graphs": config.compilation_config.cudagraph_mode.name,
        "kernels": llm.apply_model(kernels)[0],
        "versions": found | device.versions() if device else found,
        "device": device.info() if device else {"type": device_type},
    }


def kernels(model: Any) -> dict[str, list[str]]:
    """Classes and functions that serve the model's layers; runs in the engine's worker."""
    found: dict[str, set[str]] = {}
    for module in model.modules():
        found.setdefault("modules", set()).add(f"{type(module).__module__}.{type(module).__qualname__}")
        for attribute in ("cpu_linear", "impl"):
            value = getattr(module, attribute, None)
            if value is not None:
                owner = value if hasattr(value, "__qualname__") else type(value)
                found.setdefault(attribute, set()).add(f"{owner.__module__}.{owner.__qualname__}")
    return {kind: sorted(names) for kind, names in found.items()}


if __name__ == "__main__":
    # imported by name, so that workers in other processes find the functions of this module
    import_module("vllm_batch_invariant.verify.harness.worker_main").main(int(sys.argv[1]))

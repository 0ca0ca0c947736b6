"""verl's examples: hydra overrides over ``rollout.yaml``, as its vLLM server turns them into arguments."""

from collections.abc import Iterator
from typing import Any

import yaml

from .examples import Configuration, Mirror, Unread, at, check_known, defaults, exported, known_model, nested
from .shell import Script, Unreadable, launched, read

NAME = "verl"
PROGRAMS = (
    *("verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "verl.trainer.main_generation_server"),
    "verl.experimental.fully_async_policy.fully_async_main",
)
"""Programs that make rollouts; others of its examples fine-tune."""
_ROLLOUT = "actor_rollout_ref.rollout"
_CONFIG, _SERVER = "verl/workers/config/rollout.py", "verl/workers/rollout/vllm_rollout/vllm_async_server.py"
_EXTENSION = "verl.workers.rollout.vllm_rollout.utils.vLLMColocateWorkerExtension"
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
_AS_THEY_ARE = (
    *("dtype", "load_format", "max_model_len", "max_num_seqs", "enable_chunked_prefill", "max_num_batched_tokens"),
    *("enable_prefix_caching", "enable_sleep_mode", "logprobs_mode", "enforce_eager", "gpu_memory_utilization"),
    *("disable_log_stats", "scheduling_policy", "quantization"),
)
"""Arguments that have the name of the rollout's field."""


def configurations(mirror: Mirror) -> Iterator[Configuration]:
    """Of each script in ``examples`` that makes rollouts."""
    base = defaults(mirror.text(_CONFIG), "RolloutConfig")
    base |= yaml.safe_load(mirror.text("verl/trainer/config/rollout/rollout.yaml"))
    mtp = defaults(mirror.text("verl/workers/config/model.py"), "MtpConfig")
    for path in mirror.paths("examples/", ".sh"):
        found = Configuration(path)
        try:
            text = mirror.text(path)
            script = read(text, {"DEVICE": "gpu"})  # on a machine with NVIDIA GPUs
            words = _words(script, text)
            if words is None:
                continue
            found.variables = exported(script)
            _fill(found, nested(words), base, mtp)
        except (Unread, Unreadable) as error:
            found.unread = str(error)
        yield found


def _words(script: Script, text: str) -> list[str] | None:
    """Of the program that makes rollouts; None if the script launches none."""
    commands = launched(script, PROGRAMS)
    if not commands and any(program in text for program in PROGRAMS):
        raise Unread("whether it launches the trainer depends on the machine")
    return commands[-1] if commands else None


def _fill(found: Configuration, overrides: dict[str, Any], base: dict[str, Any], mtp: dict[str, Any]) -> None:
    given = at(overrides, _ROLLOUT, {})
    rollout = base | given
    found.engine = str(rollout.get("name"))
    if "ascend_extras/" in found.script or "_npu_" in found.script or at(overrides, "trainer.device") == "npu":
        found.engine += " on an NPU"
    found.model = known_model(at(overrides, "actor_rollout_ref.model.path"))
    if found.engine != "vllm":
        return
    model = at(overrides, "actor_rollout_ref.model", {})
    arguments = _arguments(rollout, model, mtp)
    size = found_size(rollout)
    per_node = int(at(overrides, "trainer.n_gpus_per_node", 8))
    if int(rollout["data_parallel_size"]) > 1:
        local = min(size, per_node) // int(rollout["tensor_model_parallel_size"])
        arguments |= {"data_parallel_size": int(rollout["data_parallel_size"]), "data_parallel_size_local": local}
    if size > per_node:
        arguments["nnodes"] = size // per_node
    check_known(arguments)
    found.arguments = arguments


def found_size(rollout: dict[str, Any]) -> int:
    """GPUs of a replica."""
    names = ("tensor_model_parallel_size", "data_parallel_size", "pipeline_model_parallel_size")
    sizes = [rollout[name] for name in names]
    if not all(isinstance(size, int) for size in sizes):
        raise Unread("the number of GPUs depends on the machine")
    return int(sizes[0] * sizes[1] * sizes[2])


def _arguments(rollout: dict[str, Any], model: dict[str, Any], mtp: dict[str, Any]) -> dict[str, Any]:
    """What the server gives vLLM: a value that is None or False is left out there."""
    engine = dict(at(rollout, "engine_kwargs.vllm", {}) or {})
    compilation = dict(engine.pop("compilation_config", None) or {})
    compilation.setdefault("cudagraph_mode", "FULL_AND_PIECEWISE")
    if rollout.get("cudagraph_capture_sizes"):
        compilation["cudagraph_capture_sizes"] = rollout["cudagraph_capture_sizes"]
    arguments = {name: rollout[name] for name in _AS_THEY_ARE} | {
        "distributed_executor_backend": "mp",
        "worker_extension_cls": _EXTENSION,
        "trust_remote_code": model.get("trust_remote_code", False),
        "tensor_parallel_size": rollout["tensor_model_parallel_size"],
        "seed": rollout["seed"],
        "compilation_config": compilation,
        "enable_expert_parallel": int(rollout["expert_parallel_size"] or 1) > 1,
        "enable_return_routed_experts": bool(rollout["enable_rollout_routing_replay"]),
        **engine,
    }
    if rollout.get("limit_images"):
        arguments["limit_mm_per_prompt"] = {"image": rollout["limit_images"]}
    drafts = mtp | model.get("mtp", {})
    if drafts["enable"] and drafts["enable_rollout"]:
        arguments["speculative_config"] = {
            "method": drafts["method"],
            "num_speculative_tokens": drafts["num_speculative_tokens"],
        }
    rank = at(model, "lora.rank", 0) or model.get("lora_rank", 0)
    if rank and not at(model, "lora.merge", False):
        least = next(allowed for allowed in _LORA_RANKS if allowed >= int(rank))
        arguments |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": least}
    return {name: value for name, value in arguments.items() if value is not None and value is not False}

"""SkyRL's examples: overrides over its dataclasses, as it turns them into vLLM's arguments."""

from collections.abc import Iterator
from typing import Any

from .examples import Configuration, Mirror, Unread, at, check_known, defaults, exported, known_model, nested
from .shell import UNKNOWN, Unreadable, read

NAME = "SkyRL"
_CONFIG = "skyrl/train/config/config.py"
_ENGINE = "generator.inference_engine"
_EXTENSION = "skyrl.backends.skyrl_train.inference_servers.new_inference_worker_wrap.NewInferenceWorkerWrap"


def configurations(mirror: Mirror) -> Iterator[Configuration]:
    """Of each script in ``examples`` that sets an engine for rollouts."""
    source = mirror.text(_CONFIG)
    base = defaults(source, "InferenceEngineConfig")
    colocates = bool(defaults(source, "PlacementConfig")["colocate_all"])
    merges = bool(defaults(source, "MegatronLoraConfig")["merge_lora"])
    for path in mirror.paths("examples/", ".sh"):
        found = Configuration(path)
        try:
            text = mirror.text(path)
            if _ENGINE not in text:
                continue
            script = read(text)
            words = next((words for words in reversed(script.commands) if any(_ENGINE in word for word in words)), None)
            if words is None or words[0] == UNKNOWN:
                raise Unread("what it launches depends on the machine")
            found.variables = exported(script)
            _fill(found, nested(words), base, colocates, merges)
        except (Unread, Unreadable) as error:
            found.unread = str(error)
        yield found


def _fill(found: Configuration, given: dict[str, Any], base: dict[str, Any], colocates: bool, merges: bool) -> None:
    engine = base | at(given, _ENGINE, {})
    found.model = known_model(at(given, "trainer.policy.model.path"))
    found.engine = str(engine["backend"])
    if not engine["run_engines_locally"]:
        raise Unread("its engines are servers that another script starts")
    if found.engine != "vllm":
        return
    colocates = bool(at(given, "trainer.placement.colocate_all", colocates))
    arguments = {
        "tensor_parallel_size": engine["tensor_parallel_size"],
        "pipeline_parallel_size": engine["pipeline_parallel_size"],
        "data_parallel_size": engine["data_parallel_size"],
        "dtype": engine["model_dtype"],
        "gpu_memory_utilization": engine["gpu_memory_utilization"],
        "enable_prefix_caching": engine["enable_prefix_caching"],
        "enforce_eager": engine["enforce_eager"],
        "max_num_batched_tokens": engine["max_num_batched_tokens"],
        "enable_expert_parallel": int(engine["expert_parallel_size"]) > 1,
        "max_num_seqs": engine["max_num_seqs"],
        "enable_sleep_mode": colocates or bool(engine["offload_kv_for_weight_sync"]),
        "enable_return_routed_experts": engine["enable_return_routed_experts"],
        "worker_extension_cls": _EXTENSION,
        "generation_config": "vllm",
        "language_model_only": engine["language_model_only"],
        "mm_processor_cache_gb": 0,
        "trust_remote_code": True,
        "distributed_executor_backend": engine["distributed_executor_backend"],
    }
    if engine["data_parallel_size"] > 1:  # each replica is started as a rank of its own
        arguments["data_parallel_rank"] = 0
    lora = at(given, "trainer.policy.model.lora", {})
    is_megatron = at(given, "trainer.strategy") == "megatron"
    merges = bool(at(given, "trainer.policy.megatron_config.lora_config.merge_lora", merges))
    if lora.get("rank", 0) and not (is_megatron and merges):
        arguments |= {"enable_lora": True, "max_lora_rank": lora["rank"], "max_loras": lora.get("max_loras", 1)}
    if engine["speculative_config"]:
        arguments["speculative_config"] = engine["speculative_config"]
    arguments |= engine["engine_init_kwargs"] or {}
    if engine["enable_pd"]:
        arguments["kv_transfer_config"] = dict(arguments.get("kv_transfer_config", {})) | {"kv_role": "kv_both"}
    arguments = {name: value for name, value in arguments.items() if value is not None}
    arguments.pop("chat_template", None)  # of the server, not of the engine
    arguments.pop("enable_log_requests", None)
    check_known(arguments)
    found.arguments = arguments

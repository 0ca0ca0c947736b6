"""prime-rl's examples: TOML over the defaults of its models of pydantic's, as it hands vLLM's arguments on."""

import tomllib
from collections.abc import Iterator
from typing import Any

from .examples import Configuration, Mirror, Unread, at, defaults, known_model

NAME = "prime-rl"
_CONFIGS = "packages/prime-rl-configs/src/prime_rl/configs"
_EXTENSIONS = {
    "nccl": "prime_rl.inference.vllm.worker.nccl.NCCLWeightUpdateWorker",
    "filesystem": "prime_rl.inference.vllm.worker.filesystem.FileSystemWeightUpdateWorker",
    "nixl": "prime_rl.inference.vllm.worker.nixl.NIXLWeightUpdateWorker",
}
VARIABLES = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
"""What its server sets where the user does not."""
_OF_THE_SERVER = ("chat_template", "tool_call_parser", "reasoning_parser", "api_server_count")
"""Fields that its server takes, and no engine."""
_GPUS_PER_NODE = 8


def configurations(mirror: Mirror) -> Iterator[Configuration]:
    """Of each TOML file in ``examples`` that has an ``[inference]``, and those that are its server's alone."""
    source = mirror.text(f"{_CONFIGS}/inference.py")
    engine, server = defaults(source, "VllmConfig"), defaults(source, "InferenceConfig")
    for path in mirror.paths("examples/", ".toml"):
        found = Configuration(path, variables=dict(VARIABLES))
        try:
            tree = tomllib.loads(mirror.text(path))
            alone = "/infer/" in path
            if not alone and "inference" not in tree:
                continue
            _fill(found, {"inference": tree} if alone else tree, engine, server)
        except (Unread, tomllib.TOMLDecodeError) as error:
            found.unread = str(error)
        yield found


def _fill(found: Configuration, tree: dict[str, Any], engine: dict[str, Any], server: dict[str, Any]) -> None:
    inference = server | tree["inference"]
    given = tree["inference"].get("vllm", {})
    vllm = engine | given
    found.model = known_model(given.get("model") or at(tree, "model.name"))
    kind = at(tree, "inference.deployment.type") or at(tree, "deployment.type", "single_node")
    if kind == "disaggregated":
        raise Unread("prefill and decode are servers of their own, which its launcher configures")
    _parallelism(vllm, tree, kind)
    if at(tree, "trainer.enable_router_replay"):
        vllm["enable_return_routed_experts"] = True
    lora = at(tree, "trainer.model.lora")
    if lora is not None:
        vllm |= {"enable_lora": True, "max_lora_rank": lora.get("rank", 16)}
    vllm.setdefault("logprobs_mode", "processed_logprobs")
    additional = {flag: True for flag in ("fp32_lm_head", "fp32_router_logits") if inference[f"enable_{flag}"]}
    if additional:
        vllm["additional_config"] = additional | vllm.get("additional_config", {})
    if inference["kv_cache_offload"]:
        vllm["kv_transfer_config"] = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    broadcast = at(tree, "weight_broadcast.type") or ("filesystem" if lora is not None or "model" in given else "nccl")
    vllm["worker_extension_cls"] = _EXTENSIONS[broadcast]
    dropped = {"model", *_OF_THE_SERVER} | {name for name in vllm if name.startswith("lora_target")}
    if not vllm["enable_lora"]:
        dropped |= {"max_loras", "max_cpu_loras", "max_lora_rank"}
    found.arguments = {name: value for name, value in vllm.items() if value is not None and name not in dropped}


def _parallelism(vllm: dict[str, Any], tree: dict[str, Any], kind: str) -> None:
    """Engines of data parallelism fill the GPUs that the deployment has."""
    tensor = int(vllm["tensor_parallel_size"])
    if kind == "single_node":
        gpus = int(at(tree, "deployment.num_infer_gpus", 1))
        if gpus != tensor * int(vllm["data_parallel_size"]):
            vllm["data_parallel_size"] = gpus // tensor
    elif not vllm["enable_expert_parallel"]:
        per_node = int(at(tree, "deployment.gpus_per_node", _GPUS_PER_NODE)) // tensor
        if int(vllm["data_parallel_size"]) == 1 and per_node > 1:
            vllm |= {"data_parallel_size": per_node, "data_parallel_size_local": per_node}

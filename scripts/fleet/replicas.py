"""The application: Ray Serve LLM with vLLM's server in each replica, behind HAProxy and Ray's request router.

Only with direct streaming is the replica's HTTP server vLLM's own, which has the route and the fingerprint. A replica
has a GPU where there is one, with a worker that Ray starts, and a core of a CPU otherwise.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.verify.harness.server import free_port

ROUTING = {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1"}
"""Ray reads them while it is imported, in every process."""
PATIENCE = dict.fromkeys(("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S"), "60")
"""On two cores beside engines that start, Ray's five seconds are short."""
PORTS = ("RAY_SERVE_HAPROXY_METRICS_PORT", "RAY_SERVE_HAPROXY_STATS_PORT")
HOST = "127.0.0.1"
MODEL = "fleet"
"""The name of the model."""
REPLICA, PROCESS = "x-replica", "x-replica-process"
"""Headers of every answer: which replica gave it, and the number of its process."""
CONTEXT = 1024
"""Tokens of a request at most."""
SHARED_MEMORY = 256 << 20
"""Bytes of Ray's object store, through which no answer goes."""
CACHE = 8 << 30
"""Bytes of keys and values on a GPU: said beforehand, because a replica measures while a killed one's are let go."""
ONGOING = 2
"""Requests in flight for each replica, where their number follows the load."""
_ROOT = str(Path(__file__).parents[2])


@contextmanager
def started() -> Iterator[str]:
    """A Ray of this machine alone, for applications of :func:`served`.

    Yields:
        The address of its router.
    """
    ports = {name: str(free_port()) for name in PORTS}
    os.environ.update(ROUTING | PATIENCE | ports | {"RAY_USAGE_STATS_ENABLED": "0"})
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (_ROOT, os.environ.get("PYTHONPATH"))))
    import ray
    from ray import serve

    ray.init(
        "local",
        num_cpus=64,  # Ray only counts them: a replica asks for two
        object_store_memory=SHARED_MEMORY,
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        _node_ip_address=HOST,  # a machine may have no other network
    )
    try:
        port = free_port()
        serve.start(http_options={"host": HOST, "port": port})
        yield f"http://{HOST}:{port}"
        serve.shutdown()
    finally:
        ray.shutdown()


@contextmanager
def served(
    folder: Path, replicas: int, variables: Mapping[str, str], at_most: int | None = None, waits: float = 5
) -> Iterator[None]:
    """An application, until the end of the context.

    Args:
        folder: of the model.
        replicas: how many, whatever happens to one of them.
        variables: of the environment of each replica.
        at_most: so many where more requests come than :data:`ONGOING` for each; None: the number is fixed.
        waits: seconds of a load before there is a replica more; there is one less after twice as many.
    """
    from ray import serve

    number: dict[str, Any] = {"num_replicas": replicas, "autoscaling_config": None}
    if at_most is not None:
        bounds = {"min_replicas": replicas, "initial_replicas": replicas, "max_replicas": at_most}
        times = {"metrics_interval_s": 1, "look_back_period_s": waits}
        delays = {"upscale_delay_s": waits, "downscale_delay_s": 2 * waits}
        number = {"autoscaling_config": {"target_ongoing_requests": ONGOING} | bounds | times | delays}
    serve.run(_application(folder, number, variables))
    yield
    serve.delete("default")


def running() -> int:
    """Replicas that run, as Ray Serve has it."""
    from ray import serve

    deployments = serve.status().applications["default"].deployments
    [model] = [one for name, one in deployments.items() if name.endswith(f":{MODEL}")]
    return model.replica_states.get("RUNNING", 0)


def _application(folder: Path, number: Mapping[str, Any], variables: Mapping[str, str]) -> Any:
    import torch
    from ray.serve.llm import LLMConfig, build_openai_app

    from .in_replica import NamedServer, Offline, OneCore

    environment = {"PYTHONPATH": os.environ["PYTHONPATH"], "HF_HUB_OFFLINE": "1", FLAG: "0"} | variables
    engine: dict[str, Any] = {"dtype": "bfloat16", "max_model_len": CONTEXT}
    if on_gpus := torch.cuda.is_available():
        engine |= {"gpu_memory_utilization": 0.4, "kv_cache_memory_bytes": CACHE}
    else:
        environment |= {"VLLM_CPU_KVCACHE_SPACE": "1"}
        engine |= {"max_num_batched_tokens": 16 * CONTEXT, "enforce_eager": True}
    config = LLMConfig(
        model_loading_config={"model_id": MODEL, "model_source": str(folder.resolve())},
        accelerator_config={"kind": "gpu" if on_gpus else "cpu"},
        server_cls=NamedServer,
        callback_config={"callback_class": Offline if on_gpus else OneCore},
        deployment_config={"health_check_period_s": 2} | number,
        runtime_env={"env_vars": environment},
        log_engine_metrics=False,
        engine_kwargs=engine,
    )
    return build_openai_app({"llm_configs": [config]})

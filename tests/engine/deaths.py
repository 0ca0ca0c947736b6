"""What becomes of an engine one of whose workers is killed: run by the driver, in the engine's process."""

import os
import signal
import time
from threading import Timer
from typing import Any

_ALIVE, _PATIENCE = 2.0, 90.0
"""Seconds."""


def a_worker_dies(llm: Any, rank: int) -> dict[str, Any]:
    """Kill a worker while requests run: what the engine says, how many seconds later, and which workers are left."""
    from vllm import SamplingParams

    workers = [worker.proc for worker in llm.llm_engine.engine_core.engine_core.model_executor.workers]
    started, error = time.monotonic(), None
    Timer(_ALIVE, os.kill, (workers[rank].pid, signal.SIGKILL)).start()
    try:
        while time.monotonic() - started < _PATIENCE:
            llm.generate(
                {"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=100, ignore_eos=True), use_tqdm=False
            )
    except Exception as raised:
        error = repr(raised)
    seconds = time.monotonic() - started - _ALIVE
    for worker in workers:
        worker.join(_PATIENCE)
    return {"error": error, "seconds": seconds, "left": [rank for rank, one in enumerate(workers) if one.is_alive()]}

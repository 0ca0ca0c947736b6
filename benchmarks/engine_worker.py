"""One engine of the engine benchmark, in a process of its own because the mode holds for a process.

usage: python -m benchmarks.engine_worker PLAN.json RESULT.json
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.engine_workloads import WORKLOADS, target_bits
from vllm_batch_invariant.verify.harness.mode import of_engine

STARTED = ".started"
"""How the name of the file ends by which an engine says so."""


def memory_used() -> int:
    """MiB taken on the first GPU by everybody; 0 without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    except (OSError, subprocess.CalledProcessError):
        return 0


def drafts_of(llm: Any) -> tuple[float, float]:
    """Verify steps of all requests so far, and drafts that they accepted; none without a drafter."""
    counted = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return counted["vllm:spec_decode_num_drafts"], counted["vllm:spec_decode_num_accepted_tokens"]


def tokens_per_step(before: tuple[float, float], after: tuple[float, float]) -> float:
    """Tokens that a verify step has given a request on average between two counts."""
    steps, accepted = (later - earlier for earlier, later in zip(before, after, strict=True))
    return 1 + accepted / steps if steps else 1.0


def wait_for(turn: Path) -> None:
    """Say that the engine has started, and wait until the file is there: engines that start at the same time are
    measured one by one.
    """
    turn.with_suffix(STARTED).touch()
    while not turn.exists():
        time.sleep(0.05)


def run(plan: dict[str, Any]) -> dict[str, Any]:
    """Start the engine, check the bits, and time every workload."""
    from vllm import LLM

    before = memory_used()
    started = time.perf_counter()
    llm = LLM(**plan["engine"])
    startup = time.perf_counter() - started
    if "turn" in plan:
        wait_for(Path(plan["turn"]))
    alone, among = target_bits(llm, plan["concurrent"])
    drafts = drafts_of if plan["engine"].get("speculative_config") else lambda _: (0.0, 0.0)
    samples, tokens = [], []
    for workload in WORKLOADS[plan["workloads"]]:
        counted = drafts(llm)
        workload.sample(llm)  # whatever happens once
        samples.append([workload.sample(llm) for _ in range(plan["samples"])])
        tokens.append(tokens_per_step(counted, drafts(llm)))
        print(f"  {workload.case}: {min(samples[-1]):.4g} to {max(samples[-1]):.4g} {workload.unit}", flush=True)
    return {
        "startup": startup,
        "memory": memory_used() - before,
        "mode": of_engine(),
        "same_bits": alone == among,
        "alone": alone,
        "accepted": tokens_per_step((0.0, 0.0), drafts(llm)),
        "tokens_per_step": tokens,
        "samples": samples,
    }


if __name__ == "__main__":
    plan_path, result_path = map(Path, sys.argv[1:])
    result_path.write_text(json.dumps(run(json.loads(plan_path.read_text()))))

"""One engine of the engine benchmark, in a process of its own because the mode holds for a process.

usage: python -m benchmarks.engine_worker PLAN.json RESULT.json
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.engine_workloads import WORKLOADS, most_adapters, target_bits
from vllm_batch_invariant.verify.harness.mode import of_engine

STARTED, ENDED = ".started", ".ended"
"""How the names of the files end by which an engine says that it has started, and that a turn has ended."""
POLL = 0.02
"""Seconds between two looks at those files."""


def memory_used() -> int:
    """MiB taken by everybody on the first GPU that this process sees; 0 without one."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", f"--id={first}"]
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


class Turns:
    """An engine's turns among those that share the GPU: one has it for a sample. What arithmetic heats is slower
    afterwards, and so is whoever is measured last, where each has the GPU until it ends.

    Args:
        path: begins the names of the files by which the turns are given and given back; None: there is nobody else.
    """

    def __init__(self, path: str | None) -> None:
        self._path, self._number = path, 0
        if path is not None:
            Path(path + STARTED).touch()

    def _file(self, ending: str = "") -> Path:
        return Path(f"{self._path}.{self._number}{ending}")

    def __enter__(self) -> None:
        while self._path is not None and not self._file().exists():
            time.sleep(POLL)

    def __exit__(self, *_: object) -> None:
        if self._path is not None:
            self._file(ENDED).touch()
            self._number += 1


def run(plan: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Start the engine, check the bits, and time every workload; gives what is known after each of them."""
    from vllm import LLM

    before = memory_used()
    started = time.perf_counter()
    llm = LLM(**plan["engine"])
    startup = time.perf_counter() - started
    turn = Turns(plan.get("turn"))
    with turn:
        alone, among = target_bits(llm, plan["concurrent"], most_adapters(plan["workloads"]))
    drafts = drafts_of if plan["engine"].get("speculative_config") else lambda _: (0.0, 0.0)
    samples: list[list[float]] = []
    tokens: list[float] = []
    known = {
        "startup": startup,
        "memory": memory_used() - before,
        "mode": of_engine(),
        "same_bits": alone == among,
        "alone": alone,
        "accepted": 1.0,
        "tokens_per_step": tokens,
        "samples": samples,
    }
    yield known
    for workload in WORKLOADS[plan["workloads"]]:
        counted, of_workload = drafts(llm), []
        with turn:
            workload.sample(llm)  # whatever happens once
        for _ in range(plan["samples"]):
            with turn:
                of_workload.append(workload.sample(llm))
        samples.append(of_workload)
        tokens.append(tokens_per_step(counted, drafts(llm)))
        of = f"{plan['provider']}, " if "provider" in plan else ""
        print(f"  {of}{workload.case}: {min(of_workload):.4g} to {max(of_workload):.4g} {workload.unit}", flush=True)
        known["memory"] = memory_used() - before
        yield known | {"accepted": tokens_per_step((0.0, 0.0), drafts(llm))}


def keep(result: dict[str, Any], path: Path) -> None:
    """Write a result where an older one is read at any time."""
    whole = path.with_suffix(".new")
    whole.write_text(json.dumps(result))
    whole.replace(path)


if __name__ == "__main__":
    plan_path, result_path = map(Path, sys.argv[1:])
    for result in run(json.loads(plan_path.read_text())):
        keep(result, result_path)

"""An engine in each of the processes that torchrun has started, as a colocated trainer has it: the executor
``external_launcher``. Every process schedules the same requests, and has one worker of the model.

usage: torchrun --nproc-per-node 2 -m tests.engine.launched ANSWERS MODEL OTHER ARGUMENT...

ANSWERS.RANK gets what the process was answered, in JSON: with the weights of MODEL, and after each way to replace them
by those of OTHER, and back.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.engine import reloads
from tests.engine.plans import GREEDY, SEEDED, alone_and_among
from vllm_batch_invariant.verify.harness.worker_main import Driver


def ways(llm: Any) -> dict[str, Any]:
    """Functions of an engine and a checkpoint's folder."""
    found = {"reload": reloads.by_reload_weights, "by name": reloads.by_name, "by hand": reloads.by_hand}
    if llm.llm_engine.vllm_config.model_config.enable_sleep_mode:
        found["asleep"] = lambda llm, folder: reloads.asleep_while_loading(llm, "sleep_of_engine", folder)
        found["workers asleep"] = lambda llm, folder: reloads.asleep_while_loading(llm, "sleep_of_workers", folder)
    return found


def main(answers: str, model: str, other: str, *arguments: str) -> None:
    """Run one process's engine."""
    driver, done = Driver(), {}
    driver.start(
        [
            *(model, "--distributed-executor-backend=external_launcher"),
            *(f"--worker-extension-cls={reloads.EXTENSION}", *arguments),
        ]
    )
    for step in alone_and_among():
        done[step["name"]] = driver.step(step)["requests"]
    for name, way in ways(driver.llm).items():
        for folder, which in ((other, "other"), (model, "back")):
            way(driver.llm, folder)
            told = {"name": f"{name}, {which}", "requests": [*GREEDY, SEEDED]}
            done[told["name"]] = driver.step(told)["requests"]
    if driver.llm.llm_engine.vllm_config.model_config.enable_sleep_mode:
        reloads.sleep(driver.llm, 1)
        done["slept, back"] = driver.step({"name": "slept", "requests": [*GREEDY, SEEDED]})["requests"]
    Path(f"{answers}.{os.environ['RANK']}").write_text(json.dumps(done))
    torch.distributed.barrier()


if __name__ == "__main__":
    main(*sys.argv[1:])

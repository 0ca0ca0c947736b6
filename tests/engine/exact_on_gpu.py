"""Engines of exact arithmetic on a GPU before its record says that it has been run there. As a program this module is
the driver of such an engine, which differs from the usual one in that record alone.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from vllm_batch_invariant.envs import ARITHMETIC
from vllm_batch_invariant.verify.harness import worker, worker_main

SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.7, "seed": -3, "top_k": 40},
    {"temperature": 1.3, "seed": 2**62, "top_p": 0.8},
    {"temperature": 1.0, "seed": 11, "top_k": 100, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.9, "seed": 5, "repetition_penalty": 1.3, "frequency_penalty": 0.7, "presence_penalty": 0.2},
    {"temperature": 0.0, "repetition_penalty": 1.2, "presence_penalty": -0.3},
)
"""One of each operation of the sampler."""


def engine(model: str, arguments: Sequence[str], **environment: str) -> worker.Engine:
    """An engine to be started within :func:`driven`.

    Args:
        arguments: of ``vllm serve``.
    """
    paths = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH"))))
    settings = {"PYTHONPATH": paths, "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", ARITHMETIC.name: "exact"}
    return worker.Engine(model, arguments, "1", settings | environment, patience=240)


def driven() -> AbstractContextManager[Any]:
    """A block in which engines have this driver."""
    return patch.object(worker, "DRIVER", "tests.engine.exact_on_gpu")


def main(descriptor: int) -> None:
    """Execute commands in an engine's process."""
    from vllm_batch_invariant.integration.devices import cuda

    cuda.DEVICE = replace(cuda.DEVICE, has_exact_arithmetic=True)
    worker_main.main(descriptor)


if __name__ == "__main__":
    # imported by name, so that workers in other processes find the functions of these modules
    import_module("tests.engine.exact_on_gpu").main(int(sys.argv[1]))

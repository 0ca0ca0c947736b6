"""Programs that run GPU kernels in Triton's interpreter, and one that compiles them. Each takes a core for up to a
minute, so they run beside the tests that wait for engines.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

INTERPRETED = {
    "attention.interpreted_attention": 27,
    "attention.interpreted_flex": 47,
    "norm.interpreted_norm": 3,
    "sampling.interpreted_sampling": 7,
    "softmax.interpreted_softmax": 4,
}
"""By program, how many of its checks print "ok"."""
CHECKS = INTERPRETED | {"compiled_kernels": 4}
_running: dict[str, tuple[subprocess.Popen, IO[str]]] = {}


def start(program: str) -> None:
    """Start one of :data:`CHECKS` unless it runs."""
    if program not in _running:
        output = tempfile.TemporaryFile("w+")  # noqa: SIM115 - open as long as the program runs
        process = subprocess.Popen(
            [sys.executable, "-m", f"tests.ops.{program}"],
            cwd=Path(__file__).parents[2],
            env=os.environ | ({"TRITON_INTERPRET": "1"} if program in INTERPRETED else {}),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
        )
        _running[program] = process, output


def result(program: str, timeout: float = 600) -> tuple[int, str]:
    """Wait for a program: its exit status and what it printed.

    Raises:
        subprocess.TimeoutExpired: it takes longer than ``timeout`` seconds.
    """
    start(program)
    process, output = _running[program]
    status = process.wait(timeout)
    output.seek(0)
    return status, output.read()


def stop() -> None:
    """End those that nobody waits for any more."""
    for process, output in _running.values():
        process.kill()
        process.wait()
        output.close()
    _running.clear()

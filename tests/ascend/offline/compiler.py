"""From linalg to the final HIVM IR with ascendnpu-ir's compiler, called as triton-ascend 3.2.0 does for A2 and A3."""

import os
import re
import subprocess
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ascendnpuir

ARCHITECTURE = "Ascend910B2"
_OPTIONS = (
    f"--target={ARCHITECTURE}",
    "--enable-auto-multi-buffer=True",
    "--enable-auto-bind-sub-block=True",
    "--enable-hfusion-compile=true",
    "--enable-hivm-compile=true",
    "--enable-triton-kernel-compile=true",
)
_HIVMC = """#!/bin/sh
# CANN's closed last step, which makes the binary. This one makes none, so that the steps before it can be seen.
echo "hivmc 1.2.0"
"""


@dataclass(frozen=True)
class Hivm:
    """What the compiler made of a kernel: ``text`` is empty if it failed."""

    text: str
    messages: str

    @property
    def core(self) -> str:
        """AIC: cube cores only. AIV: vector cores only. MIX: both."""
        return re.search(r"hivm\.module_core_type<(\w+)>", self.text)[1]

    @property
    def block_syncs(self) -> int:
        """Synchronisations between cores."""
        return len(re.findall(r"hivm\.hir\.sync_block", self.text))

    @property
    def accumulators(self) -> set[str]:
        """Types of the buffers next to the cube, where products are accumulated."""
        return set(re.findall(r"pointer_cast\([^)]*\)[^:]*: memref<([0-9a-z]+), #hivm\.address_space<cc>>", self.text))

    @property
    def products(self) -> list[tuple[int | None, ...]]:
        """(rows, depth, columns) of every step on the cube; None where that is known at run time only."""
        constants = dict(re.findall(r"(%c[\w-]+) = arith\.constant (\d+) : index", self.text))
        calls = re.findall(r"func\.call @mma_tile\w*\(([^)]*)\)", self.text)
        sizes = [[constants.get(argument.strip()) for argument in call.split(",")[3:6]] for call in calls]
        return [tuple(None if size is None else int(size) for size in call) for call in sizes]


class Compiler:
    """Runs the compiler on several kernels at a time."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        hivmc = folder / "hivmc"
        hivmc.write_text(_HIVMC)
        hivmc.chmod(0o755)
        self._pool = ThreadPoolExecutor(os.cpu_count())

    def submit(self, linalg: str) -> Future[Hivm]:
        return self._pool.submit(self._compile, linalg)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _compile(self, linalg: str) -> Hivm:
        with tempfile.TemporaryDirectory(dir=self._folder) as name:
            source, out = Path(name, "kernel.mlir"), Path(name, "module.hivm.opt.mlir")
            source.write_text(re.sub(r', mix_mode\s*=\s*"[^"]*"', "", linalg))
            done = subprocess.run(
                [
                    Path(ascendnpuir.__file__).parent / "bin" / "bishengir-compile",
                    source,
                    *_OPTIONS,
                    f"--save-temps={name}",
                    "-o",
                    Path(name, "kernel"),
                ],
                env={**os.environ, "PATH": f"{self._folder}{os.pathsep}{os.environ['PATH']}"},
                capture_output=True,
                text=True,
                timeout=120,
            )
            made = done.returncode == 0 and out.exists()
            return Hivm(out.read_text() if made else "", done.stdout + done.stderr)


def check_fits(hivm: Hivm) -> None:
    """Fail unless a kernel fits into a core's memories, with every load overlapped as the compiler wants it first."""
    errors = re.findall(r"error: (.*)", hivm.messages)
    assert hivm.text, f"does not compile: {errors or hivm.messages}"
    assert not errors, f"compiles with errors: {errors}"
    assert "[NOTE]" not in hivm.messages, f"fits only after a retry: {hivm.messages}"


def check_rows(hivm: Hivm) -> None:
    """Fail unless a kernel fits and stays on the vector cores, each of which works alone."""
    check_fits(hivm)
    assert hivm.core == "AIV", f"runs on {hivm.core}"
    assert hivm.block_syncs == 0, f"{hivm.block_syncs} synchronisations between cores"


def check_product(hivm: Hivm, rows: int, depth: int | None, columns: int | None) -> None:
    """Fail unless a kernel fits, stays on the cube cores and has one step of a static size.

    Args:
        rows: rows of a step.
        depth: its part of K; None if the last one is shorter.
        columns: its columns; None if the last tile is narrower.
    """
    check_fits(hivm)
    assert hivm.core == "AIC", f"runs on {hivm.core}, with {hivm.block_syncs} synchronisations between cores"
    assert hivm.block_syncs == 0, f"{hivm.block_syncs} synchronisations between cores"
    assert hivm.products == [(rows, depth, columns)], f"steps of {hivm.products}, not {(rows, depth, columns)}"
    assert len(hivm.accumulators) == 1, f"accumulators {hivm.accumulators}"
    assert next(iter(hivm.accumulators)).endswith("xf32"), f"accumulators {hivm.accumulators}"

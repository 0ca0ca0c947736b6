"""Commands on this machine's GPUs, several at a time, within a hard limit: ``python -m scripts.gpu_jobs JOBS OUT``.

JOBS is a TOML file: scripts/untried.toml has what no GPU has passed yet, scripts/covered.toml some of what one has. A
job has a name, a command for the shell, or what stands for ``{tests}`` in the one of the file, the number of its GPUs
(1) and the seconds that it may take (300); what is ``alone`` shares its GPUs with nobody, as a timing must. Jobs begin
in their order, where there is room. One whose time is over gets the signal of Ctrl-C, so that pytest says what it has
found, and is ended soon after with all that it has started. Each leaves ``OUT/NAME.log`` and a line of
``OUT/jobs.txt``.
"""

import argparse
import os
import signal
import subprocess
import sys
import threading
import time
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

LAST_WORDS = 15.0
"""Seconds that a job has after Ctrl-C."""
_POLL = 0.2


@dataclass(frozen=True)
class Job:
    """A command.

    Attributes:
        gpus: how many it uses.
        seconds: that it may take.
        alone: whether nothing else may run on them.
    """

    name: str
    command: str
    gpus: int = 1
    seconds: float = 300
    alone: bool = False


def read(path: Path) -> list[Job]:
    """The jobs of a file.

    Raises:
        TypeError: one has a key that jobs have not.
    """
    content = tomllib.loads(path.read_text())
    jobs = []
    for entry in content["job"]:
        tests = entry.pop("tests", None)
        of_file = {} if tests is None else {"command": content["command"].replace("{tests}", tests)}
        jobs.append(Job(**of_file, **entry))
    return jobs


def end(process: subprocess.Popen, patience: float) -> None:
    """Ask a process and all that it has started to end, as Ctrl-C does, and kill what is left."""
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
        for one in started:  # engines lead sessions of their own
            with suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(started, 5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Machine:
    """GPUs, and the jobs that run on them.

    Args:
        gpus: how many there are; at least one.
        each: jobs on a GPU at a time.
        shared: jobs at a time that use several GPUs: those wait for each other in their kernels.
        out: folder for logs.
        seconds: after which nothing runs.
    """

    def __init__(self, gpus: int, each: int, shared: int, out: Path, seconds: float) -> None:
        self._free, self._each, self._shared = [each] * gpus, each, shared
        self._out, self._began, self._until = out, time.monotonic(), time.monotonic() + seconds
        self._lock = threading.Lock()
        self.statuses: dict[str, int | None] = {}
        """Of jobs that have ended; None of those whose time was over."""

    def say(self, text: str) -> None:
        """A line, with the seconds since the beginning."""
        line = f"{time.monotonic() - self._began:6.1f} s  {text}"
        print(line, flush=True)
        with self._lock, (self._out / "jobs.txt").open("a") as file:
            print(line, file=file)

    def run(self, jobs: Sequence[Job]) -> list[Job]:
        """Run jobs; gives those that were not begun in time, or need more GPUs than there are."""
        left, threads = list(jobs), []
        while left and time.monotonic() < self._until - LAST_WORDS:
            found = self._next(left)
            if found is None:
                if not any(thread.is_alive() for thread in threads):
                    break
                time.sleep(_POLL)
                continue
            left.remove(found[0])
            threads.append(threading.Thread(target=self._run, args=found))
            threads[-1].start()
        for thread in threads:
            thread.join()
        return left

    def _room(self, job: Job) -> int:
        return self._each if job.alone else 1

    def _next(self, left: Sequence[Job]) -> tuple[Job, list[int]] | None:
        """The first job that has room, and its GPUs, those with the fewest others; behind one that wants its GPUs alone
        nothing begins.
        """
        with self._lock:
            for job in left:
                emptiest = sorted(range(len(self._free)), key=lambda gpu: -self._free[gpu])[: job.gpus]
                fits = len(emptiest) == job.gpus and all(self._free[gpu] >= self._room(job) for gpu in emptiest)
                if fits and (job.gpus == 1 or self._shared):
                    self._take(job, emptiest, 1)
                    return job, sorted(emptiest)
                if job.alone:
                    return None
        return None

    def _take(self, job: Job, gpus: Sequence[int], sign: int) -> None:
        self._shared -= sign * (job.gpus > 1)
        for gpu in gpus:
            self._free[gpu] -= sign * self._room(job)

    def _run(self, job: Job, gpus: list[int]) -> None:
        named = ",".join(map(str, gpus))
        self.say(f"{job.name} begins on {named}")
        began, path = time.monotonic(), self._out / f"{job.name}.log"
        limit = max(0.0, min(job.seconds, self._until - LAST_WORDS - began))
        with path.open("w") as log:
            process = subprocess.Popen(
                ["bash", "-c", job.command],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": named, "JOB": job.name},
                start_new_session=True,
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                status = None
            end(process, LAST_WORDS if status is None else 0)
        lines = [line for line in path.read_text(errors="replace").splitlines() if line.strip()]
        how = "its time was over" if status is None else f"exit status {status}"
        self.say(f"{job.name}: {how} after {time.monotonic() - began:.0f} s: {lines[-1][:150] if lines else ''}")
        with self._lock:
            self.statuses[job.name] = status
            self._take(job, gpus, -1)


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 every job ended with 0, 1 one did not, 2 one was not begun or was cut short."""
    parser = argparse.ArgumentParser(prog="python -m scripts.gpu_jobs", description=__doc__)
    parser.add_argument("jobs", type=Path, help="a TOML file")
    parser.add_argument("out", type=Path, help="folder for logs")
    parser.add_argument("--seconds", type=float, default=560, help="after which nothing runs (default: 560)")
    parser.add_argument(
        "--each",
        type=int,
        default=2,
        help="jobs on a GPU at a time; engines of more than eight on 64 cores take twice as long to start (default: 2)",
    )
    parser.add_argument("--shared", type=int, default=2, help="jobs at a time on several GPUs (default: 2)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help="these jobs alone")
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count(), help="to use (default: all)")
    options = parser.parse_args(argv)
    jobs = [job for job in read(options.jobs) if options.only is None or job.name in options.only]
    options.out.mkdir(parents=True, exist_ok=True)
    # who runs this in the background has Ctrl-C ignored, and so would each job
    signal.signal(signal.SIGINT, signal.default_int_handler)
    machine = Machine(max(options.gpus, 1), options.each, options.shared, options.out, options.seconds)
    left = machine.run(jobs)
    for job in left:
        machine.say(f"{job.name} was not begun")
    statuses = machine.statuses.values()
    if any(status for status in statuses):
        return 1
    return 2 if left or None in statuses else 0


if __name__ == "__main__":
    sys.exit(main())

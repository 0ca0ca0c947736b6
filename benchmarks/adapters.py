"""Benchmark of LoRA adapters on a GPU, both of their products: `python -m benchmarks.adapters`. Bits, then time."""

import argparse
import itertools
import multiprocessing
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import torch

from benchmarks.record import DATA, Bits, Setting, case_text, update
from benchmarks.shapes import MODELS, Model
from benchmarks.spread import Spread
from benchmarks.sweep import Findings
from vllm_batch_invariant.ops.common.graph_timer import GraphTimer, copies_beyond_cache
from vllm_batch_invariant.ops.lora import LoraReduction, cuda

ROWS = (1, 8, 64, 2048)
RANKS = (16, 64)
ADAPTERS = (1, 8)
"""Of the rows of a step; a server has as many slots."""
_REPLAYS = 9
_COMPILERS = 8
_EXPECTED_MICROSECONDS = {True: 8.0, False: 80.0}
"""Of few rows and of many."""
_MANY = 256


@dataclass(frozen=True)
class Projection:
    """A linear layer with adapters.

    Attributes:
        name: of it.
        k: elements of its input.
        columns: of each slice of its output.
    """

    name: str
    k: int
    columns: tuple[int, ...]

    @classmethod
    def of(cls, model: Model) -> tuple[Self, ...]:
        """Those of a model's layers on one worker."""
        heads, kv_heads = (number * model.head_size for number in (model.heads, model.kv_heads))
        return (
            cls("qkv", model.hidden, (heads, kv_heads, kv_heads)),
            cls("o", heads, (model.hidden,)),
            cls("gate_up", model.hidden, (model.intermediate, model.intermediate)),
            cls("down", model.intermediate, (model.hidden,)),
        )

    def case(self, rows: int, rank: int, adapters: int) -> str:
        """As it is written in the data."""
        sizes = {"M": rows, "N": sum(self.columns), "K": self.k, "slices": len(self.columns)}
        return case_text(projection=self.name, **sizes, rank=rank, adapters=adapters, dtype="bfloat16")


@dataclass(frozen=True, eq=False)
class Step:
    """Rows of a layer whose adapters lie in as many slots; each row has one.

    Attributes:
        y: [rows, N]
        x: [rows, K]
        adapters: copies of a and b, each a tuple of a tensor a slice, of which calls use one after the other.
        slots: [rows] int64.
    """

    y: torch.Tensor
    x: torch.Tensor
    adapters: Sequence[tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]]
    slots: torch.Tensor

    @classmethod
    def random(cls, of: Projection, rows: int, rank: int, slots: int, cache: int, device: str) -> Self:
        """With as many copies of the adapters as are more than the cache holds."""
        generator = torch.Generator(device).manual_seed(0)

        def drawn(*shape: int) -> torch.Tensor:
            made = torch.randn(*shape, generator=generator, dtype=torch.bfloat16, device=device)
            return made.mul_(shape[-1] ** -0.5)

        a = tuple(drawn(slots, 1, rank, of.k) for _ in of.columns)
        b = tuple(drawn(slots, 1, n, rank) for n in of.columns)
        copies = copies_beyond_cache(sum(one.nbytes for one in (*a, *b)), cache)
        others = [tuple(tuple(one.clone() for one in part) for part in (a, b)) for _ in range(copies - 1)]
        used = torch.arange(rows, device=device) % slots
        return cls(drawn(rows, sum(of.columns)), drawn(rows, of.k), [(a, b), *others], used)

    def first(self, rows: int) -> "Step":
        """The first rows alone."""
        return replace(self, y=self.y[:rows], x=self.x[:rows], slots=self.slots[:rows])

    @property
    def reduction(self) -> LoraReduction:
        """Of the layer."""
        return LoraReduction.of_device("cuda", self.x.shape[1], self.x.dtype)

    @property
    def moved_bytes(self) -> int:
        """Adapters once, the rows' input once, and their output read and written."""
        adapters = sum(one.nbytes for part in self.adapters[0] for one in part)
        return adapters * min(1, len(self.slots)) + self.x.nbytes + 2 * self.y.nbytes


Prepare = Callable[[Step], Callable[[torch.Tensor, Any], object]]
"""Does once a step what an engine does, and gives what adds adapters, a pair of a and b, to y in place."""


def _ours(step: Step, schedule: cuda.LoraSchedule | None = None) -> Callable[[torch.Tensor, Any], object]:
    """Rows are grouped once for all layers, as in an engine."""
    groups = cuda.RowGroups.empty(len(step.y), len(step.adapters[0][0][0]), step.y.dtype, step.y.device)
    groups.set(step.slots)
    return lambda y, adapter: cuda.add_adapters(y, step.x, *adapter, groups, step.reduction, schedule)


def _ours_by_slots(step: Step, schedule: cuda.LoraSchedule | None = None) -> Callable[[torch.Tensor, Any], object]:
    """Every call groups them."""
    return lambda y, adapter: cuda.add_adapters(y, step.x, *adapter, step.slots, step.reduction, schedule)


def _stock(step: Step) -> Callable[[torch.Tensor, Any], object]:
    """vLLM's two operations of a layer."""
    from vllm.lora.ops.triton_ops import LoRAKernelMeta, lora_expand, lora_shrink

    slots = len(step.adapters[0][0][0])
    meta = LoRAKernelMeta.make(slots, len(step.y), step.y.device)
    meta.prepare_tensors(step.slots)
    arguments = meta.meta_args(len(step.y), False)

    def call(y: torch.Tensor, adapter: Any) -> None:
        a, b = adapter
        u = torch.empty(len(a), len(y), b[0].shape[3], dtype=torch.float32, device=y.device)
        lora_shrink(step.x, list(a), u, *arguments, 1.0)
        lora_expand(u, list(b), y, *arguments, offset_start=0, add_inputs=True)

    return call


def _native(step: Step) -> Callable[[torch.Tensor, Any], object]:
    """The same in vLLM's own batch-invariant mode."""
    call = _stock(step)

    def in_mode(y: torch.Tensor, adapter: Any) -> None:
        with _native_mode():
            call(y, adapter)

    return in_mode


@contextmanager
def _native_mode() -> Iterator[None]:
    """vLLM reads its variable once, when its operations are imported."""
    from vllm.lora.ops.triton_ops import lora_shrink_op, utils

    modules = lora_shrink_op, utils
    before = [module.is_batch_invariant for module in modules]
    for module in modules:
        module.is_batch_invariant = True
    try:
        yield
    finally:
        for module, value in zip(modules, before, strict=True):
            module.is_batch_invariant = value


PROVIDERS: dict[str, tuple[Prepare, bool]] = {
    "stock": (_stock, False),
    "native": (_native, False),
    "ours": (_ours, True),
    "ours-by-slots": (_ours_by_slots, True),
}
"""And whether the bits of a row are promised to be its own."""


def dense(step: Step) -> torch.Tensor:
    """What y becomes of products of the operation ``linear``."""
    return cuda.composed(step.y, step.x, *step.adapters[0], step.slots, step.reduction)


@dataclass
class Sweep(Findings):
    """A run over projections, and what it found."""

    providers: Mapping[str, tuple[Prepare, bool]]
    rows: Sequence[int]
    timer: GraphTimer
    cache: int
    """Bytes of the L2 cache."""
    device: str = "cuda"
    expected: Callable[[Step], torch.Tensor] = dense
    """What rows become."""

    def measure(self, of: Projection, rank: int, adapters: int) -> None:
        """Check every provider with every number of rows, then time it."""
        most = Step.random(of, max(self.rows), rank, adapters, self.cache, self.device)
        expected = self.expected(most)
        for rows in self.rows:
            step, case = most.first(rows), of.case(rows, rank, adapters)
            bits = {name: self._bits(name, case, step, expected) for name in self.providers}
            self._time(case, step, bits)

    def _bits(self, name: str, case: str, step: Step, expected: torch.Tensor) -> Bits:
        """Whether rows, all and the last alone, have those of dense products."""
        prepare, promises = self.providers[name]
        if not promises:
            return "-"
        rows = len(step.y)
        last = replace(step, y=step.y[-1:], x=step.x[-1:], slots=step.slots[-1:])
        right = True
        for part, wanted in ((step, expected[:rows]), (last, expected[rows - 1 : rows])):
            y = part.y.clone()
            prepare(part)(y, part.adapters[0])
            right &= torch.equal(y, wanted)
        if not right:
            self.problem(f"BITS DIFFER: {name} {case}")
        return "equal" if right else "differ"

    def _time(self, case: str, step: Step, bits: Mapping[str, Bits]) -> None:
        ways = []
        for prepare, _ in self.providers.values():
            call, y = prepare(step), step.y.clone()
            ways.append([partial(call, y, adapter) for adapter in step.adapters])
        try:
            samples = self.timer.time(ways, _EXPECTED_MICROSECONDS[len(step.y) < _MANY], _REPLAYS)
        except Exception as error:
            self.failed(case, error)
            return
        spreads = {name: Spread.of(times) for name, times in zip(self.providers, samples, strict=True)}
        print(case)
        for name, spread in spreads.items():
            rates = {("bandwidth", "GB/s"): spread.rate(step.moved_bytes / 1e3)}
            self.add("adapters", name, case, spread, spreads.get("stock"), rates, bits[name])


def candidates(rows: int) -> Iterator[cuda.LoraSchedule]:
    """Schedules worth timing for so many rows, grouped before."""
    many = rows >= _MANY
    tiles = (
        (16, 128, 4, 5), (16, 256, 4, 3), (16, 256, 2, 3), (16, 128, 1, 5), (32, 128, 4, 4), (32, 256, 4, 3),
        (64, 128, 4, 4), (64, 64, 4, 5),
    )  # fmt: skip
    shrinks = [
        cuda.ShrinkSchedule(*tile, by_leaf) for tile in tiles for by_leaf in ((True, False) if many else (True,))
    ]
    shrinks += [cuda.ShrinkSchedule(rows, 256, warps, 1, True, True) for rows, warps in ((16, 4), (16, 8), (32, 8))]
    expands = [
        cuda.ExpandSchedule(block_n, tiles, warps)
        for block_n, tiles, warps in (
            *((32, 1, 2), (32, 1, 4), (64, 1, 2), (64, 1, 4), (128, 1, 4), (128, 2, 4)),
            *(((128, 4, 4), (128, 8, 4), (64, 8, 4), (256, 4, 8)) if many else ()),
        )
    ]
    for block_m in (16, 32) if rows > 16 else (16,):
        first = cuda.LoraSchedule(block_m, shrinks[0], expands[0])
        yield from (replace(first, shrink=one) for one in shrinks)
        yield from (replace(first, expand=one) for one in expands[1:])


def best_schedules(of: Projection, rank: int, adapters: int, rows: int, timer: GraphTimer, cache: int) -> list[str]:
    """Lines that say which candidates are the fastest: of the first product with one tile of the second, and of the
    second with one of the first.
    """
    step = Step.random(of, rows, rank, adapters, cache, "cuda")
    found = list(candidates(rows))
    y = step.y.clone()
    ways = [[partial(_ours(step, one), y, adapter) for adapter in step.adapters] for one in found]
    samples = timer.time(ways, _EXPECTED_MICROSECONDS[rows < _MANY], 5)
    medians = (Spread.of(one).p50 for one in samples)
    times = sorted(zip(medians, found, strict=True), key=itemgetter(0))
    lines = []
    for block_m in sorted({one.block_m for one in found}):
        for kind in ("shrink", "expand"):
            other = "expand" if kind == "shrink" else "shrink"
            first = getattr(next(one for one in found if one.block_m == block_m), other)
            same = [(t, one) for t, one in times if one.block_m == block_m and getattr(one, other) == first]
            lines += [f"  {block_m:3} {t:8.3f} us  {getattr(one, kind)}" for t, one in same[:5]]
    return [of.case(rows, rank, adapters), *lines]


def compile_all(of: Projection, rank: int, rows: Sequence[int], schedules: bool) -> None:
    """Launch everything that this project has for a projection once: another process finds it compiled."""
    for count, adapters in itertools.product(rows, ADAPTERS):
        step = Step.random(of, count, rank, adapters, 0, "cuda")
        y = step.y.clone()
        for prepare in (_ours, _ours_by_slots):
            prepare(step)(y, step.adapters[0])
        for one in candidates(count) if schedules and adapters == 1 else ():
            _ours(step, one)(y, step.adapters[0])
    dense(step)
    torch.cuda.synchronize()


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adapters",
        description="Check the bits of rows with LoRA adapters, alone and among others, then time both products of a "
        "layer's adapters against vLLM's. Exit status: 0 all well, 1 bits differ or a call failed, 2 nothing was "
        "measured.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=DATA / "adapters.csv", help="CSV file to bring up to date")
    parser.add_argument("--model", default="Qwen3-8B", choices=[one.name for one in MODELS], help="whose layers")
    parser.add_argument("--projections", nargs="+", metavar="NAME", help="only these: qkv, o, gate_up, down")
    parser.add_argument("--rows", nargs="+", type=int, metavar="M", default=ROWS, help="numbers of rows")
    parser.add_argument("--ranks", nargs="+", type=int, metavar="R", default=RANKS)
    parser.add_argument("--schedules", action="store_true", help="time candidate schedules instead, and print the best")
    parser.add_argument("--limit-seconds", type=float, default=80.0, help="start nothing new after this long")
    options = parser.parse_args(arguments)
    of_model = Projection.of(next(one for one in MODELS if one.name == options.model))
    options.layers = [one for one in of_model if not options.projections or one.name in options.projections]
    if not options.layers or min((*options.rows, *options.ranks)) < 1:
        parser.error("no such projection, or no row")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    started, options = time.monotonic(), _parse(arguments)
    if not torch.cuda.is_available():
        print("the benchmark of adapters needs an NVIDIA GPU", file=sys.stderr)
        return 2
    rows = [[one] for one in options.rows] if options.schedules else [options.rows]
    of_ours = list(itertools.product(options.layers, options.ranks, rows, [options.schedules]))
    with multiprocessing.get_context("spawn").Pool(min(_COMPILERS, len(of_ours))) as pool:
        compiled = pool.starmap_async(compile_all, of_ours, chunksize=1)
        providers = dict(PROVIDERS)
        try:
            import vllm.lora.ops.triton_ops  # noqa: F401 - while others compile
        except ImportError as error:
            print(f"stock is left out: {error}", file=sys.stderr)
            del providers["stock"], providers["native"]
        compiled.get()
    print(f"compiled after {time.monotonic() - started:.0f} s", flush=True)
    cache = torch.cuda.get_device_properties().L2_cache_size
    sweep = Sweep(
        providers=providers, rows=sorted(set(options.rows)), timer=GraphTimer(), setting=Setting.here(), cache=cache
    )
    print(f"{sweep.setting.gpu}, {sweep.setting.versions}", flush=True)
    for of, rank, adapters in itertools.product(options.layers, options.ranks, ADAPTERS):
        if time.monotonic() - started > options.limit_seconds:
            print("the rest is left out: --limit-seconds", file=sys.stderr)
            break
        if options.schedules:
            for rows in options.rows:
                print(*best_schedules(of, rank, adapters, rows, sweep.timer, cache), sep="\n", flush=True)
            continue
        sweep.measure(of, rank, adapters)
        if sweep.measurements:
            update(options.out, sweep.measurements)
        print(f"{time.monotonic() - started:.0f} s", flush=True)
    return sweep.status("BITS DIFFER and FAILED")


if __name__ == "__main__":
    sys.exit(main())

"""Benchmark of the linear operation: `python -m benchmarks.linear`. Bits first, then time."""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks import linear_providers, operands
from benchmarks.linear_providers import Provider
from benchmarks.linear_summary import print_summary
from benchmarks.operands import FORMATS, Format
from benchmarks.record import DATA, Bits, Setting, case_text, write
from benchmarks.roofline import Ceilings, Work, measure_ceilings
from benchmarks.shapes import FP8_SHAPES, WEIGHT_SHAPES, WeightShape, shapes_of
from benchmarks.spread import Spread
from benchmarks.sweep import Findings, rate_of
from vllm_batch_invariant.ops.common.cancelling import cancelling
from vllm_batch_invariant.ops.common.graph_timer import GraphTimer, copies_beyond_cache
from vllm_batch_invariant.ops.norm import rms_norm

ROWS = (1, 2, 8, 16, 32, 64, 128, 256, 512, 2048, 8192)
_LAUNCH_MICROSECONDS = 2.0
"""What the smallest kernel takes."""
_EPS = 1e-6
_REPLAYS, _REPLAYS_OF_A_LONG_CALL = 7, 3
_LONG_CALL_MICROSECONDS = 2000.0


@dataclass
class Sweep(Findings):
    """A run over shapes, and what it found."""

    providers: Sequence[Provider]
    """``stock`` first, because the others are compared with it."""
    rows: Sequence[int]
    timer: GraphTimer
    ceilings: Ceilings
    cache: int
    """Bytes of the L2 cache."""
    device: str = "cuda"
    behind_norm: bool = False
    """Whether a norm makes each call's operand, as in a layer, and its time counts."""
    form: Format = FORMATS["bf16"]
    """Of weights."""
    gated: bool = False
    """Whether the activation of a gated layer is behind each matmul, as :func:`.linear_providers.gated` says."""

    def measure(self, shape: WeightShape) -> None:
        """Check and time every provider with every number of rows that such a weight meets."""
        rows = [m for m in self.rows if m <= shape.most_rows]
        if not rows:
            return
        features = shape.out_features, shape.in_features
        bits = dict(self._bits(shape, rows))
        size = self.form.bytes_per_element
        copies = copies_beyond_cache(size * shape.out_features * shape.in_features, self.cache)
        x, weights = operands.random(max(rows), *features, copies, self.device, self.form)
        sound = {name for name, _ in bits}
        loaded = {one.name: list(map(one.load, weights)) for one in self.providers if one.name in sound}
        _wait()
        for m in rows:
            self._time(self._case(shape, m), Work.of_gemm(m, *features, weight_size=size), x[:m], loaded, bits)

    def _bits(self, shape: WeightShape, rows: Sequence[int]) -> Iterator[tuple[tuple[str, str], Bits]]:
        """((provider, case), verdict) for the cases that can be timed."""
        most = shape.most_rows
        x, matrix = cancelling(most, shape.out_features, shape.in_features, torch.bfloat16, self.device)
        stored = self.form.stored(matrix)
        for provider in self.providers:
            try:
                if provider.prepare:
                    provider.prepare(stored, most)
                weight = provider.load(stored)
                _wait()
                whole = provider.call(x, weight) if provider.promises_bits else None
            except Exception as error:
                self.failed(f"{provider.name} {self._case(shape, most)} and all others of this weight", error)
                continue
            for m in rows:
                case = self._case(shape, m)
                if whole is None:
                    yield (provider.name, case), "-"
                    continue
                try:
                    wrong = [
                        count
                        for count in (m - 1, m, m + 1)
                        if 1 <= count <= most and not torch.equal(provider.call(x[:count], weight), whole[:count])
                    ]
                except Exception as error:
                    self.failed(f"{provider.name} {case}", error)
                    continue
                if wrong:
                    self.problem(f"BITS DIFFER: {provider.name} {case}: M of {wrong} gives other rows than {most}")
                yield (provider.name, case), "differ" if wrong else "equal"

    def _time(
        self,
        case: str,
        work: Work,
        x: torch.Tensor,
        loaded: dict[str, list[Any]],
        bits: dict[tuple[str, str], Bits],
    ) -> None:
        floor = self.ceilings.floor(work)
        ways, scale = {}, x.new_ones(x.shape[1])
        for provider in self.providers:
            verdict = bits.get((provider.name, case))
            if verdict is None:
                continue
            try:
                weights = loaded[provider.name]
                provider.call(x, weights[0])
            except Exception as error:
                self.failed(f"{provider.name} {case}", error)
            else:
                call = partial(_behind_norm, provider, scale) if self.behind_norm else provider.call
                ways[provider.name] = verdict, [partial(call, x, weight) for weight in weights]
        expected = floor + _LAUNCH_MICROSECONDS
        replays = _REPLAYS if expected < _LONG_CALL_MICROSECONDS else _REPLAYS_OF_A_LONG_CALL
        samples = self.timer.time([calls for _, calls in ways.values()], expected, replays)
        spreads = {name: Spread.of(found) for name, found in zip(ways, samples, strict=True)}
        print(case)
        for name, spread in spreads.items():
            rates = rate_of(work, self.ceilings.bound_by_memory(work), spread)
            rates |= {("roofline", "fraction"): spread.rate(floor)}
            self.add("linear", name, case, spread, spreads.get("stock"), rates, ways[name][0])

    def _case(self, shape: WeightShape, m: int) -> str:
        of_call = {"behind": "norm"} if self.behind_norm else {}
        of_call |= self.form.keys | ({"act": "silu"} if self.gated else {})
        return case_text(M=m, N=shape.out_features, K=shape.in_features, dtype="bf16", **of_call)


def _wait() -> None:
    """Until all weights are there: a call may read its own before the kernel before it has ended."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _behind_norm(provider: Provider, scale: torch.Tensor, x: torch.Tensor, weight: Any) -> torch.Tensor:
    return provider.call(rms_norm(x, scale, _EPS), weight)


def _row_count(text: str) -> int:
    if not text.isdigit() or not 1 <= int(text) <= max(ROWS):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 to {max(ROWS)}")
    return int(text)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.linear",
        description="Check the bits of the linear operation, then time it on the weight shapes of real models. "
        "Exit status: 0 all well, 1 bits differ or a provider failed, 2 nothing was measured.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, help="CSV file to replace; None: that of the format")
    stored = "how weights are stored; activations are bf16, and quantising them counts"
    parser.add_argument("--format", choices=FORMATS, default="bf16", help=stored)
    parser.add_argument("--shapes", nargs="+", metavar="MODEL", help="only models whose name contains one of these")
    parser.add_argument("--rows", nargs="+", type=_row_count, default=ROWS, metavar="M", help="numbers of rows")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no new shape after this long")
    parser.add_argument(
        "--providers",
        nargs="+",
        choices=linear_providers.NAMES,
        default=linear_providers.USUAL,
        help="whom to measure beside stock, which always is",
    )
    behind = "have a norm, the same one for all, make each operand, and count its time: launches may overlap"
    parser.add_argument("--behind-norm", action="store_true", help=behind)
    activated = "only weights of gate and up, whose products are activated, and count that time"
    parser.add_argument("--gated", action="store_true", help=activated)
    options = parser.parse_args(arguments)
    if options.gated and options.format != "bf16":
        parser.error("--gated is of weights in bf16")
    options.out = options.out or DATA / ("linear.csv" if options.format == "bf16" else f"linear_{options.format}.csv")
    shapes = FP8_SHAPES if options.format == "fp8" else WEIGHT_SHAPES
    options.shapes = shapes_of(options.shapes, shapes) if options.shapes else shapes
    if options.gated:
        options.shapes = [one for one in options.shapes if any(of.projection == "gate_up" for of in one.origins)]
    if not options.shapes:
        parser.error("no model has such a name")
    return options


def _load(names: Sequence[str], form: str) -> Iterator[Provider]:
    for name in linear_providers.NAMES:
        if name == "stock" or name in names:
            try:
                yield linear_providers.load(name, form)
            except linear_providers.Absent as absent:
                print(f"{name} is left out: {absent}", file=sys.stderr)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    started = time.monotonic()
    options = _parse(arguments)
    if not torch.cuda.is_available():
        print("the benchmark of the linear operation needs an NVIDIA GPU", file=sys.stderr)
        return 2
    timer, form = GraphTimer(), FORMATS[options.format]
    ceilings = measure_ceilings(timer)
    sweep = Sweep(
        providers=tuple(
            linear_providers.gated(one) if options.gated else one for one in _load(options.providers, options.format)
        ),
        rows=sorted(set(options.rows)),
        timer=timer,
        ceilings=ceilings.with_arithmetic(form.speed),
        setting=Setting.here(),
        cache=torch.cuda.get_device_properties().L2_cache_size,
        behind_norm=options.behind_norm,
        form=form,
        gated=options.gated,
    )
    print(f"{sweep.setting.gpu}, {sweep.setting.versions}\n{ceilings}", flush=True)
    done = 0
    for shape in options.shapes:
        if time.monotonic() - started > options.limit_seconds:
            break
        print(f"\n{', '.join(map(str, shape.origins))}, after {time.monotonic() - started:.0f} s", flush=True)
        try:
            sweep.measure(shape)
        finally:
            write(options.out, sweep.measurements)  # also what an interrupted run has
        torch.cuda.empty_cache()
        done += 1
    print_summary(sweep.measurements, Console())
    print(f"{done} of {len(options.shapes)} shapes in {time.monotonic() - started:.0f} s, written to {options.out}")
    return sweep.status("BITS DIFFER and FAILED")


if __name__ == "__main__":
    sys.exit(main())

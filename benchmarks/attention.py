"""Benchmark of paged attention: `python -m benchmarks.attention`. Accuracy and bits first, then time."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from benchmarks import attention_providers
from benchmarks.attention_batch import Batch, batches_of
from benchmarks.attention_cases import CASES, Case, cases_of
from benchmarks.attention_checks import Exact, cancel, other_bits
from benchmarks.attention_providers import Provider
from benchmarks.attention_summary import print_summary
from benchmarks.record import DATA, Bits, Setting, write
from benchmarks.roofline import Ceilings, measure_ceilings
from benchmarks.spread import Spread
from benchmarks.sweep import Findings, rate_of
from benchmarks.timing import Timer
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.ops.common.graph_timer import copies_beyond_cache

_MOST_ERROR = 1.5
"""Times the error of stock."""
_LAUNCH_MICROSECONDS = 5.0
"""What the smallest call takes."""
_SAMPLES, _SAMPLES_OF_A_LONG_CALL = 7, 3
_LONG_CALL_MICROSECONDS = 2000.0


@dataclass(frozen=True)
class Verdict:
    """What the checks found for a provider in a case."""

    error: float
    """Distance from float64, relative."""
    bits: Bits


@dataclass
class Sweep(Findings):
    """A run over cases, and what it found."""

    providers: Sequence[Provider]
    """``stock`` first where it is there, because the others are compared with it."""
    timer: Timer
    ceilings: Ceilings
    cache: int
    """Bytes of the L2 cache."""
    page_size: int = 16
    device: str = "cuda"

    def measure(self, case: Case) -> None:
        """Check and time every provider that covers a case."""
        text = case.text(self.page_size)
        print(f"{case.shape.name}: {text}", flush=True)
        copies = copies_beyond_cache(case.cache_bytes, self.cache)
        batches = batches_of(case, self.page_size, copies, self.device)
        verdicts = self._check(text, batches[0])
        if verdicts:
            self._time(case, batches, verdicts)

    def _check(self, case: str, batch: Batch) -> dict[str, Verdict]:
        """The verdict on each provider whose calls did not fail."""
        errors = dict(self._errors(case, batch))
        cancel(batch)
        verdicts = {}
        for provider in self.providers:
            if provider.name in errors:
                try:
                    verdicts[provider.name] = Verdict(errors[provider.name], self._bits(provider, case, batch))
                except Exception as error:
                    self.failed(f"{provider.name} {case}", error)
        return verdicts

    def _errors(self, case: str, batch: Batch) -> Iterator[tuple[str, float]]:
        exact = Exact(batch)
        most = torch.inf
        for provider in self.providers:
            if not (provider.covers(batch.requests) and provider.serves(batch.layer)):
                continue
            try:
                error = exact.error(provider.run(batch))
            except Exception as failure:
                self.failed(f"{provider.name} {case}", failure)
                continue
            if provider.name == "stock":
                most = _MOST_ERROR * error
            if provider.promises_bits and not error <= most:  # NaN is not
                self.problem(f"INACCURATE: {provider.name} {case}: error {error:.3g}, above {most:.3g}")
            yield provider.name, error

    def _bits(self, provider: Provider, case: str, batch: Batch) -> Bits:
        if not provider.promises_bits and not provider.observed:
            return "-"
        places = other_bits(provider.run, provider.covers, batch)
        if places and provider.promises_bits:
            self.problem(f"BITS DIFFER: {provider.name} {case}: {', '.join(places)}")
        return "differ" if places else "equal"

    def _time(self, case: Case, batches: Sequence[Batch], verdicts: dict[str, Verdict]) -> None:
        out = torch.empty_like(batches[0].query)
        expected = self.ceilings.floor(case.work) + _LAUNCH_MICROSECONDS
        samples = _SAMPLES if expected < _LONG_CALL_MICROSECONDS else _SAMPLES_OF_A_LONG_CALL
        try:
            ways = {
                provider.name: _calls(provider, batches, out)
                for provider in self.providers
                if provider.name in verdicts
            }
            timings = self.timer.time(ways, expected, samples)
        except Exception as error:
            self.failed(f"timing {case.text(self.page_size)}", error)
            return
        spreads = {name: Spread.of(timing.samples) for name, timing in timings.items()}
        for name, timing in timings.items():
            marks = ("", "") if timing.in_graph else (" graph=no", "  no graph")
            spread, verdict = spreads[name], verdicts[name]
            rates = rate_of(case.work, case.decode_only, spread)
            rates |= {("roofline", "fraction"): spread.rate(self.ceilings.floor(case.work))}
            ratio = verdict.error / verdicts["stock"].error if "stock" in verdicts else None
            error = {("error", "relative"): (Spread(*[verdict.error] * 3), ratio)}
            text = case.text(self.page_size) + marks[0]
            self.add("attention", name, text, spread, spreads.get("stock"), rates, verdict.bits, error, marks[1])


def _calls(provider: Provider, batches: Sequence[Batch], out: torch.Tensor) -> list[Callable[[], object]]:
    """One call for each batch, as if they were the layers of one step: all have the same plan."""
    planned = provider.plan(batches[0])
    return [partial(provider.attend, batch, out, **planned) for batch in batches]


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attention",
        description="Check the accuracy and the bits of paged attention, then time it. Exit status: 0 all well, "
        "1 wrong results, other bits or a provider that failed, 2 nothing was measured.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=DATA / "attention.csv", help="CSV file to replace")
    parser.add_argument("--page-size", type=int, choices=(16, 32, 64, 128), default=16, help="keys in a page")
    parser.add_argument(
        "--cases",
        nargs="+",
        metavar="WORDS",
        help="only cases that have all words of one of these: a shape, a phase, pairs; "
        "for example 'qwen3-8b decode batch=8' prefill",
    )
    parser.add_argument("--limit-seconds", type=float, default=170, help="start no new case after this long")
    parser.add_argument(
        "--providers",
        nargs="+",
        choices=attention_providers.NAMES,
        default=attention_providers.NAMES,
        help="whom to measure beside stock, which always is",
    )
    options = parser.parse_args(arguments)
    options.cases = cases_of(options.cases) if options.cases else CASES
    if not options.cases:
        parser.error("no case has these words")
    return options


def _load(names: Sequence[str], page_size: int) -> Iterator[Provider]:
    for name in attention_providers.NAMES:
        if name == "stock" or name in names:
            try:
                provider = attention_providers.load(name)
            except attention_providers.Absent as absent:
                print(f"{name} is left out: {absent}", file=sys.stderr)
                continue
            if page_size % provider.page_multiple:
                multiple = provider.page_multiple
                print(f"{name} is left out: it takes pages of a multiple of {multiple} keys", file=sys.stderr)
            else:
                yield provider


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    started = time.monotonic()
    options = _parse(arguments)
    if not torch.cuda.is_available():
        print("the benchmark of attention needs an NVIDIA GPU", file=sys.stderr)
        return 2
    os.environ[FLAG] = "0"  # stock is vLLM without any mode
    timer = Timer()
    sweep = Sweep(
        providers=tuple(_load(options.providers, options.page_size)),
        timer=timer,
        ceilings=measure_ceilings(timer.graphs),
        setting=Setting.here(),
        cache=torch.cuda.get_device_properties().L2_cache_size,
        page_size=options.page_size,
    )
    print(f"{sweep.setting.gpu}, {sweep.setting.versions}\n{sweep.ceilings}", flush=True)
    done = 0
    try:
        for case in options.cases:
            if time.monotonic() - started > options.limit_seconds:
                break
            sweep.measure(case)
            torch.cuda.empty_cache()
            done += 1
    finally:
        write(options.out, sweep.measurements)
    print_summary(sweep.measurements, Console())
    print(f"{done} of {len(options.cases)} cases in {time.monotonic() - started:.0f} s, written to {options.out}")
    return sweep.status("INACCURATE, BITS DIFFER and FAILED")


if __name__ == "__main__":
    sys.exit(main())

"""Benchmark of mixtures of experts on a GPU, from logits to output: `python -m benchmarks.moe`. Bits, then time."""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.moe_cases import (
    LAYERS,
    PROVIDERS,
    TOKENS,
    TOKENS_OF_FP8,
    TOKENS_OF_STORED,
    Inputs,
    MoeLayer,
    Provider,
    Weights,
)
from benchmarks.moe_packed import PackedTiles
from benchmarks.moe_variants import Candidates
from benchmarks.record import DATA, Bits, Setting, case_text, update
from benchmarks.spread import Spread
from benchmarks.sweep import Findings
from vllm_batch_invariant.ops.common.graph_timer import GraphTimer, copies_beyond_cache

_REPLAYS = 9
_FEWEST_INPUTS, _MOST_INPUTS = 4, 16
_FEW_TOKENS = 64
"""Up to so many, several batches take turns: each chooses other experts."""
_EXPECTED_BYTES_A_MICROSECOND = 3e6
_LAUNCHES_MICROSECONDS = 20.0


@dataclass
class Sweep(Findings):
    """A run over layers, and what it found."""

    providers: Sequence[Provider]
    """``stock`` first, if it is there: the others are compared with it."""
    tokens: Sequence[int]
    timer: GraphTimer
    cache: int
    """Bytes of the L2 cache."""
    device: str = "cuda"
    candidates: Candidates | None = None
    """Which times candidate schedules instead."""
    tiles: PackedTiles | None = None
    """Which compares and times those of weights of four bits."""

    def measure(self, layer: MoeLayer) -> None:
        """Check and time every provider with every number of tokens."""
        tiles = self.tiles if layer.is_of_gpt_oss else None
        if tiles is not None:
            tiles.compare(layer)
        weights = Weights.random(layer, self.device)
        most = Inputs.random(layer, max(self.tokens), 0, self.device)
        providers = self._working(layer, weights, most)
        bits = {} if self.candidates else self._bits(providers, layer, weights, most)
        for tokens in self.tokens:
            case = _case(layer, tokens)
            inputs = self._batches(layer, most.first(tokens))
            if self.candidates:
                print(case, *self.candidates.best(layer, weights, inputs), sep="\n", flush=True)
            else:
                self._time(providers, layer, case, weights, inputs, bits)
                if tiles is not None:
                    print(*tiles.times(layer, weights, inputs), sep="\n", flush=True)

    def _working(self, layer: MoeLayer, weights: Weights, most: Inputs) -> list[Provider]:
        """Those that serve a layer, after a call that has vLLM's workspaces grow: graphs that were captured before
        would read those of before.
        """
        working = []
        for provider in (one for one in self.providers if one.serves(layer)):
            try:
                if not provider.promises_bits:
                    provider.call(layer, weights, most)
            except Exception as error:
                self.failed(f"{provider.name} {_case(layer, len(most.x))} and all others of this layer", error)
            else:
                working.append(provider)
        return working

    def _batches(self, layer: MoeLayer, first: Inputs) -> list[Inputs]:
        """Batches whose experts together are more than the cache holds."""
        count, work = len(first.x), first.work(layer)
        if count > _FEW_TOKENS:
            return [first]
        batches = min(max(_FEWEST_INPUTS, copies_beyond_cache(work.moved_bytes, self.cache)), _MOST_INPUTS)
        return [first, *(Inputs.random(layer, count, seed, self.device) for seed in range(1, batches))]

    def _bits(
        self, providers: Sequence[Provider], layer: MoeLayer, weights: Weights, most: Inputs
    ) -> dict[tuple[str, str], Bits]:
        """(provider, case): whether the case's tokens, all and the last alone, have the bits they have among most, and
        those of the matrices that stored experts stand for, if these are what is multiplied.
        """
        found: dict[tuple[str, str], Bits] = {}
        matrices = weights.unpacked() if layer.form and not layer.quantises else None
        for provider in providers:
            whole = provider.call(layer, weights, most) if provider.promises_bits else None
            for tokens in self.tokens:
                case = _case(layer, tokens)
                if whole is None:
                    found[provider.name, case] = "-"
                    continue
                last = Inputs(most.x[tokens - 1 : tokens], most.logits[tokens - 1 : tokens])
                right = torch.equal(provider.call(layer, weights, most.first(tokens)), whole[:tokens])
                right = right and torch.equal(provider.call(layer, weights, last), whole[tokens - 1 : tokens])
                if matrices is not None:
                    right = right and torch.equal(provider.call(layer, matrices, most.first(tokens)), whole[:tokens])
                if not right:
                    self.problem(f"BITS DIFFER: {provider.name} {case}")
                found[provider.name, case] = "equal" if right else "differ"
        return found

    def _time(
        self,
        providers: Sequence[Provider],
        layer: MoeLayer,
        case: str,
        weights: Weights,
        inputs: list[Inputs],
        bits: dict[tuple[str, str], Bits],
    ) -> None:
        work = [one.work(layer).moved_bytes for one in inputs]
        moved = sum(work) / len(work)
        ways = [[partial(one.call, layer, weights, batch) for batch in inputs] for one in providers]
        expected = moved / _EXPECTED_BYTES_A_MICROSECOND + _LAUNCHES_MICROSECONDS
        try:
            samples = self.timer.time(ways, expected, _REPLAYS)
        except Exception as error:
            self.failed(case, error)
            return
        spreads = {one.name: Spread.of(times) for one, times in zip(providers, samples, strict=True)}
        print(case)
        for provider in providers:
            spread, verdict = spreads[provider.name], bits[provider.name, case]
            rates = {("bandwidth", "GB/s"): spread.rate(moved / 1e3)}
            about = f"  {provider.about(layer, weights, len(inputs[0].x))}"
            self.add("moe", provider.name, case, spread, spreads.get("stock"), rates, verdict, says=about)


def _case(layer: MoeLayer, tokens: int) -> str:
    sizes = {"E": layer.experts, "top": layer.top_k, "H": layer.hidden, "I": layer.intermediate}
    stored = {"format": layer.format_name} if layer.format_name else {}
    return case_text(layer=layer.name, M=tokens, **sizes, dtype=str(layer.dtype).removeprefix("torch."), **stored)


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.moe",
        description="Check the bits of layers of experts, a token alone and among others, then time them from the "
        "router's logits to the output against vLLM's. Exit status: 0 all well, 1 bits differ or a call failed, 2 "
        "nothing was measured.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=DATA / "moe.csv", help="CSV file to bring up to date")
    parser.add_argument("--layers", nargs="+", metavar="NAME", help="only layers whose name contains one of these")
    parser.add_argument("--formats", nargs="+", metavar="NAME", help="only experts in these; bf16: as matrices")
    parser.add_argument(
        "--tokens", nargs="+", type=int, metavar="M",
        help=f"numbers of tokens (default: {TOKENS}; of stored experts {TOKENS_OF_STORED}, in FP8 {TOKENS_OF_FP8})",
    )  # fmt: skip
    parser.add_argument("--providers", nargs="+", choices=PROVIDERS, default=list(PROVIDERS), help="whom to measure")
    parser.add_argument("--variants", action="store_true", help="time candidate schedules instead, and print the best")
    parser.add_argument("--limit-seconds", type=float, default=float("inf"), help="start no new layer after this long")
    options = parser.parse_args(arguments)
    options.layers = [
        one for one in LAYERS if not options.layers or any(part in one.name for part in options.layers)
    ]  # fmt: skip
    if options.formats:
        options.layers = [one for one in options.layers if (one.format_name or "bf16") in options.formats]
    if options.variants:
        options.providers = ["ours"]
        options.layers = [one for one in options.layers if not one.quantises]
    if not options.tokens and all(one.quantises for one in options.layers):
        options.tokens = TOKENS_OF_FP8
    elif not options.tokens:
        options.tokens = TOKENS if any(one.form is None for one in options.layers) else TOKENS_OF_STORED
    if not options.layers or min(options.tokens) < 1:
        parser.error("no such layer, or no token")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    started, options = time.monotonic(), _parse(arguments)
    if not torch.cuda.is_available():
        print("the benchmark of mixtures of experts needs an NVIDIA GPU", file=sys.stderr)
        return 2
    timer, providers = GraphTimer(), []
    for name, load in PROVIDERS.items():
        if name in options.providers:
            try:
                providers.append(load())
            except ImportError as error:
                print(f"{name} is left out: {error}", file=sys.stderr)
    sweep = Sweep(
        providers=providers,
        tokens=sorted(set(options.tokens)),
        timer=timer,
        setting=Setting.here(),
        cache=torch.cuda.get_device_properties().L2_cache_size,
        candidates=Candidates(timer) if options.variants else None,
        tiles=PackedTiles(timer),
    )
    print(f"{sweep.setting.gpu}, {sweep.setting.versions}", flush=True)
    for layer in options.layers:
        if time.monotonic() - started > options.limit_seconds:
            break
        sweep.measure(layer)
        torch.cuda.empty_cache()
        if sweep.measurements:
            update(options.out, sweep.measurements)  # what is measured is kept if the run is interrupted
        print(f"{time.monotonic() - started:.0f} s", flush=True)
    sweep.problems += sweep.tiles.problems + (sweep.candidates.problems if sweep.candidates else 0)
    return sweep.status("BITS DIFFER and FAILED")


if __name__ == "__main__":
    sys.exit(main())

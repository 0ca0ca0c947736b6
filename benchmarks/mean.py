"""Benchmark of the mean on whatever device is here, or a CPU: `python -m benchmarks.mean`. Values and bits first,
then time.
"""

import argparse
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import product
from pathlib import Path

import torch

from benchmarks.record import DATA, Bits, Setting, case_text, geometric_means, write
from benchmarks.spread import Spread
from benchmarks.sweep import Findings
from benchmarks.timing import Timer
from vllm_batch_invariant.compare import accuracy_comparison, bitwise_comparison
from vllm_batch_invariant.ops import reduce
from vllm_batch_invariant.ops.common.graph_timer import copies_beyond_cache
from vllm_batch_invariant.ops.devices import get, known

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SHAPES = (
    ((2048, 4096, 16), 1),
    ((2048, 4096, 16), 2),
    ((2048, 4096, 16), 0),
    ((4096, 4096), 1),
    ((4096, 4096), 0),
    ((1, 4096), 1),
    ((64, 8192), 1),
    ((16_384, 1024), 1),
    ((8, 151_936), 1),
    ((8, 512, 4096), 1),
)
"""(shape, reduced dimension); the first is that of a published comparison, 0.468 ms natively in fp32 elsewhere."""
PARTS = (1, 2, 3, 7, 16, 17, 64, 255)
"""Of how many entries the mean is compared with that of all."""
_SAMPLES = 11
_BYTES_PER_MICROSECOND = 1e6
"""A guess of the device's, from which follows how many calls are timed together."""
_LAUNCH_MICROSECONDS = 5.0
_CACHE_BYTES = 192 << 20
"""Of a device that does not tell: that of an Atlas A2."""


@dataclass(frozen=True)
class Case:
    """A mean over one dimension of a tensor."""

    shape: tuple[int, ...]
    dim: int
    dtype: str

    def __str__(self) -> str:
        return case_text(shape="x".join(map(str, self.shape)), dim=self.dim, dtype=self.dtype)

    @property
    def batch_dim(self) -> int:
        """The dimension whose entries shall have the same bits however many there are: the first that stays."""
        return 1 if self.dim == 0 else 0


CASES = tuple(Case(shape, dim, dtype) for (shape, dim), dtype in product(SHAPES, DTYPES))


@dataclass(frozen=True)
class Provider:
    """One way to compute a mean."""

    name: str
    call: Callable[[torch.Tensor, int], torch.Tensor]
    promises_bits: bool


PROVIDERS = (Provider("stock", torch.mean, promises_bits=False), Provider("ours", reduce.mean, promises_bits=True))


@dataclass
class Sweep(Findings):
    """A run over cases, and what it found."""

    timer: Timer
    device: str
    cache: int
    """Bytes of the device's last cache."""
    providers: Sequence[Provider] = PROVIDERS
    """``stock`` first, because the others are compared with it."""

    def measure(self, case: Case) -> None:
        """Check and time every provider in a case."""
        print(case, flush=True)
        x = torch.randn(case.shape, generator=torch.Generator().manual_seed(0)).to(self.device, DTYPES[case.dtype])
        verdicts = {}
        for provider in self.providers:
            try:
                verdicts[provider.name] = self._check(provider, case, x)
            except Exception as error:
                self.failed(f"{provider.name} {case}", error)
        size = x.numel() * x.element_size()
        inputs = [x, *(x.clone() for _ in range(copies_beyond_cache(size, self.cache) - 1))]
        ways = {
            provider.name: [partial(provider.call, one, case.dim) for one in inputs]
            for provider in self.providers
            if provider.name in verdicts
        }
        timings = self.timer.time(ways, size / _BYTES_PER_MICROSECOND + _LAUNCH_MICROSECONDS, _SAMPLES)
        spreads = {name: Spread.of(timing.samples) for name, timing in timings.items()}
        for name, spread in spreads.items():
            rates = {("bandwidth", "GB/s"): spread.rate(size / 1e3)}
            self.add("mean", name, str(case), spread, spreads.get("stock"), rates, verdicts[name])

    def _check(self, provider: Provider, case: Case, x: torch.Tensor) -> Bits:
        """Compare parts of the batch with all of it, by values and by bits."""
        whole, batch, entries = provider.call(x, case.dim), case.batch_dim, x.shape[case.batch_dim]
        kept = batch - (case.dim < batch)
        some = x.narrow(batch, 0, min(entries, 2)).cpu()
        accuracy = accuracy_comparison(
            whole.narrow(kept, 0, some.shape[batch]), some.double().mean(case.dim).to(x.dtype)
        )
        if not accuracy and provider.promises_bits:
            self.problem(f"INACCURATE: {provider.name} {case}: {accuracy}")
        moved = [
            count
            for count in (*(part for part in PARTS if part < entries), entries)
            if not bitwise_comparison(provider.call(x.narrow(batch, 0, count), case.dim), whole.narrow(kept, 0, count))
        ]
        if moved and provider.promises_bits:
            self.problem(f"BITS DIFFER: {provider.name} {case}: {moved} entries against {entries}")
        return "differ" if moved else "equal"


def _setting(device: str) -> Setting:
    here = Setting.here()
    if device == "cpu":
        return replace(here, gpu=platform.processor() or platform.machine())
    name = torch.get_device_module(device).get_device_name()
    installed = case_text(**{package: version(package) for package in get(device).packages})
    return replace(here, gpu=name, versions=f"{here.versions} {installed}".strip())


def _cache_bytes(device: str) -> int:
    if device == "cpu":
        return _CACHE_BYTES
    return getattr(torch.get_device_module(device).get_device_properties(), "L2_cache_size", 0) or _CACHE_BYTES


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    here = [device.type for device in reversed(known().values()) if device.is_present]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.mean",
        description="Check the values and bits of the mean, then time it. "
        "Exit status: 0 all well, 1 bits or values differ or a provider failed, 2 nothing was measured.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--device", choices=here, default=here[0], help="where to compute")
    parser.add_argument("--out", type=Path, default=DATA / "mean.csv", help="CSV file to replace")
    parser.add_argument("--cases", nargs="+", metavar="TEXT", help="only cases that contain one of these, as dim=1")
    options = parser.parse_args(arguments)
    options.cases = [case for case in CASES if not options.cases or any(text in str(case) for text in options.cases)]
    if not options.cases:
        parser.error("no case contains this; they are of the form " + str(CASES[0]))
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    options = _parse(arguments)
    device = options.device
    sweep = Sweep(Timer(device), device, _cache_bytes(device), setting=_setting(device))
    print(f"{sweep.setting.gpu}, {sweep.setting.versions}", flush=True)
    try:
        for case in options.cases:
            sweep.measure(case)
    finally:
        write(options.out, sweep.measurements)
    for (provider, dtype), mean in geometric_means(sweep.measurements, ["dtype"]).items():
        if provider != "stock":
            print(f"{provider} in {dtype}: {mean:.3f} of stock's time, geometric mean")
    print(f"{len(options.cases)} cases, written to {options.out}")
    return sweep.status("INACCURATE, BITS DIFFER and FAILED")


if __name__ == "__main__":
    sys.exit(main())

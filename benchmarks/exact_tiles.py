"""Tiles of exact products on a Hopper: `python -m benchmarks.exact_tiles`. Each is compared with integers, then timed
beside `torch.mm` in bf16, for the layers of an 8B model; what it prints is what `ops/exact/schedule.py` chooses by.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import product as pairs
from pathlib import Path

import torch

from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.common.graph_timer import GraphTimer, copies_beyond_cache
from vllm_batch_invariant.ops.exact import cuda
from vllm_batch_invariant.ops.exact.schedule import HOPPER_SCHEDULES, HopperSchedule

SHAPES = {"qkv": (6144, 4096, 1), "gate_up": (24_576, 4096, 1), "o": (4096, 4096, 8), "down": (4096, 12_288, 8)}
"""(N, K, segments)"""
TIMED = (1, 8, 16, 32, 64, 256, 1024, 4096)
COMPARED = (1, 8, 16, 32, 64, 100, 256, 1000, 4096)
CANDIDATES = tuple(
    dict.fromkeys(
        (
            *HOPPER_SCHEDULES,
            *(HopperSchedule(8, n, 6, 2, True) for n in (16, 32)),
            *(HopperSchedule(8, n, 12, 1, True) for n in (32, 64)),
            *(HopperSchedule(16, 64, 11, 1, True), HopperSchedule(16, 64, 5, 2, True)),
            *(HopperSchedule(32, n, 4, 2, True) for n in (32, 64)),
            *(HopperSchedule(64, 64, 3, 2, held) for held in (False, True)),
            *(HopperSchedule(64, 64, 6, 1, True), HopperSchedule(64, 128, 4, 1, True)),
        )
    )
)
_COMPILERS = 14
"""Processes that compile at the same time."""
_SECONDS_TO_COMPILE = 120
"""After so many a process is stopped, and its tile has failed."""


def serves(tile: HopperSchedule, m: int) -> bool:
    """Whether a tile may be of use for so many rows."""
    wide = max(8, 1 << (m - 1).bit_length())
    return min(wide, 32) <= tile.block_m <= max(16, wide)


def rows_of(m: int, k: int, third: bool) -> torch.Tensor:
    """[M, K] bf16 on the GPU; with third digits, a few large elements in every 13th row and in the last."""
    draw = torch.Generator("cuda").manual_seed(m)
    x = torch.randn(m, k, generator=draw, device="cuda").bfloat16()
    if third:
        x[::13, 5::1111] = 3000.0
        x[-1, -1] = -700.0
    return x


def expected(x: cuda.Activations, weight: cuda.ExactWeight) -> torch.Tensor:
    """[M, N] bf16 by exact sums in fp64, each rounded once."""
    parts = x.scale.shape[1]
    integers = (256.0 * x.third.double() + x.digits[0].double()) * 256.0 + x.digits[1].double()
    of_weight = 256.0 * weight.digits[0].double() + weight.digits[1].double()
    sums = [
        (a @ b.T).long().float() * weight.scale[:, part] * x.scale[:, part, None]
        for part, (a, b) in enumerate(zip(integers.chunk(parts, 1), of_weight.chunk(parts, 1), strict=True))
    ]
    while len(sums) > 1:
        sums = [one + other for one, other in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0].bfloat16()


def wrong(shape: tuple[int, int, int], tiles: tuple[HopperSchedule, ...]) -> Iterator[str]:
    """Where tiles do not give the bits that the definition has."""
    n, k, parts = shape
    weight = cuda.prepare((torch.randn(n, k, device="cuda") * 0.02).bfloat16(), parts)
    for m, third in pairs(COMPARED, (False, True)):
        rows = cuda.quantize(rows_of(m, k, third), parts, activations=True)
        if bool((rows.high_digit_mask != 0).any()) != third:
            yield f"{m} rows have {'no ' * third}third digits"
        right = expected(rows, weight)
        for tile in (tile for tile in tiles if serves(tile, m)):
            differ = int((cuda.product(rows, weight, None, tile) != right).sum())
            if differ:
                yield f"{m} rows{', third digits' * third}: {differ} of {right.numel()} differ by {tile}"


def timed(name: str, timer: GraphTimer, tiles: tuple[HopperSchedule, ...]) -> None:
    """Print microseconds and ratios to ``torch.mm``, the fastest tile first."""
    n, k, parts = SHAPES[name]
    copies = copies_beyond_cache(2 * n * k, torch.cuda.get_device_properties().L2_cache_size)
    plain = [(torch.randn(n, k, device="cuda") * 0.02).bfloat16() for _ in range(copies)]
    weights = [cuda.prepare(weight, parts) for weight in plain]
    for m in TIMED:
        x = rows_of(m, k, False)
        rows = cuda.quantize(x, parts, activations=True)
        ways = {"torch.mm": [partial(torch.mm, x, weight.t()) for weight in plain]}
        ways["the quantiser"] = [partial(cuda.quantize, x, parts, True)]
        for schedule in (*(tile for tile in tiles if serves(tile, m)), cuda.linear_schedule(m, parts)):
            ways[str(schedule)] = [partial(cuda.product, rows, weight, None, schedule) for weight in weights]
        if m >= 64:
            marked = cuda.quantize(rows_of(m, k, True), parts, activations=True)
            chosen = cuda.hopper_schedule(m, n, parts, Gpu.of(0).num_sms)
            ways[f"third digits, {chosen}"] = [partial(cuda.product, marked, one, None, chosen) for one in weights]
        floor = max(2 * n * k / 4.0e6, 2 * m * n * k / 7.0e8)
        samples = timer.time(list(ways.values()), 2 * floor, 5)
        found = {way: sorted(taken)[len(taken) // 2] for way, taken in zip(ways, samples, strict=True)}
        stock = found["torch.mm"]
        print(f"\n{name}, {n} x {k} in {parts}, {m} rows: torch.mm {stock:.1f} us", flush=True)
        for way, taken in sorted(found.items(), key=lambda one: one[1]):
            print(f"  {taken / stock:6.2f}  {taken:8.1f} us  {way}", flush=True)


def compile_tile(tile: HopperSchedule) -> None:
    """Compile what a tile needs, for one and eight segments."""
    for parts in (1, 8):
        weight = cuda.prepare(torch.zeros(136, 1024, device="cuda", dtype=torch.bfloat16), parts)
        rows = cuda.quantize(rows_of(9, 1024, False), parts, activations=True)
        cuda.product(rows, weight, None, tile)
    torch.cuda.synchronize()


def compile_all() -> tuple[HopperSchedule, ...]:
    """The candidates that compile and run; each is tried in a process of its own."""
    numbers, running, good = list(range(len(CANDIDATES))), {}, []
    while numbers or running:
        while numbers and len(running) < _COMPILERS:
            number = numbers.pop(0)
            command = [sys.executable, "-m", "benchmarks.exact_tiles", "--compile", str(number)]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            running[number] = process, time.monotonic()
        for number, (process, since) in list(running.items()):
            try:
                output, _ = process.communicate(timeout=0.2)
            except subprocess.TimeoutExpired:
                if time.monotonic() - since > _SECONDS_TO_COMPILE:
                    process.kill()
                continue
            del running[number]
            if process.returncode == 0:
                good.append(number)
            else:
                print(f"FAILED: {CANDIDATES[number]}: {output[-1500:]}", flush=True)
    return tuple(CANDIDATES[number] for number in sorted(good))


def main() -> int:
    """Returns 1 where bits are wrong or a tile failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", type=int, metavar="NUMBER", help="only compile and run one candidate")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--log", type=Path, help="file that gets a copy of what is printed")
    options = parser.parse_args()
    if options.compile is not None:
        compile_tile(CANDIDATES[options.compile])
        return 0
    if options.log:
        sys.stdout = _Both(options.log)
    started = time.monotonic()
    tiles, problems = compile_all(), 0
    seconds = time.monotonic() - started
    print(f"{torch.cuda.get_device_name()}: {len(tiles)} of {len(CANDIDATES)} tiles compile and run, {seconds:.0f} s")
    served = tuple(tile for tile in tiles if tile in HOPPER_SCHEDULES)
    if served == HOPPER_SCHEDULES:
        for k, shared in ((4096, False), (4096, True), (12_288, True), (65_520, False)):
            compared = cuda.certify(1100, k, shared, torch.device("cuda"))
            print(f"certified: {compared} products of K = {k}{' in eight segments' * shared}", flush=True)
    for name in options.shapes:
        for line in wrong(SHAPES[name], tiles):
            problems += 1
            print(f"BITS DIFFER: {name}: {line}", flush=True)
        print(f"{name} was compared after {time.monotonic() - started:.0f} s", flush=True)
    timer = GraphTimer()
    for name in options.shapes:
        timed(name, timer, tiles)
    print(f"\n{problems} problems, {time.monotonic() - started:.0f} s")
    return int(problems > 0 or served != HOPPER_SCHEDULES)


class _Both:
    """Standard output and a file."""

    def __init__(self, path: Path) -> None:
        self._to = (sys.__stdout__, path.open("w"))

    def write(self, text: str) -> None:
        for one in self._to:
            one.write(text)

    def flush(self) -> None:
        for one in self._to:
            one.flush()


if __name__ == "__main__":
    sys.exit(main())

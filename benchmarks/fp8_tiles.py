"""Codes of FP8 on a Hopper: `python -m benchmarks.fp8_tiles`. Bits first: every tile of the Gluon kernel gives those of
the tensor core's model and of every other tile, and planted faults do not. Then time, for the layers of an 8B model,
beside Triton's tiles, bf16, vLLM's CUTLASS, cuBLASLt as PyTorch calls it and vLLM's DeepGEMM, of which it says, too,
whether they have the same bits; what it prints is what :func:`..scaled_linear.sm90_schedule.sm90_schedule` is fitted
to. CSV to --out.
"""

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product as pairs
from pathlib import Path
from typing import Any

import torch

from benchmarks.packed_tiles import SHAPES, Table, compiled_side_by_side, said
from vllm_batch_invariant.ops.common.cancelling import cancelling
from vllm_batch_invariant.ops.common.compile_errors import reason
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.common.graph_timer import GraphTimer, copies_beyond_cache
from vllm_batch_invariant.ops.linear import LinearReduction, triton_gemm
from vllm_batch_invariant.ops.linear.schedule import NARROW_TILES
from vllm_batch_invariant.ops.scaled_linear import E4M3, EXACT, GROUP, WGMMA, ScaledLinearReduction, cpu, cuda
from vllm_batch_invariant.ops.scaled_linear.schedule import E4M3_SCHEDULES, e4m3_schedule
from vllm_batch_invariant.ops.scaled_linear.sm90_kernel import scaled_gemm_sm90
from vllm_batch_invariant.ops.scaled_linear.sm90_schedule import SM90_SCHEDULES, Sm90Schedule, sm90_schedule

TIMED = (1, 64, 8, 2048, 16, 32, 128, 256, 1024, 8192)
"""Rows; those that say the most come first."""
ROWS = 300
"""Of x where bits are compared."""
COMPARED = (1, 7, 8, 9, 17, 64, 65, 129, ROWS)
KINDS = ("normal", "cancelling", "one sign", "spread")
REPLAYS = 7
COLUMNS = ("what", "format", "N", "K", "M", "name", "p50_us", "best_us", "tflops")
DEEP_GEMM_SECONDS = 18.0
"""Kept for it: it compiles a kernel for every shape."""
SOME_TILES = (0, 3, 6, 12, 14, 15, 16, 17, 18)
"""Enough for kernels that are not timed."""


@dataclass(frozen=True)
class Case:
    """What bits are compared of."""

    n: int
    k: int
    in_blocks: bool = True
    has_bias: bool = False
    dtype: torch.dtype = torch.bfloat16
    of_model: int | None = None
    """Rows and columns that are compared with the model; None: all."""

    def __str__(self) -> str:
        kind = f"{'blocks' if self.in_blocks else 'rows'}{' bias' * self.has_bias} {self.dtype}"
        return f"N={self.n} K={self.k} {kind}"


CASES = (
    Case(272, 1024, of_model=144),
    Case(208, 1104, has_bias=True, dtype=torch.float32, of_model=144),
    Case(144, 640, False, True),
    Case(16, 128),
    Case(72, 16, dtype=torch.float16),
    Case(6144, 4096, of_model=40),
    Case(4096, 12_288, False, True, of_model=40),
)
Operands = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]
"""codes, scale, weight, weight_scale and bias, as :func:`..scaled_linear.scaled_linear` takes them."""


def operands(case: Case, kind: str) -> Operands:
    """x [ROWS, K] and a weight."""
    draw = torch.Generator("cuda").manual_seed(case.n + case.k)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw, device="cuda")

    if kind == "cancelling":
        x, weight = cancelling(ROWS, case.n, case.k, torch.float32, "cuda")
        x, weight = x.to(E4M3), weight.to(E4M3)
    elif kind == "spread":
        codes = torch.randint(0, 256, (ROWS + case.n, case.k), generator=draw, device="cuda").to(torch.uint8)
        codes[codes & 127 == 127] = 0
        x, weight = codes.view(E4M3).split([ROWS, case.n])
    else:
        x, weight = drawn(ROWS, case.k) * 100, drawn(case.n, case.k) * 100
        if kind == "one sign":
            x, weight = x.abs(), weight.abs()
        x, weight = x.clamp(-448, 448).to(E4M3), weight.clamp(-448, 448).to(E4M3)
    groups = -(-case.k // GROUP)
    shapes = ((ROWS, groups), (-(-case.n // GROUP), groups)) if case.in_blocks else ((ROWS,), (case.n,))
    scale, weight_scale = (drawn(*shape).abs() * 0.02 + 1e-3 for shape in shapes)
    if kind == "cancelling" and case.in_blocks:  # scales that groups share, or nothing cancels
        scale, weight_scale = (one[:, :1].expand(-1, groups).contiguous() for one in (scale, weight_scale))
    bias = drawn(case.n).mul(0.01).to(case.dtype) if case.has_bias else None
    return x, scale, weight, weight_scale, bias


def tiles_of(case: Case) -> list[Sm90Schedule]:
    """Those that are enough for a case."""
    is_timed = case.in_blocks and case.dtype == torch.bfloat16
    return [tile for index, tile in enumerate(SM90_SCHEDULES) if is_timed or index in SOME_TILES]


def run(tile: Sm90Schedule, given: Operands, dtype: torch.dtype) -> torch.Tensor:
    """A product by one tile, into memory full of NaN."""
    out = torch.full((len(given[0]), len(given[2])), torch.nan, dtype=dtype, device="cuda")
    return scaled_gemm_sm90(*given, out, tile, True)


def last_rows(given: Operands, m: int) -> Operands:
    return given[0][-m:], given[1][-m:], *given[2:]


def by_model(given: Operands, case: Case, mma: str = WGMMA) -> torch.Tensor:
    """By the CPU, of so many rows and columns as the case says, counted from the end and from the start."""
    count = case.of_model or max(ROWS, case.n)
    codes, scale, weight, weight_scale, bias = (None if one is None else one.cpu() for one in given)
    blocks = -(-min(count, case.n) // GROUP) if case.in_blocks else count
    reduction = ScaledLinearReduction.of(case.k, case.dtype, E4M3, case.in_blocks, mma)
    bias = None if bias is None else bias[:count]
    return cpu.scaled_linear(codes[-count:], scale[-count:], weight[:count], weight_scale[:blocks], bias, reduction)


def share(got: torch.Tensor, expected: torch.Tensor) -> float:
    """Per cent of elements that differ."""
    return 100 * (got != expected).double().mean().item()


def wrong_bits(deadline: float) -> Iterator[str]:
    """Where a tile gives other bits than the model, or than the first tile."""
    for case in CASES:
        count = 0
        for kind in KINDS:
            given = operands(case, kind)
            expected = run(SM90_SCHEDULES[0], given, case.dtype)
            model = by_model(given, case)
            here = expected[-len(model) :, : model.shape[1]].cpu()
            if not torch.equal(here, model):
                yield f"{case}, {kind}: {share(here, model):.2f} % differ from the model's"
            if kind == "cancelling" and case == CASES[0]:
                exact = share(here, by_model(given, case, EXACT))
                said(f"  control: {exact:.1f} % of cancelling sums differ from exact ones")
                if exact < 50:
                    yield "operands do not show how sums are made"
            if case.in_blocks and case.dtype == torch.bfloat16:
                reduction = ScaledLinearReduction.of(case.k, case.dtype, E4M3, True, WGMMA)
                by_triton = cuda.scaled_linear(*given, reduction, E4M3_SCHEDULES[-1])
                if not torch.equal(by_triton, expected):
                    yield f"{case}, {kind}: {share(by_triton, expected):.2f} % differ from Triton's"
            transposed = (given[0], given[1].t().contiguous().t(), *given[2:]) if case.in_blocks else given
            for tile, m in pairs(tiles_of(case), COMPARED):
                count += 1
                try:
                    got = run(tile, last_rows(transposed if m == 65 else given, m), case.dtype)
                except Exception as error:
                    yield f"{tile.about}: {case}: {reason(error)}"
                    break
                if not torch.equal(got, expected[-m:]):
                    differ = f"{share(got, expected[-m:]):.2f} % differ, {100 * got.isnan().double().mean():.1f} % NaN"
                    yield f"{tile.about}: {case} M={m}, {kind}: {differ}"
        said(f"  {case}: {count} compared")
        if time.monotonic() > deadline:
            said("  bits: no time for more")
            return


def faults() -> Iterator[str]:
    """Planted ones that do not show in fp32."""
    case = Case(272, 1024, has_bias=True, dtype=torch.float32)
    given = codes, scale, weight, weight_scale, bias = operands(case, "normal")
    expected = run(SM90_SCHEDULES[0], given, case.dtype)
    swapped = torch.cat([codes.view(torch.uint8)[:, GROUP:], codes.view(torch.uint8)[:, :GROUP]], 1).view(E4M3)
    other = torch.cat([weight.view(torch.uint8)[:, GROUP:], weight.view(torch.uint8)[:, :GROUP]], 1).view(E4M3)
    planted = {
        "scales of x of the next group": (codes, scale.roll(1, 1), weight, weight_scale, bias),
        "scales of x of the next row": (codes, scale.roll(1, 0), weight, weight_scale, bias),
        "scales of the weight of the next group": (codes, scale, weight, weight_scale.roll(1, 1), bias),
        "scales of the weight of the next block": (codes, scale, weight, weight_scale.roll(1, 0), bias),
        "a group for another": (swapped, scale, weight, weight_scale, bias),
        "another order of groups": (swapped, scale.roll(-1, 1), other, weight_scale.roll(-1, 1), bias),
    }
    for name, one in planted.items():
        differ = share(run(SM90_SCHEDULES[0], one, case.dtype), expected)
        said(f"  fault {name}: {differ:.1f} % of elements differ")
        if differ < 20:
            yield f"fault {name} does not show"


def compile_part(part: int, parts: int) -> None:
    """Compile a part of all kernels, for Triton's cache; what fails, fails again where it is compared."""
    kinds = {(case.in_blocks, case.has_bias, case.dtype): case for case in reversed(CASES)}
    work: list[tuple[Any, Case | None]] = [(tile, case) for case in kinds.values() for tile in tiles_of(case)]
    work += [(tile, None) for tile in (*E4M3_SCHEDULES, *(tile for tile in NARROW_TILES if tile.block_n == 64))]
    for tile, case in work[part::parts]:
        stuck = threading.Timer(60, said, ("  is stuck:", tile, case))
        stuck.start()
        try:
            if case is not None:
                run(tile, last_rows(operands(case, "normal"), 2), case.dtype)
            elif tile in E4M3_SCHEDULES:
                reduction = ScaledLinearReduction.of(1024, torch.bfloat16, E4M3, True, WGMMA)
                cuda.scaled_linear(*operands(CASES[0], "normal"), reduction, tile)
            else:
                x, weight = (torch.zeros(rows, 1024, device="cuda", dtype=torch.bfloat16) for rows in (2, 256))
                bf16(tile, x, torch.empty(2, 256, device="cuda", dtype=x.dtype), weight)
            torch.cuda.synchronize()
        except Exception as error:
            said("  does not run:", tile, case, reason(error))
        stuck.cancel()


def bf16(tile: Any, a: torch.Tensor, out: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    reduction = LinearReduction.of_device("cuda", *weight.shape, a.dtype)
    return triton_gemm.gemm_sm90_swap_ab(a, weight.t(), None, out, reduction, tile, True)


def by_cutlass(weight: torch.Tensor, weight_scale: torch.Tensor, m: int) -> Callable[[Operands], Any]:
    """vLLM's CUTLASS, for x with scales as it takes them: columns packed, rows filled up to a multiple of 4."""
    from vllm import _custom_ops as ops

    b_scale = weight_scale.t()
    rows = -(-m // 4) * 4

    def prepared(given: Operands) -> Callable[[], torch.Tensor]:
        bytes_of = given[0].view(torch.uint8)
        codes = torch.cat([bytes_of, bytes_of[:1].expand(rows - m, -1)]).view(E4M3)
        scale = torch.cat([given[1], given[1][:1].expand(rows - m, -1)]).t().contiguous().t()
        return lambda: ops.cutlass_scaled_mm(codes, weight.t(), scale, b_scale, torch.bfloat16)[:m]

    return prepared


def by_torch(weight: torch.Tensor, weight_scale: torch.Tensor, _: int) -> Callable[[Operands], Any]:
    """PyTorch's call of cuBLASLt; which form of scales a version takes is found out."""
    from torch.nn.functional import ScalingType, scaled_mm

    groups = weight_scale.shape[1]
    padded = torch.nn.functional.pad(weight_scale, (0, -groups % 4))
    forms = [weight_scale.t(), weight_scale, padded[:, :groups].t(), padded[:, :groups], padded.t(), padded]

    def prepared(given: Operands) -> Callable[[], torch.Tensor]:
        scale = given[1].t().contiguous().t()
        wrong: list[str] = []
        for form in forms:
            call = partial(
                scaled_mm, given[0], weight.t(), scale, ScalingType.BlockWise1x128, form, ScalingType.BlockWise128x128
            )
            try:
                call()
            except Exception as error:
                wrong.append(reason(error))
                continue
            return call
        raise RuntimeError(wrong[0])

    return prepared


def by_deep_gemm(weight: torch.Tensor, weight_scale: torch.Tensor, m: int) -> Callable[[Operands], Any]:
    """vLLM's DeepGEMM, compiled on this machine, with fp32 scales; x's have packed columns, filled up to 16 bytes."""
    from vllm.third_party import deep_gemm

    def prepared(given: Operands) -> Callable[[], torch.Tensor]:
        scale = torch.zeros(given[1].shape[1], -(-m // 4) * 4, device="cuda")[:, :m].t()
        scale.copy_(given[1])
        out = torch.empty(m, len(weight), dtype=torch.bfloat16, device="cuda")

        def call() -> torch.Tensor:
            deep_gemm.fp8_gemm_nt((given[0], scale), (weight, weight_scale), out, disable_ue8m0_cast=True)
            return out

        return call

    return prepared


OTHERS = {"CUTLASS of vLLM": by_cutlass, "cuBLASLt of PyTorch": by_torch}
_absent: dict[str, str] = {}


def others(found: dict[str, Any], given: Operands, weights: Sequence[Operands], ours: torch.Tensor) -> dict[str, list]:
    """Of each that is here, what is to be timed; says whether its bits are ours."""
    ways: dict[str, list] = {}
    m = len(given[0])
    for name, prepare in found.items():
        try:
            calls = [prepare(one[2], one[3], m)((given[0], given[1], *one[2:])) for one in weights]
            got = calls[0]()
            torch.cuda.synchronize()
            differ = share(got, ours)
            error = ((got.double() - ours.double()).norm() / ours.double().norm()).item()
            said(f"    {name} M={m}: {differ:.2f} % of elements have other bits; relative distance {error:.1e}")
            ways[name] = calls
        except Exception as error:
            if name not in _absent:
                said(f"  {name}: not here: {reason(error)}")
            _absent.setdefault(name, reason(error))
    return ways


def worth_timing(tile: Sm90Schedule, m: int) -> bool:
    if not tile.swapped:
        return m > 32 and (tile.block_n == 128 or m <= 2048)
    rows = max(8, 1 << (m - 1).bit_length())
    return m <= 256 and tile.block_m in ({rows, rows // 2} if m <= 64 else {64})


def time_all(table: Table, timer: GraphTimer, deadline: float, found: dict[str, Any], ours: bool = True) -> None:
    cache = Gpu.of(0).l2_bytes
    for m, (name, (n, k)) in pairs(TIMED, SHAPES.items()):
        if time.monotonic() > deadline:
            said("time: no time for more")
            return
        draw = torch.Generator("cuda").manual_seed(n + k)
        codes = (torch.randn(m, k, generator=draw, device="cuda") * 100).clamp(-448, 448).to(E4M3)
        scale = torch.rand(m, -(-k // GROUP), generator=draw, device="cuda") * 0.02 + 1e-3
        weight = (torch.randn(n, k, generator=draw, device="cuda") * 100).clamp(-448, 448).to(E4M3)
        weight_scale = torch.rand(-(-n // GROUP), -(-k // GROUP), generator=draw, device="cuda") * 0.02 + 1e-3
        copies = copies_beyond_cache(n * k, cache)
        weights = [(codes, scale, weight.clone(), weight_scale.clone(), None) for _ in range(copies)]
        out = torch.empty(m, n, dtype=torch.bfloat16, device="cuda")
        chosen = sm90_schedule(m, n, k, Gpu.of(0))
        expected = run(chosen, weights[0], torch.bfloat16)
        ways: dict[str, list] = {}
        if ours:
            for tile in SM90_SCHEDULES:
                if tile == chosen or worth_timing(tile, m):
                    ways[f"Gluon {tile.about}"] = [partial(scaled_gemm_sm90, *one, out, tile, True) for one in weights]
            reduction = ScaledLinearReduction.of(k, out.dtype, E4M3, True, WGMMA)
            ways["Triton"] = [
                partial(cuda.scaled_linear, *one, reduction, e4m3_schedule(m, n, Gpu.of(0))) for one in weights
            ]
            x = torch.randn(m, k, device="cuda").bfloat16()
            matrices = [
                torch.randn(n, k, device="cuda").bfloat16() for _ in range(copies_beyond_cache(2 * n * k, cache))
            ]
            ways["bf16 torch.mm"] = [partial(torch.mm, x, one.t(), out=out) for one in matrices]
            rows = max(16, 1 << (m - 1).bit_length())
            for tile in NARROW_TILES:
                if tile.block_n == 64 and tile.block_m == rows:
                    ways[f"bf16 {tile.about}"] = [partial(bf16, tile, x, out, one) for one in matrices]
        ways |= others(found, weights[0], weights, expected)
        if not ways:
            return
        samples = timer.time(list(ways.values()), 2 + n * k / 3e6 + 2 * m * n * k / 1.2e9, REPLAYS if m < 1024 else 3)
        by_kind: dict[str, tuple[float, str]] = {}
        for (way, _), times in zip(ways.items(), samples, strict=True):
            p50 = statistics.median(times)
            tflops = 2 * m * n * k / p50 / 1e6
            table.add("time", "e4m3 blocks", n, k, m, way, f"{p50:.2f}", f"{min(times):.2f}", f"{tflops:.1f}")
            kind = way if way in found else way.split()[0]
            by_kind[kind] = min(by_kind.get(kind, (1e9, "")), (p50, way))
            if way == f"Gluon {chosen.about}":
                by_kind["chosen"] = (p50, f"chosen {chosen.about}")
        table.save()
        said(f"{name} N={n} K={k} M={m}: " + "; ".join(f"{way} {p50:.1f}" for p50, way in by_kind.values()))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fp8_tiles", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--seconds", type=float, default=80.0, help="after which nothing new is begun")
    parser.add_argument("--compile", help="a part of the kernels alone, as 0/14")
    parser.add_argument("--deep-gemm", action="store_true", help="vLLM's DeepGEMM alone, into a CSV of its own")
    arguments = parser.parse_args()
    if arguments.compile:
        compile_part(*map(int, arguments.compile.split("/")))
        return 0
    started = time.monotonic()
    torch.manual_seed(0)
    give_up = threading.Timer(arguments.seconds + 20, lambda: (said("gave up"), os._exit(3)))
    give_up.daemon = True
    give_up.start()
    said(torch.cuda.get_device_name(), torch.__version__)
    if arguments.deep_gemm:
        table = Table(arguments.out / "fp8_deep_gemm.csv", COLUMNS)
        time_all(table, GraphTimer(), started + arguments.seconds, {"DeepGEMM of vLLM": by_deep_gemm}, False)
        return 0
    table = Table(arguments.out / "fp8_tiles.csv", COLUMNS)
    compiled_side_by_side("benchmarks.fp8_tiles", 60)
    said(f"compiled after {time.monotonic() - started:.0f} s")
    # The tiles are timed even if some are wrong; the verdict is printed last.
    problems = [*wrong_bits(started + 0.6 * arguments.seconds), *faults()]
    said(f"bits after {time.monotonic() - started:.0f} s: {len(problems)} problems")
    for one in problems[:20]:
        said("  PROBLEM", one)
    time_all(table, GraphTimer(), started + arguments.seconds - DEEP_GEMM_SECONDS, OTHERS)
    for one in problems:
        table.add("problem", "", "", "", "", one, "", "", "")
    table.save()
    torch.cuda.empty_cache()
    left = max(5.0, arguments.seconds - (time.monotonic() - started))
    command = [sys.executable, "-m", "benchmarks.fp8_tiles", "--deep-gemm", "--seconds", f"{left:.0f}"]
    try:
        subprocess.run([*command, "--out", str(arguments.out)], timeout=left + 10, check=False)
    except subprocess.TimeoutExpired:
        said("  DeepGEMM of vLLM: took too long")
    said(f"{len(problems)} problems; {time.monotonic() - started:.0f} s")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

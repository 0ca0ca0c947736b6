"""Weights of four bits on a Hopper: `python -m benchmarks.packed_tiles`. Bits first: every tile of the kernel that
reads them as they are stored gives those of the matrix that they stand for, and planted faults do not. Then time, for
the layers of an 8B model, beside the bf16 tiles, `torch.mm` and, where vLLM is there, its Machete and Marlin; what it
prints is what :data:`..linear.schedule.PACKED_TILES` is chosen by. CSV to --out.
"""

import argparse
import csv
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product as pairs
from pathlib import Path
from typing import Any

import torch

from vllm_batch_invariant.ops.common.cancelling import cancelling, cancelling_gated
from vllm_batch_invariant.ops.common.compile_errors import reason
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.common.graph_timer import GraphTimer, copies_beyond_cache
from vllm_batch_invariant.ops.formats import Format, integers
from vllm_batch_invariant.ops.linear import LinearReduction, MatmulSpec, triton_gemm
from vllm_batch_invariant.ops.linear.problem import GemmProblem
from vllm_batch_invariant.ops.linear.schedule import (
    NARROW_TILES,
    PACKED_TILES,
    NarrowTile,
    narrow_tiles,
    serves_packed,
    sm90_tiles,
)
from vllm_batch_invariant.ops.linear.spec import BIAS, NONE, SWIGLU, Epilogue
from vllm_batch_invariant.ops.silu.cuda import silu_and_mul

SHAPES = {"qkv": (6144, 4096), "o": (4096, 4096), "gate_up": (24_576, 4096), "down": (4096, 12_288)}
"""(N, K)"""
TIMED = (1, 16, 64, 128, 192, 256, 384, 512, 1024, 2048, 4096, 8192)
TIMED_IN_OTHER_FORMATS = (1, 16, 128, 256, 2048)
MANY = 128
"""Rows beyond which a weight may be decoded to memory as well."""
COMPARED = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
COMPARED_OF_MANY = (1, 65, 128, 129, 257, 513, 1031, 1290)
"""By tiles of 128 rows and more: also more rows than the first whose columns are all computed."""
TIMED_FORMATS = (integers(4, 128, False, False), integers(4, 128, True, False), integers(4, 32, False, False))
TIMED_SPECS = [MatmulSpec(b_format=b_format) for b_format in TIMED_FORMATS]
REPLAYS = 9
SOME_TILES = (2, 7, 11, 13, 14, 15, 16)
"""Enough for kernels that are not timed."""
COLUMNS = ("what", "format", "N", "K", "M", "name", "p50_us", "best_us", "tb_per_s")
Stored = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Case:
    """What bits are compared of."""

    spec: MatmulSpec
    shape: tuple[int, int] = (256, 1024)
    """(N, K)"""
    dtype: torch.dtype = torch.bfloat16

    def bias(self, n: int) -> torch.Tensor | None:
        return torch.randn(n, device="cuda").to(self.dtype) if self.spec.epilogue.has_bias else None


def _case(shape: tuple[int, int], group: int | None, zeros: bool = False, dtype: torch.dtype = torch.bfloat16,
          epilogue: Epilogue = NONE, k_slices: int = 1) -> Case:  # fmt: skip
    return Case(MatmulSpec(epilogue, k_slices, integers(4, group, zeros, False)), shape, dtype)


CASES = (
    _case((72, 1024), 128),
    _case((6144, 4096), 128),
    _case((65, 896), 128, True),
    _case((200, 448), 32),
    _case((1, 32), 32, True),
    _case((136, 1088), 64),
    _case((4096, 2112), 64, True),
    _case((8, 64), None),
    _case((333, 4096), None, True),
    _case((200, 1024), 128, True, epilogue=BIAS),
    _case((104, 1120), 32, True, torch.float16, BIAS),
    _case((416, 1152), 128, epilogue=SWIGLU),
    _case((208, 2048), 64, True, torch.float16, SWIGLU),
    _case((264, 4096), 128, k_slices=4),
)


def said(*words: object) -> None:
    print(*words, flush=True)


def run(tile: NarrowTile, x: torch.Tensor, stored: Stored, spec: MatmulSpec, bias: torch.Tensor | None = None) -> Any:
    """A matmul by one tile, into memory full of NaN."""
    n, k = len(stored[0]), x.shape[1]
    out = torch.full((len(x), spec.epilogue.columns(n)), torch.nan, dtype=x.dtype, device=x.device)
    reduction = LinearReduction.of_device("cuda", n, k, x.dtype, spec.k_slices)
    return triton_gemm.gemm_sm90_swap_ab(x, stored[0].t(), bias, out, reduction, tile, True, spec, stored[1:])


def definition(b_format: Format, stored: Stored, x: torch.Tensor) -> torch.Tensor:
    """[N, K]"""
    return b_format.matrix(stored[0].t(), stored[1:], x).t()


def operands(b_format: Format, kind: str, n: int, k: int, dtype: torch.dtype, gated: bool) -> tuple[Any, Stored]:
    """x [M, K], of all rows that are compared, and a weight: random, or such that results are what rounding leaves."""
    if kind == "random":
        draw = torch.Generator("cuda").manual_seed(n + k)
        x = torch.randn(max(COMPARED_OF_MANY), k, generator=draw, device="cuda").to(dtype)
        words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=draw, device="cuda").int()
        groups = k // b_format.group if "channel" not in b_format.name else 1
        scales = (torch.rand(n, groups, generator=draw, device="cuda") * 0.02 + 1e-3).to(dtype)
        zeros = [torch.randint(0, 17, (n, groups), generator=draw, device="cuda").to(torch.uint8)]
        return x, [words, scales, *(zeros if len(b_format.storage) > 2 else [])]
    made = cancelling_gated if gated else cancelling
    x, weight = made(max(COMPARED_OF_MANY), n, k, dtype, "cuda", exponents=b_format.exponents)
    return x, list(b_format.stored(weight))


def serves(tile: NarrowTile, case: Case, every: bool = True) -> bool:
    """Whether a tile computes a case, and is one of those that are enough for it."""
    problem = GemmProblem(*case.shape, case.dtype, case.spec, 0)
    if not serves_packed(tile, problem):
        return False
    return every or case.spec in TIMED_SPECS or PACKED_TILES.index(tile) in SOME_TILES


def compile_part(part: int, parts: int) -> None:
    """Compile a part of all kernels, for Triton's cache; what fails, fails again where it is compared."""
    work: list[tuple[NarrowTile, Case | None]] = [
        (tile, case) for case in unique_kernels() for tile in PACKED_TILES if serves(tile, case, False)
    ]
    work += [(tile, None) for tile in NARROW_TILES if tile.block_n == 64]
    for tile, case in work[part::parts]:
        stuck = threading.Timer(60, said, ("  is stuck:", tile, case))
        stuck.start()
        try:
            if case is None:
                x = torch.zeros(1, 1024, device="cuda", dtype=torch.bfloat16)
                run(tile, x, [torch.zeros(256, 1024, device="cuda", dtype=x.dtype)], MatmulSpec())
            else:
                x, stored = operands(case.spec.b_format, "random", 256, 1024 * case.spec.k_slices, case.dtype, False)
                run(tile, x[:1], stored, case.spec, case.bias(256))
            torch.cuda.synchronize()
        except Exception as error:
            said("  does not run:", tile.about, case and case.spec, reason(error))
        stuck.cancel()


def unique_kernels() -> list[Case]:
    return list({(case.spec, case.dtype): case for case in CASES}.values())


def compiled_side_by_side(module: str, seconds: float) -> None:
    """Compile in processes, because Triton's front end holds Python's lock.

    Args:
        module: whose ``--compile PART/PARTS`` does a part.
        seconds: that they have.
    """
    parts = max(1, min(14, (os.cpu_count() or 2) - 1))
    command = [sys.executable, "-m", module, "--compile"]
    running = [subprocess.Popen([*command, f"{part}/{parts}"]) for part in range(parts)]
    stop = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, stop - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            said("  a process that compiles took too long")


def wrong_bits(tiles: Sequence[NarrowTile], deadline: float) -> Iterator[str]:
    """Where a tile gives other bits than the matrix that is stored."""
    for case in CASES:
        b_format, epilogue, k_slices = case.spec.b_format, case.spec.epilogue, case.spec.k_slices
        of_format, dtype, (n, k) = case.spec, case.dtype, case.shape
        count = 0
        for kind in ("random", "cancelling")[: 1 if dtype == torch.float16 else 2]:  # those overflow in fp16
            x, stored = operands(b_format, kind, n, k, dtype, epilogue.gated)
            bias = case.bias(n)
            matrix = definition(b_format, stored, x)

            def by_pointers(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = bias) -> torch.Tensor:
                return triton_gemm.mm_ptr(a, b, bias)

            if k_slices > 1:
                parts = [
                    by_pointers(*one) for one in zip(x.chunk(k_slices, 1), matrix.t().chunk(k_slices), strict=True)
                ]
                while len(parts) > 1:
                    parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
                expected = parts[0]
            else:
                expected = by_pointers(x, matrix.t())
            expected = silu_and_mul(expected) if epilogue.gated else expected
            if expected.isnan().any():
                yield f"{of_format} {n}x{k}: nothing to compare with"
            for tile, m in compared(tile for tile in tiles if serves(tile, case, False)):
                count += 1
                try:
                    got = run(tile, x[-m:], stored, of_format, bias)
                except Exception as error:
                    yield f"{tile.about} K {tile.block_k}: {of_format} {dtype}: {reason(error)}"
                    break
                if not torch.equal(got, expected[-m:]):
                    share = 100 * (got != expected[-m:]).double().mean()
                    what = f"{share:.1f} % differ, {100 * got.isnan().double().mean():.1f} % NaN"
                    yield f"{tile.about} K {tile.block_k}: {of_format} {dtype} N={n} K={k} M={m}, {kind}: {what}"
        said(f"  {of_format} {dtype} N={n} K={k}: {count} compared")
        if time.monotonic() > deadline:
            said("  bits: no time for more")
            return


def compared(tiles: Iterable[NarrowTile]) -> Iterator[tuple[NarrowTile, int]]:
    """Each with the numbers of rows that it is compared at."""
    return ((tile, m) for tile in tiles for m in (COMPARED if tile.block_m < MANY else COMPARED_OF_MANY))


def faults(tile: NarrowTile) -> Iterator[str]:
    """Planted ones that do not show; each is of what is stored, beside the matrix that it should stand for."""
    b_format, n, k = integers(4, 32, True, False), 256, 1024
    spec = MatmulSpec(NONE, 1, b_format)
    for kind in ("random", "cancelling"):
        x, (words, scales, zeros) = operands(b_format, kind, n, k, torch.bfloat16, False)
        expected = triton_gemm.mm_ptr(x, definition(b_format, (words, scales, zeros), x).t())
        swapped = (words & 0x0F0F0F0F) << 4 | (words >> 4) & 0x0F0F0F0F
        planted = {
            "zero point + 1": (words, scales, zeros + 1),
            "nibbles swapped": (swapped, scales, zeros),
            "scales of the next group": (words, scales.roll(1, 1), zeros),
            "scales of the next row": (words, scales.roll(1, 0), zeros),
            "zero points of the next group": (words, scales, zeros.roll(1, 1)),
            "scales one bit off": (words, (scales.view(torch.int16) ^ 1).view(scales.dtype), zeros),
        }
        for name, stored in planted.items():
            differs = (run(tile, x, stored, spec) != expected).double().mean()
            said(f"  fault {name}, {kind}: {100 * differs:.1f} % of elements differ")
            if kind == "random" and differs < 0.05:
                yield f"fault {name} does not show"


def by_vllm(b_format: Format) -> Iterator[tuple[str, Callable[[Stored], Callable[[torch.Tensor], torch.Tensor]]]]:
    """vLLM's kernels: each prepares a weight, and gives what multiplies with it."""
    if b_format != integers(4, 128, False, False):
        return
    try:
        from vllm import _custom_ops as ops
        from vllm.scalar_type import scalar_types
    except Exception as error:
        said("vLLM is not there:", reason(error))
        return

    def machete(stored: Stored) -> Callable[[torch.Tensor], torch.Tensor]:
        words, scales = stored
        packed = ops.machete_prepack_B(words.t(), scales.dtype, scalar_types.uint4b8, scales.dtype)
        by_group = scales.t().contiguous()
        return lambda x: ops.machete_mm(
            x, packed, scalar_types.uint4b8, b_group_scales=by_group, b_group_size=128
        )  # fmt: skip

    def marlin(stored: Stored) -> Callable[[torch.Tensor], torch.Tensor]:
        from vllm.model_executor.layers.quantization.utils import marlin_utils

        words, scales = stored
        n, k = len(words), words.shape[1] * 8
        packed = ops.gptq_marlin_repack(words.t().contiguous(), k, n, 4)
        permuted = marlin_utils.marlin_permute_scales(scales.t().contiguous(), k, n, 128)
        workspace = marlin_utils.marlin_make_workspace_new(words.device, 4)
        return lambda x: ops.marlin_gemm(
            x, None, packed, None, permuted, None, None, None, workspace, scalar_types.uint4b8, len(x), n, k,
            use_fp32_reduce=True,
        )  # fmt: skip

    yield "machete", machete
    yield "marlin", marlin


class Table:
    """Rows for the CSV, and what is printed of them."""

    def __init__(self, path: Path, columns: Sequence[str] = COLUMNS) -> None:
        self.path, self.columns = path, columns
        self.rows: list[tuple] = []

    def add(self, *row: object) -> None:
        self.rows.append(row)

    def save(self) -> None:
        with self.path.open("w", newline="") as file:
            csv.writer(file).writerows([self.columns, *self.rows])


def time_all(table: Table, timer: GraphTimer, deadline: float) -> None:
    cache = Gpu.of(0).l2_bytes
    for b_format, (name, (n, k)) in pairs(TIMED_FORMATS, SHAPES.items()):
        main = b_format == TIMED_FORMATS[0]
        if not main and name != "gate_up":
            continue
        spec = MatmulSpec(NONE, 1, b_format)
        x, stored = operands(b_format, "random", n, k, torch.bfloat16, False)
        x = torch.randn(max(TIMED), k, device="cuda").bfloat16()
        copies = copies_beyond_cache(stored[0].numel() * 4, cache)
        weights = [[one.clone() for one in stored] for _ in range(copies)]
        plain_copies = copies_beyond_cache(n * k * 2, cache)
        matrices = [definition(b_format, one, x) for one in weights[:plain_copies]] if main else []
        prepared = {}
        for vllm_name, prepare in by_vllm(b_format):
            try:
                prepared[vllm_name] = [prepare(one) for one in weights]
                got = prepared[vllm_name][0](x[:8])
                wanted = x[:8].double() @ definition(b_format, weights[0], x).double().t()
                said(f"  {vllm_name}: error {((got - wanted).norm() / wanted.norm()).item():.2e}")
            except Exception as error:
                said(f"  {vllm_name} {name}: {reason(error)}")
                prepared.pop(vllm_name, None)
        problem = GemmProblem(n, k, x.dtype, spec, 0)
        for m in TIMED if main else TIMED_IN_OTHER_FORMATS:
            if time.monotonic() > deadline:
                said("time: no time for more")
                return
            a, ways = x[:m], {}
            out = torch.empty(m, n, dtype=a.dtype, device="cuda")
            reduction = LinearReduction.of_device("cuda", n, k, a.dtype)

            def packed(tile: NarrowTile, one: Stored, a: Any = a, out: Any = out, r: Any = reduction) -> Any:
                return triton_gemm.gemm_sm90_swap_ab(a, one[0].t(), None, out, r, tile, True, spec, one[1:])  # noqa: B023

            def plain(tile: NarrowTile, one: Any, a: Any = a, out: Any = out, r: Any = reduction) -> Any:
                return triton_gemm.gemm_sm90_swap_ab(a, one.t(), None, out, r, tile, True)

            for tile in sm90_tiles(problem, m, Gpu.of(0)):
                ways[f"packed {tile.about} K {tile.block_k}"] = [partial(packed, tile, one) for one in weights]
            if main and m <= MANY:
                for tile in narrow_tiles(m, n, Gpu.of(0)):
                    if tile.block_n == 64:
                        ways[f"bf16 {tile.about}"] = [partial(plain, tile, one) for one in matrices]
            if main:
                ways["bf16 torch.mm"] = [partial(torch.mm, a, one.t(), out=out) for one in matrices]
                if m > MANY:
                    scratch = torch.empty(n, k, dtype=a.dtype, device="cuda")

                    def decoded(one: Stored, a: Any = a, out: Any = out, scratch: Any = scratch) -> Any:
                        return torch.mm(a, b_format.matrix(one[0].t(), one[1:], a, scratch), out=out)  # noqa: B023

                    ways["decode and torch.mm"] = [partial(decoded, one) for one in weights]
            for vllm_name, calls in prepared.items():
                if vllm_name == "marlin" and m > MANY:
                    continue
                ways[vllm_name] = [partial(call, a) for call in calls]
            expected = 2 + n * k / 2 / 3e6 + 2 * m * n * k / 7e8
            samples = timer.time(list(ways.values()), expected, REPLAYS)
            found = {way: (statistics.median(times), min(times)) for way, times in zip(ways, samples, strict=True)}
            for way, (p50, best) in found.items():
                moved = n * k / 2 if not way.startswith("bf16") else 2 * n * k
                table.add("time", b_format.name, n, k, m, way, f"{p50:.2f}", f"{best:.2f}", f"{moved / p50 / 1e6:.2f}")
            table.save()
            by_kind: dict[str, tuple[float, str]] = {}
            for way, (p50, _) in found.items():
                kind = way if way in prepared or "mm" in way else way.split()[0]
                by_kind[kind] = min(by_kind.get(kind, (1e9, "")), (p50, way))
            said(f"{name} {b_format.name} N={n} K={k} M={m}: " + "; ".join(f"{w} {t:.1f}" for t, w in by_kind.values()))
            if m > MANY:
                said("    " + "; ".join(f"{way} {p50:.1f}" for way, (p50, _) in found.items() if way not in by_kind))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.packed_tiles", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")))
    parser.add_argument("--seconds", type=float, default=190.0, help="after which nothing new is begun")
    parser.add_argument("--compile", help="a part of the kernels alone, as 0/14")
    arguments = parser.parse_args()
    if arguments.compile:
        compile_part(*map(int, arguments.compile.split("/")))
        return 0
    started = time.monotonic()
    torch.manual_seed(0)
    give_up = threading.Timer(arguments.seconds + 30, lambda: (said("gave up"), os._exit(3)))
    give_up.daemon = True
    give_up.start()
    table = Table(arguments.out / "packed_tiles.csv")
    said(torch.cuda.get_device_name(), torch.__version__)
    compiled_side_by_side("benchmarks.packed_tiles", 100)
    said(f"compiled after {time.monotonic() - started:.0f} s")
    tiles, problems = PACKED_TILES, []
    # The tiles are timed even if some are wrong; the verdict is printed last.
    problems += wrong_bits(tiles, started + 0.6 * arguments.seconds)
    problems += faults(tiles[0])
    said(f"bits after {time.monotonic() - started:.0f} s: {len(problems)} problems")
    for one in problems[:20]:
        said("  PROBLEM", one)
    time_all(table, GraphTimer(), started + arguments.seconds)
    for one in problems:
        table.add("problem", "", "", "", "", one, "", "", "")
    table.save()
    said(f"{len(problems)} problems; {time.monotonic() - started:.0f} s")
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())

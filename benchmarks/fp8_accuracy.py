"""Products of FP8 in blocks on a Hopper: ``python -m benchmarks.fp8_accuracy``. How far they are from float64, whose
activations are not quantised, and whether a row has the same bits among 31 rows and among 32: where vLLM's kernel
changes, if it has FlashInfer and DeepGEMM. CSV to --out.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.fp8_products import Multiply, Weight, ours, plain
from benchmarks.packed_tiles import SHAPES
from benchmarks.record import DATA, Measurement, Setting, case_text, update
from vllm_batch_invariant.envs import FLAG

ROWS = (31, 32, 256)
"""Rows of a step; the first ones are the same in each."""
KINDS = ("normal", "large channels")
_CHANNELS, _FACTOR = 8, 32.0
"""Channels of activations that are larger than others, and how much."""


def activations(k: int, kind: str) -> torch.Tensor:
    """[most rows, K] bf16."""
    x = torch.randn(max(ROWS), k, generator=torch.Generator("cuda").manual_seed(k), device="cuda")
    if kind == "large channels":
        x[:, :: k // _CHANNELS] *= _FACTOR
    return x.bfloat16()


PROVIDERS: dict[str, Callable[[Weight], Multiply]] = {"stock": plain, "ours": ours}


def measured(n: int, k: int, kind: str, setting: Setting) -> Iterator[Measurement]:
    """The rows of a layer for the data: errors, and the share of elements that differ from those among 31 rows."""
    weight, x = Weight.drawn(n, k, seed=n), activations(k, kind)
    exact = x.double() @ weight.in_float64.T
    torch.cuda.synchronize()  # a kernel may read a weight before those before it have ended
    of_stock: dict[int, float] = {}
    for provider, of in PROVIDERS.items():
        multiply = of(weight)
        results = {rows: multiply(x[:rows]) for rows in ROWS}
        for rows, y in results.items():
            error = ((y.double() - exact[:rows]).norm() / exact[:rows].norm()).item()
            same = y[: ROWS[0]] == results[ROWS[0]]
            of_stock.setdefault(rows, error)
            case = case_text(op="fp8-linear", N=n, K=k, M=rows, kind=kind.replace(" ", "-"))
            bits = "equal" if bool(same.all()) else "differ"
            for metric, value, ratio in (
                ("error", error, error / of_stock[rows]),
                ("differing", 1 - same.float().mean().item(), None),
            ):
                yield Measurement(
                    benchmark="accuracy", provider=provider, case=case, metric=metric, unit="relative", p50=value,
                    p20=value, p80=value, ratio=ratio, bits=bits, **asdict(setting),
                )  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    """Measure, print and write; the exit status is 1 where the mode's bits differ, or no row of plain vLLM's does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DATA / "accuracy.csv")
    options = parser.parse_args(arguments)
    os.environ.setdefault(FLAG, "0")
    setting = Setting.here()
    rows = [row for n, k in SHAPES.values() for kind in KINDS for row in measured(n, k, kind, setting)]
    update(options.out, rows)
    table = Table("provider", "case", "metric", "value")
    for row in rows:
        table.add_row(row.provider, row.case, row.metric, f"{row.p50:.5f}")
    Console(width=140).print(table)
    differing = {who: any(row.bits == "differ" for row in rows if row.provider == who) for who in PROVIDERS}
    return int(differing["ours"] or not differing["stock"])


if __name__ == "__main__":
    sys.exit(main())

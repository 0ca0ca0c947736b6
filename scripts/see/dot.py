"""Records one element of x @ w.T in batches of 1 to 128 rows, by PyTorch as it is and in the mode, for the site.

usage: python -m scripts.see.dot [--out FILE]

What a BLAS adds first cannot be read from outside, so it is asked with numbers, in calls of the same shape:

- The running sum after k terms is the result where all later terms are 0: adding 0 changes no sum, so this is what the
  same order makes of the first k terms.
- Term k meets term 0 in the sum of so many terms: with 2^60 in the place of term 0, -2^60 in that of term k and 1 in
  all others, every 1 that is added to a large number is lost, and those that are left were added after the two had met.
  (Xie et al., FPRev: Revealing the Order of Floating-Point Summation, arXiv:2411.00442.)
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from scripts.see.data import DATA, here
from vllm_batch_invariant.ops.linear import linear

K, N = 1024, 512
BATCHES = (*range(1, 33), 48, 64, 96, 128)
STEP = 16
"""Terms between two running sums that are kept."""
_LARGE = 2.0**60
Linear = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def operands() -> tuple[torch.Tensor, torch.Tensor]:
    """x [128, K] and w [N, K], as large as those of a model."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(max(BATCHES), K, generator=generator)
    return x, torch.randn(N, K, generator=generator) / math.sqrt(K)


def orders(compute: Linear, column: int) -> list[dict[str, Any]]:
    """The different results of one element, with the batches that have each, and how each is added up."""
    x, weight = operands()
    batches: dict[float, list[int]] = {}
    for batch in BATCHES:
        batches.setdefault(float(compute(x[:batch], weight)[0, column]), []).append(batch)
    return [
        {
            "batches": found,
            "result": result,
            "running": running(compute, found[0], column),
            "meets": meets(compute, found[0], column),
        }
        for result, found in batches.items()
    ]


def running(compute: Linear, batch: int, column: int) -> list[float]:
    """The sum of the first k terms, for every k that :data:`STEP` divides."""
    x, weight = operands()
    found = []
    for k in range(STEP, K + 1, STEP):
        first = x[:batch].clone()
        first[0, k:] = 0
        found.append(float(compute(first, weight)[0, column]))
    return found


def meets(compute: Linear, batch: int, column: int) -> list[int]:
    """For term 1 and every later one: how many terms the first sum has that both it and term 0 are in."""
    x, ones = operands()[0][:batch].clone(), torch.ones(N, K)
    found = []
    for k in range(1, K):
        x[0] = 1
        x[0, 0], x[0, k] = _LARGE, -_LARGE
        found.append(K - int(compute(x, ones)[0, column]))
    return found


def telling_column() -> int:
    """The first column whose results differ most."""
    x, weight = operands()
    results = torch.stack([F.linear(x[:batch], weight)[0] for batch in BATCHES])
    return max(range(N), key=lambda column: len(results[:, column].unique()))


def record() -> dict[str, Any]:
    """What the site shows.

    Raises:
        RuntimeError: the mode gave the element more than one result.
    """
    column = telling_column()
    x, weight = operands()
    terms = x[0].double() * weight[column].double()  # exact: 24 bits times 24 bits
    stock, ours = orders(F.linear, column), orders(linear, column)
    if len(ours) != 1:
        raise RuntimeError(f"the mode gave one element {len(ours)} results in batches of {BATCHES}")
    return {
        "written_by": "python -m scripts.see.dot",
        "where": here(),
        "k": K,
        "n": N,
        "column": column,
        "step": STEP,
        "exact": [math.fsum(terms[:k].tolist()) for k in range(STEP, K + 1, STEP)],
        "stock": stock,
        "ours": ours,
    }


def main(arguments: list[str] | None = None) -> None:
    """Write the recording."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA / "dot.json", help="where to write it (default: site/data)")
    path = parser.parse_args(arguments).out
    with torch.no_grad():
        path.write_text(json.dumps(record()) + "\n")
    print(path)


if __name__ == "__main__":
    main()

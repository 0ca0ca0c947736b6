"""Floating-point addition is not associative: eight numbers whose sum is 0, added in all 40320 orders.

usage: python -m scripts.demos.addition

Every addition is IEEE 754's, so this is what any machine prints:

    (0.1 + 0.2) + 0.3 = 0.6000000000000001, 0.1 + (0.2 + 0.3) = 0.6

    All orders of 1, -1, 0.01, -0.01, 1e-05, -1e-05, 1e-10, -1e-10

    | dtype    | orders | different sums | orders that give 0 | largest error |
    |----------|--------|----------------|--------------------|---------------|
    | float64  | 40320  | 275            | 12604              | 2.22e-16      |
    | float32  | 40320  | 137            | 13504              | 2.34e-08      |
    | float16  | 40320  | 21             | 17920              | 0.000247      |
    | bfloat16 | 40320  | 21             | 11616              | 0.00391       |
"""

import argparse
from dataclasses import dataclass
from itertools import permutations

import torch
from rich import box
from rich.console import Console
from rich.table import Table

NUMBERS = [sign * size for size in (1, 1e-2, 1e-5, 1e-10) for sign in (1, -1)]
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Sums:
    """What all orders of the numbers gave."""

    orders: int
    distinct: int
    exact: int
    """Orders that gave 0."""
    largest: float


def sums(dtype: torch.dtype) -> Sums:
    """Add the numbers from left to right in every order, each partial sum rounded to ``dtype``."""
    orders = torch.tensor(list(permutations(NUMBERS)), dtype=torch.float64).to(dtype)
    total = torch.zeros(len(orders), dtype=dtype)
    for number in orders.unbind(1):
        total = total + number
    return Sums(len(total), len(total.unique()), int((total == 0).sum()), float(total.abs().max()))


def main(arguments: list[str] | None = None) -> None:
    """Print the two lines and the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(
        arguments
    )
    console = Console()
    console.print(
        f"(0.1 + 0.2) + 0.3 = {(0.1 + 0.2) + 0.3}, 0.1 + (0.2 + 0.3) = {0.1 + (0.2 + 0.3)}\n", highlight=False
    )
    table = Table("dtype", "orders", "different sums", "orders that give 0", "largest error", box=box.MARKDOWN)
    for dtype in DTYPES:
        found = sums(dtype)
        name = str(dtype).removeprefix("torch.")
        table.add_row(name, str(found.orders), str(found.distinct), str(found.exact), f"{found.largest:.3g}")
    console.print(f"All orders of {', '.join(f'{number:g}' for number in NUMBERS)}", highlight=False)
    console.print(table)


if __name__ == "__main__":
    main()

"""The same row in batches of several sizes: means and a matmul of plain PyTorch, and in batch_invariant_mode().

usage: python -m scripts.demos.batches [--device cpu|cuda]

The mode's column is 1 on any machine. How many results plain PyTorch has depends on the machine and its threads; on a
Xeon with AVX-512 and 2 threads (PyTorch 2.13) this was printed:

    Different results in 9 batches of 1 to 64, cpu

    |                          | plain PyTorch | in the mode |
    |--------------------------|---------------|-------------|
    | mean of a row of 65536   | 2             | 1           |
    | mean of a column of 4096 | 3             | 1           |
    | row @ [1024, 512]        | 3             | 1           |
"""

import argparse
from collections.abc import Callable

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from vllm_batch_invariant import set_batch_invariant_mode

BATCHES = (1, 2, 3, 5, 8, 16, 17, 31, 64)
LENGTH, HEIGHT = 1 << 16, 1 << 12
"""Elements of a row and of a column whose mean is taken."""
TRIALS = 16
"""Rows and columns tried, because two orders of adding often give one number the same bits."""
DEPTH, WIDTH = 1024, 512


def operations(device: str) -> dict[str, Callable[[int], torch.Tensor]]:
    """Each takes the size of a batch, and returns what is computed there for its first row (column), trial by trial."""
    generator = torch.Generator().manual_seed(0)
    most = max(BATCHES) + TRIALS
    rows, columns, x, weight = (
        torch.randn(*shape, generator=generator).to(device)
        for shape in ((most, LENGTH), (HEIGHT, most), (most, DEPTH), (DEPTH, WIDTH))
    )

    def mean_of_row(batch: int) -> torch.Tensor:
        return torch.stack([rows[trial : trial + batch].mean(1)[0] for trial in range(TRIALS)])

    def mean_of_column(batch: int) -> torch.Tensor:
        return torch.stack([columns[:, trial : trial + batch].contiguous().mean(0)[0] for trial in range(TRIALS)])

    return {
        f"mean of a row of {LENGTH}": mean_of_row,
        f"mean of a column of {HEIGHT}": mean_of_column,
        f"row @ [{DEPTH}, {WIDTH}]": lambda batch: (x[:batch] @ weight)[0],
    }


def distinct(device: str, in_mode: bool) -> dict[str, int]:
    """How many different results each operation has in the batches."""
    found: dict[str, int] = {}
    with set_batch_invariant_mode(in_mode), torch.no_grad():
        for name, operation in operations(device).items():
            found[name] = len({operation(batch).cpu().numpy().tobytes() for batch in BATCHES})
    return found


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="where to compute")
    device = parser.parse_args(arguments).device
    plain, ours = distinct(device, in_mode=False), distinct(device, in_mode=True)
    print(f"Different results in {len(BATCHES)} batches of {BATCHES[0]} to {BATCHES[-1]}, {device}")
    table = Table("", "plain PyTorch", "in the mode", box=box.MARKDOWN)
    for name in plain:
        table.add_row(name, str(plain[name]), str(ours[name]))
    Console().print(table)


if __name__ == "__main__":
    main()

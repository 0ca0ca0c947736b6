"""What moves the bits of a sum and of a matmul: the block and split-K do, the tile does not.

usage: python -m scripts.demos.blocks [--device cpu|cuda]

A kernel that sums a row cuts it into blocks, and one that multiplies matrices cuts its result into tiles and, if the
result is small, K into splits. A block or a split says which numbers are added first; a tile only says who adds them.
Written out in single additions, which IEEE 754 defines, so this is what any machine prints:

    Sum of 1048576 numbers

    | block | float32    | float16 |
    |-------|------------|---------|
    | 64    | 450.005798 | 438.25  |
    | 128   | 450.008453 | 452.5   |
    | 256   | 450.008575 | 448.25  |
    | 512   | 450.007782 | 449.75  |
    | 1024  | 450.007935 | 454.5   |

    256 x 256 matmul: elements of 65536 with other bits

    | tile      | float32 | float16 |
    |-----------|---------|---------|
    | 32 x 64   | 0       | 0       |
    | 64 x 128  | 0       | 0       |
    | 128 x 128 | 0       | 0       |

    256 x 256 matmul: elements of 65536 with other bits

    | split-K | float32 | float16 |
    |---------|---------|---------|
    | 1       | 0       | 0       |
    | 2       | 57747   | 57606   |
    | 4       | 58747   | 58941   |
    | 8       | 59016   | 59098   |
"""

import argparse
from collections.abc import Callable

import torch
from rich import box
from rich.console import Console
from rich.table import Table

ELEMENTS = 1 << 20
BLOCKS = (64, 128, 256, 512, 1024)
SIDE = 256
TILES = ((32, 64), (64, 128), (128, 128))
SPLITS = (1, 2, 4, 8)
DTYPES = (torch.float32, torch.float16)


def numbers(*shape: int, seed: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Uniform from -1 to 1."""
    generator = torch.Generator().manual_seed(seed)
    return (2 * torch.rand(*shape, generator=generator) - 1).to(device, dtype)


def left_to_right(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, one element after the other."""
    total = torch.zeros_like(x[..., 0])
    for element in x.unbind(-1):
        total = total + element
    return total


def blocked_sum(x: torch.Tensor, block: int) -> torch.Tensor:
    """Sum each block, then the blocks' sums."""
    return left_to_right(left_to_right(x.view(-1, block)))


def matmul(a: torch.Tensor, b: torch.Tensor, tile: tuple[int, int], splits: int = 1) -> torch.Tensor:
    """[M, K] @ [K, N], tile by tile of the result; in each, K is walked upwards in each split, then they are added."""
    out = torch.empty(a.shape[0], b.shape[1], dtype=a.dtype, device=a.device)
    for top in range(0, a.shape[0], tile[0]):
        for left in range(0, b.shape[1], tile[1]):
            rows, columns = slice(top, top + tile[0]), slice(left, left + tile[1])
            partial = []
            for part in torch.arange(a.shape[1], device=a.device).chunk(splits):
                total = torch.zeros_like(out[rows, columns])
                for k in part.tolist():
                    total = total + a[rows, k, None] * b[k, columns]
                partial.append(total)
            out[rows, columns] = left_to_right(torch.stack(partial, dim=-1))
    return out


def sums(dtype: torch.dtype, device: str = "cpu") -> dict[int, float]:
    """The sum for each block size."""
    x = numbers(ELEMENTS, seed=0, dtype=dtype, device=device)
    return {block: float(blocked_sum(x, block)) for block in BLOCKS}


def moved(dtype: torch.dtype, device: str = "cpu") -> tuple[dict[tuple[int, int], int], dict[int, int]]:
    """Elements of a matmul with other bits than the first tile's, for each tile, and for each split-K."""
    a, b = (numbers(SIDE, SIDE, seed=seed, dtype=dtype, device=device) for seed in (1, 2))
    first = matmul(a, b, TILES[0])

    def differ(other: torch.Tensor) -> int:
        return int((other != first).sum())

    by_tile = {tile: differ(matmul(a, b, tile)) for tile in TILES}
    return by_tile, {splits: differ(matmul(a, b, TILES[-1], splits)) for splits in SPLITS}


def main(arguments: list[str] | None = None) -> None:
    """Print the three tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", help="where to add")
    device = parser.parse_args(arguments).device
    names = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    found = [(sums(dtype, device), *moved(dtype, device)) for dtype in DTYPES]

    def show(title: str, first: str, keys: tuple, values: Callable[[int, object], str]) -> None:
        print(title)
        table = Table(first, *names, box=box.MARKDOWN)
        for key in keys:
            label = " x ".join(map(str, key)) if isinstance(key, tuple) else str(key)
            table.add_row(label, *(values(which, key) for which in range(len(DTYPES))))
        Console().print(table)

    show(f"Sum of {ELEMENTS} numbers", "block", BLOCKS, lambda which, block: f"{found[which][0][block]:.9g}")
    title = f"{SIDE} x {SIDE} matmul: elements of {SIDE * SIDE} with other bits"
    show(title, "tile", TILES, lambda which, tile: str(found[which][1][tile]))
    show(title, "split-K", SPLITS, lambda which, splits: str(found[which][2][splits]))


if __name__ == "__main__":
    main()

"""Measures sums by block size and a product by tile on an NVIDIA GPU, for the site: kernels in Triton, as a GPU adds.

usage: python -m scripts.see.gpu_blocks [--out FILE]

The numbers are those of scripts/demos/blocks.py. There every addition is written out; here a block is one tl.sum, whose
order is the compiler's, and a product is a tl.dot with one fp32 accumulator for each element.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from benchmarks.record import Setting
from scripts.demos.blocks import BLOCKS, DTYPES, ELEMENTS, SIDE, SPLITS, TILES, numbers
from scripts.see.data import DATA
from vllm_batch_invariant import __version__

_BLOCK_K = 32
_NAMES = {torch.float32: "fp32", torch.float16: "fp16"}


@triton.jit
def _sum_of_blocks(x_ptr, out_ptr, BLOCK: tl.constexpr):  # noqa: ANN001, ANN202, N803
    block = tl.program_id(0)
    x = tl.load(x_ptr + block * BLOCK + tl.arange(0, BLOCK))
    tl.store(out_ptr + block, tl.sum(x, axis=0, dtype=x_ptr.dtype.element_ty))


@triton.jit
def _matmul(  # noqa: ANN202
    a_ptr,  # noqa: ANN001
    b_ptr,  # noqa: ANN001
    out_ptr,  # noqa: ANN001
    SIDE: tl.constexpr,  # noqa: N803
    BLOCK_M: tl.constexpr,  # noqa: N803
    BLOCK_N: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    SPLITS: tl.constexpr,  # noqa: N803
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for split in tl.static_range(SPLITS):
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(split * (SIDE // SPLITS), (split + 1) * (SIDE // SPLITS), BLOCK_K):
            k = start + tl.arange(0, BLOCK_K)
            a = tl.load(a_ptr + rows[:, None] * SIDE + k[None, :])
            b = tl.load(b_ptr + k[:, None] * SIDE + columns[None, :])
            acc = tl.dot(a, b, acc, input_precision="ieee")
        total = acc if SPLITS == 1 else total + acc
    tl.store(out_ptr + rows[:, None] * SIDE + columns[None, :], total.to(out_ptr.dtype.element_ty))


def sum_by_block(x: torch.Tensor, block: int) -> float:
    """Each block by one program, then the blocks' sums by PyTorch on the GPU."""
    sums = torch.empty(x.numel() // block, dtype=x.dtype, device=x.device)
    _sum_of_blocks[(len(sums),)](x, sums, BLOCK=block)
    return float(sums.sum())


def product(a: torch.Tensor, b: torch.Tensor, tile: tuple[int, int], splits: int) -> torch.Tensor:
    """a @ b, a program a tile; K in ``splits`` parts, each with an accumulator of its own."""
    out = torch.empty_like(a)
    grid = (SIDE // tile[0], SIDE // tile[1])
    _matmul[grid](a, b, out, SIDE=SIDE, BLOCK_M=tile[0], BLOCK_N=tile[1], BLOCK_K=_BLOCK_K, SPLITS=splits)
    return out


def measure(device: str) -> dict[str, Any]:
    """Sums by dtype and block; by dtype and way of cutting, the elements with other bits than the first tile's."""
    setting = Setting.here()
    sums: dict[str, dict[int, float]] = {}
    moved: dict[str, dict[str, int]] = {}
    for dtype in DTYPES:
        x = numbers(ELEMENTS, seed=0, dtype=dtype, device=device)
        sums[_NAMES[dtype]] = {block: sum_by_block(x, block) for block in BLOCKS}
        a, b = (numbers(SIDE, SIDE, seed=seed, dtype=dtype, device=device) for seed in (1, 2))
        first = product(a, b, TILES[0], 1)
        ways = [(tile, 1) for tile in TILES] + [(TILES[-1], splits) for splits in SPLITS[1:]]
        moved[_NAMES[dtype]] = {
            f"{tile[0]}x{tile[1]}/{splits}": int((product(a, b, tile, splits) != first).sum()) for tile, splits in ways
        }
    where = {"machine": setting.gpu, "torch": torch.__version__, "triton": triton.__version__, "date": setting.date}
    where |= {"vllm-batch-invariant": __version__}
    return {"written_by": "python -m scripts.see.gpu_blocks", "where": where, "sums": sums, "product": moved}


def main(arguments: list[str] | None = None) -> None:
    """Write what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA / "gpu_blocks.json", help="default: site/data/gpu_blocks.json")
    path = parser.parse_args(arguments).out
    if not torch.cuda.is_available():
        parser.error("this measures a GPU, and there is none")
    path.write_text(json.dumps(measure("cuda")) + "\n")
    print(path)


if __name__ == "__main__":
    main()

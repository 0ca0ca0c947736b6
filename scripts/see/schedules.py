"""Writes the tiles of the mode's cost model on an H200, for weights and batches of benchmarks/data/linear.csv.

usage: python -m scripts.see.schedules [--out FILE]
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.record import DATA as BENCHMARKS
from benchmarks.record import read
from scripts.see.data import DATA
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.linear.schedule import tma_tile

H200 = Gpu("NVIDIA H200", num_sms=132, shared_memory=227 << 10, has_tma=True, l2_bytes=60 << 20, has_wgmma=True)
SHAPES = ((4096, 4096), (6144, 4096), (4096, 12288), (896, 4864), (2560, 2560))
"""N and K: of Qwen3-8B, and narrow ones."""


def schedules() -> dict[str, Any]:
    """For each weight and number of rows that were measured: block_m, block_n."""
    measured = {
        tuple(int(found.keys[name]) for name in "MNK")
        for found in read(BENCHMARKS / "linear.csv")
        if found.metric == "time"
    }
    shapes = [shape for shape in SHAPES if any(found[1:] == shape for found in measured)]
    batches = sorted({m for m, *shape in measured if tuple(shape) in shapes})

    def tile(m: int, n: int, k: int) -> list[int]:
        found = tma_tile(m, n, k, 2, H200)
        return [found.block_m, found.block_n]

    return {
        "written_by": "python -m scripts.see.schedules",
        "gpu": asdict(H200),
        "batches": batches,
        "shapes": [{"n": n, "k": k, "tiles": {m: tile(m, n, k) for m in batches}} for n, k in shapes],
    }


def main(arguments: list[str] | None = None) -> None:
    """Write the tiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=DATA / "schedules.json", help="default: site/data/schedules.json")
    path = parser.parse_args(arguments).out
    path.write_text(json.dumps(schedules()) + "\n")
    print(path)


if __name__ == "__main__":
    main()

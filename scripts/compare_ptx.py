"""Shows that a change of the kernels' sources left what is compiled of them as it was: writes the PTX of every variant
for a Hopper, and compares two such files. Needs no GPU.

usage: python -m scripts.compare_ptx write FILE [--operations NAME ...]
       python -m scripts.compare_ptx compare BEFORE AFTER

A kernel's name and lines of the source are no part of what is compared; its parameters have no names in PTX.
"""

import argparse
import gzip
import hashlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path


def write(path: Path, operations: list[str]) -> None:
    """Compile every variant of the operations, of all if none is named, and write its PTX."""
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    import triton
    from triton.backends.nvidia.compiler import CUDABackend

    from tests.ops import compiled_kernels

    CUDABackend.make_cubin = lambda *_: b""  # PTX is enough, and the assembler takes most of the time
    compiled_kernels.compile_instead_of_running()
    found = {}
    for operation in operations or compiled_kernels.VARIANTS:
        compiled_kernels.compiled.clear()
        compiled_kernels.VARIANTS[operation]()
        kernels = [[one.name, stripped(one.kernel.asm["ptx"], one.name)] for one in compiled_kernels.compiled]
        print(f"{operation}: {len(kernels)} variants of {len({name for name, _ in kernels})} kernels", flush=True)
        found[operation] = kernels
    path.write_bytes(gzip.compress(json.dumps({"triton": triton.__version__, "kernels": found}).encode()))


def stripped(ptx: str, name: str) -> str:
    """PTX without the kernel's name, comments and lines of the source."""
    lines = [re.sub(r"\s*//.*", "", line) for line in ptx.replace(name, "kernel").splitlines()]
    return "\n".join(line for line in lines if line.strip() and not re.match(r"\s*\.(file|loc)\b", line))


def compare(before: Path, after: Path) -> int:
    """Print which kernels have other variants than before, for the operations of both files; how many differ."""
    old, new = (json.loads(gzip.decompress(path.read_bytes())) for path in (before, after))
    if old["triton"] != new["triton"]:
        sys.exit(f"compiled by Triton {old['triton']} and {new['triton']}: nothing can be compared")
    missing, added = Counter(), Counter()
    both = old["kernels"].keys() & new["kernels"].keys()
    texts = [
        {hashlib.sha256(text.encode()).hexdigest(): name for key in both for name, text in one["kernels"][key]}
        for one in (old, new)
    ]
    for digest in texts[0].keys() - texts[1].keys():
        missing[texts[0][digest]] += 1
    for digest in texts[1].keys() - texts[0].keys():
        added[texts[1][digest]] += 1
    for name, count in sorted(missing.items()):
        print(f"{name}: {count} variants are no more")
    for name, count in sorted(added.items()):
        print(f"{name}: {count} variants are new")
    print(f"{len(texts[0].keys() & texts[1].keys())} variants of {len(set(texts[0].values()))} kernels are equal")
    return missing.total() + added.total()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("file", type=Path)
    writing.add_argument(
        "--operations", nargs="*", default=[], help="sm90, triton, flex, linear, rows; all if not given"
    )
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    parsed = parser.parse_args()
    if parsed.command == "write":
        write(parsed.file, parsed.operations)
    else:
        sys.exit(1 if compare(parsed.before, parsed.after) else 0)


if __name__ == "__main__":
    main()

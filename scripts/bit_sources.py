"""Digests of the sources that decide the bits of each operation: its reduction and its kernels on each device, without
comments, docstrings and formatting. CHANGELOG.md records them, and a test compares, so that no release changes bits
without a word. A changed source need not change a bit; ``scripts.compare_bits`` shows on a GPU whether it did.

usage: python -m scripts.bit_sources [--record]     prints the table, or puts it into CHANGELOG.md
"""

import argparse
import ast
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from vllm_batch_invariant.ops.devices import DEVICES as OWN
from vllm_batch_invariant.ops.devices import joined, known
from vllm_batch_invariant.sources import is_text, syntax

ROOT = Path(__file__).parents[1]
CHANGELOG = ROOT / "CHANGELOG.md"
OPS = ROOT / "vllm_batch_invariant" / "ops"
JOINED = {
    device.type: {
        name: module.partition(".")[2].replace(".", "/") + ".py" for name, module in device.operations.items()
    }
    for device in joined().values()
    if device.aten.startswith("vllm_batch_invariant.")
}
"""The file of each operation on a device that joins from a folder of its own in this package."""
DEVICES = {device.type: device.title for device in known().values() if device.type in {*OWN, *JOINED}}
OF_DEVICE = {
    "cpu": "cpu",
    "numba": "cpu",
    **dict.fromkeys(("cuda", "triton", "sm90", "plan", "walk", "work"), "cuda"),
}
"""How names of files and folders begin that only one device uses."""
WHOLE = ("reduction.py", "merge.py", "splits.py", "row_reduction.py")
"""Files that say in plain Python in which order is added; of others with kernels only these and constants are read."""
TABLE = re.compile(r"^\| operation \|.*\n(\|.*\n)+", re.MULTILINE)


def sources(operation: Path, device: str, ops: Path = OPS) -> Iterator[str]:
    """What decides the bits of an operation on a device, a text a file; none where the device does not have it."""
    of_file = {path: _devices(path.relative_to(operation)) for path in sorted(operation.rglob("*.py"))}
    of_file |= {path: {device} for path in _of_joined(operation.name, device, ops.parent)}
    for path, of in of_file.items() if {device} in of_file.values() else ():
        if of and device not in of:
            continue
        found = _deciding(path.read_text(), path.name in WHOLE, of == {device} and device != "cuda")
        if found:
            yield f"{Path(os.path.relpath(path, ops)).as_posix()}\n{found}"


@cache
def _deciding(text: str, whole: bool, alone: bool) -> str:
    """The syntax of what decides bits in a source; "" for nothing.

    Args:
        whole: all of it does.
        alone: it is of one device, and all of it does where it has no kernels.
    """
    tree = ast.parse(text)
    kernels = [node for node in tree.body if _is_kernel(node)]
    constants = ast.Assign | ast.AnnAssign if kernels else ()
    all_of_it = whole or (alone and not kernels)
    parts = tree.body if all_of_it else [node for node in tree.body if node in kernels or isinstance(node, constants)]
    parts = [node for node in parts if not isinstance(node, ast.Import | ast.ImportFrom) and not is_text(node)]
    return syntax(ast.Module(parts, [])) if parts else ""


def digests(ops: Path = OPS) -> dict[str, dict[str, str]]:
    """By operation and device, the first 8 hexadecimal digits; what operations share is ``common``."""
    return {
        operation.name: {
            device: hashlib.sha256("\0".join(found).encode()).hexdigest()[:8]
            for device in DEVICES
            if (found := [*sources(operation, device, ops)])
        }
        for operation in sorted(path for path in ops.iterdir() if (path / "__init__.py").is_file())
    }


def table(ops: Path = OPS) -> str:
    """The digests as Markdown."""
    rows = [["operation", *DEVICES.values()], ["---"] * (1 + len(DEVICES))]
    rows += [[name, *(of.get(device, "-") for device in DEVICES)] for name, of in digests(ops).items() if of]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def recorded(changelog: str) -> str:
    """The first table of a changelog, which is that of the next release.

    Raises:
        ValueError: there is none.
    """
    found = TABLE.search(changelog)
    if found is None:
        raise ValueError("the changelog has no table of digests")
    return found[0]


def _of_joined(operation: str, device: str, package: Path) -> list[Path]:
    """Files of a device that joined: of an operation, or as ``common`` those beside its operations."""
    files = {name: package / file for name, file in JOINED.get(device, {}).items()}
    if operation != "common":
        return [files[operation]] if operation in files else []
    folders = {path.parent for path in files.values()}
    return sorted({path for folder in folders for path in folder.glob("*.py")} - {*files.values()})


def _devices(path: Path) -> set[str]:
    """The device that a file is for; none where it is for all."""
    names = (part.partition(".")[0].partition("_")[0] for part in path.parts)
    return {OF_DEVICE[name] for name in names if name in OF_DEVICE}


def _is_kernel(node: ast.AST) -> bool:
    """Whether something is compiled for a device: it is decorated so, or what such a function is made of."""
    marks = "".join(ast.unparse(mark) for mark in getattr(node, "decorator_list", ()))
    return bool(re.search(r"jit|intrinsic|aggregate|constexpr_function|register_model", marks))


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or record it."""
    parser = argparse.ArgumentParser(prog="python -m scripts.bit_sources", description=__doc__.partition("\n\n")[0])
    parser.add_argument("--record", action="store_true", help="put the table into CHANGELOG.md")
    if not parser.parse_args(arguments).record:
        print(table(), end="")
        return 0
    text = CHANGELOG.read_text()
    CHANGELOG.write_text(text.replace(recorded(text), table(), 1))
    return 0


if __name__ == "__main__":
    sys.exit(main())

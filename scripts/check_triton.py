"""Compiles the GPU's kernels with other versions of Triton than the installed one, for every GPU; needs no GPU.

usage: python -m scripts.check_triton TRITON...        such as triton==3.8.0, or triton for the newest: 250 MB each
       python -m scripts.check_triton TRITON... --write     and write docs/gpus.csv and the table of docs/gpus.md

A cell is a Triton, a GPU and some kernels. What is known of it is kept in .cache/triton, and with --write in
docs/gpus.csv, until a source changes, so that a second run is quick and one that was interrupted goes on. All cells of
a version take hours of one core; of cells that a run leaves out the file keeps what an earlier one found.
"""

import argparse
import ast
import csv
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from vllm_batch_invariant.ops.common.nvidia_gpus import COMPILED_FOR

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "triton"
LAUNCHES = {
    "matmuls": ("gemms", "more_gemms", "narrow_gemms"),
    "rows": ("rows", "more_rows"),
    "others": ("sampling", "flex"),
    "gradients": ("every_gradient_of_attention",),
    "experts": ("every_expert",),
    "all_reduce": ("every_all_reduce",),
}
"""The program's functions that launch the kernels of one kind of cells alone."""
PROGRAM, COMPILES = "tests.ops.compiled_kernels", ("compile_cell", "compile_instead_of_running")
"""The module that compiles, and its functions that decide what is compiled of a cell, and how."""
SOURCES = {
    "gradients": ("attention_backward/*.py", "common/*.py"),
    "experts": ("moe/*.py", "linear/*.py", "norm/*.py", "silu/*.py", "softmax/*.py", "common/*.py"),
    "all_reduce": ("all_reduce/*.py", "moe/triton_kernels.py", "norm/*.py", "common/*.py"),
    "attention": (
        "attention/**/*.py",
        "common/*_names.py",
        "common/sm90_ring.py",
        "common/nvidia_gpus.py",
        "common/kv_cache.py",
        "common/*launch.py",
    ),
    "matmuls": (
        *(f"linear/{name}.py" for name in ("problem", "reduction", "schedule", "sm90_kernel", "triton_gemm")),
        "linear/triton_kernels.py",
        "common/*_names.py",
        "common/sm90_ring.py",
        "common/gpu.py",
        "common/nvidia_gpus.py",
        "common/*launch.py",
    ),
    "exact": ("exact/**/*.py", "attention/*.py", "common/*.py"),
    "rows": ("norm*/*.py", "softmax/*.py", "reduce/*.py", "silu*/*.py", "common/*.py"),
    "others": ("**/*.py",),
}
"""What decides what is compiled, by the kind of cells, the first that a cell's name has: sources of
vllm_batch_invariant/ops.
"""
CASES = {
    "exact": "tests/ops/exact/*.py",
    "attention": "tests/ops/attention/cases.py",
    "others": "tests/ops/attention/cases.py",
}
"""What the program launches kernels with, where it does not say that itself."""
MOST_SPILLS_IN_LOOPS = 24
"""Instructions that move a thread's registers to and from memory in a loop, and are no matter: Hopper's prefill kernel,
as fast as it was measured, has 18. Where a block has more running results than registers, they wait in memory while a
split is computed: that is stack, but outside of the loops over keys.
"""
GPUS = tuple(10 * major + minor for major, minor in COMPILED_FOR)
TABLE = ROOT / "docs" / "gpus.csv"
PAGE = ROOT / "docs" / "gpus.md"
BEGIN, END = "<!-- written by python -m scripts.check_triton --write -->", "<!-- end -->"


def kind_of(name: str) -> str:
    """The kind of a cell."""
    return next((kind for kind in SOURCES if kind in name and "around" not in name), "others")


@cache
def digest(kind: str) -> str:
    """Of the sources that decide what is compiled in cells of a kind."""
    program = ROOT.joinpath(*PROGRAM.split(".")).with_suffix(".py")
    of_others = {name for other, names in LAUNCHES.items() if other != kind for name in names}
    found = hashlib.sha256(used_by(program.read_text(), (*COMPILES, *LAUNCHES.get(kind, ())), of_others))
    patterns = [f"vllm_batch_invariant/ops/{pattern}" for pattern in SOURCES[kind]]
    patterns += [CASES[kind]] if kind in CASES else []
    for path in sorted({path for pattern in patterns for path in ROOT.glob(pattern)}):
        found.update(f"{path.relative_to(ROOT).as_posix()}\0".encode() + path.read_bytes())
    return found.hexdigest()[:12]


def used_by(source: str, functions: Iterable[str], but: Container[str] = ()) -> bytes:
    """Some functions of a module, with the definitions and imports of it that they use, themselves or by others, but
    for those named ``but``: the rest of it may change.
    """
    defined: dict[str, ast.stmt] = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            defined |= {(name.asname or name.name).partition(".")[0]: node for name in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    used: set[str] = set()
    left = [*functions]
    while left:
        name = left.pop()
        if name in defined and name not in used and name not in but:
            used.add(name)
            left += [inner.id for inner in ast.walk(defined[name]) if isinstance(inner, ast.Name)]
    return "\n".join(f"{name}: {ast.get_source_segment(source, defined[name])}" for name in sorted(used)).encode()


def unpacked(requirement: str) -> tuple[str, Path]:
    """The version of a Triton and the folder that it is unpacked in, downloaded where it is not there."""
    wheels = CACHE / "wheels"
    pinned = CACHE / requirement.replace("triton==", "triton-")
    if "==" not in requirement or not pinned.exists():
        wheels.mkdir(parents=True, exist_ok=True)
        wanted = ["--no-deps", "--only-binary=:all:", "--dest", str(wheels), requirement]
        said = subprocess.run(
            [sys.executable, "-m", "pip", "download", *wanted], check=True, capture_output=True, text=True
        ).stdout
        wheel = next(wheel for wheel in sorted(wheels.glob("*.whl"), reverse=True) if wheel.name in said)
        pinned = CACHE / f"triton-{wheel.name.split('-')[1]}"
        if not pinned.exists():
            unpack(wheel, pinned)
    return pinned.name.removeprefix("triton-"), pinned


def unpack(wheel: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as temporary, zipfile.ZipFile(wheel) as packed:
        for member in packed.infolist():
            path = Path(packed.extract(member, f"{temporary}/wheel"))
            path.chmod(path.stat().st_mode | member.external_attr >> 16 & 0o111)  # compilers are programs
        Path(temporary, "wheel").rename(folder)


def take_disassembler(folder: Path, newest: Path) -> None:
    """Read a version's machine code with the newest version's programs: those of 3.6 do not know all GPUs that its
    assembler knows.
    """
    for name in ("cuobjdump", "nvdisasm"):
        own, other = (one / "triton" / "backends" / "nvidia" / "bin" / name for one in (folder, newest))
        if own != other:
            shutil.copy2(other, own)


def cells_of(gpu: int) -> list[str]:
    """Names of what there is to compile for a GPU."""
    run = subprocess.run(
        [sys.executable, "-m", PROGRAM, "--names", str(gpu)], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return run.stdout.splitlines()


def kept_at(version: str, gpu: int, kind: str) -> Path:
    """Where the cells of a Triton, a GPU and a kind are kept, a line each."""
    return CACHE / "cells" / f"{version}-sm_{gpu}-{kind}-{digest(kind)}.jsonl"


def kept(version: str, gpu: int, kind: str) -> dict[str, dict[str, Any]]:
    """The finished cells, by name; a line that was interrupted is none."""
    path, found = kept_at(version, gpu, kind), {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            cell = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[cell["name"]] = cell
    return found


def compile_missing(version: str, folder: Path, gpu: int, kind: str, names: Sequence[str]) -> str | None:
    """Compile the cells of a kind that are not finished, in a process of its own; what went wrong with it, if anything
    did.
    """
    known = known_rows(version, gpu)
    missing = [name for name in names if kind_of(name) == kind and name not in known]
    if not missing:
        return None
    path = kept_at(version, gpu, kind)
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache, path.open("a") as lines:
        places = {"PYTHONPATH": f"{folder}:{ROOT}", "TRITON_CACHE_DIR": cache, "TRITON_DISABLE_LINE_INFO": "1"}
        run = subprocess.run(
            [sys.executable, "-m", PROGRAM, "--cells", str(gpu), *missing],
            cwd=ROOT, env=os.environ | places, stdout=lines, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    return None if run.returncode == 0 else f"Triton {version}, sm_{gpu}: {run.stderr[-2000:]}"


def known_rows(version: str, gpu: int) -> dict[str, dict[str, str]]:
    """Rows of the table by cell, of the sources as they are: those of the file, and of cells that are not in it yet."""
    written = (row for row in read_table() if (row["triton"], row["gpu"]) == (version, f"sm_{gpu}"))
    found = {row["kernels"]: row for row in written if row["sources"] == digest(kind_of(row["kernels"]))}
    for kind in SOURCES:
        found |= {row["kernels"]: row for row in summarised(kept(version, gpu, kind).values())}
    return found


def summarised(cells: Iterable[dict[str, Any]]) -> Iterator[dict[str, str]]:
    """A row of the table for each cell: the worst of its variants."""
    for cell in cells:
        variants = cell["kernels"]
        spilled = Counter()
        for one in variants:
            if one["spills_in_loops"] > MOST_SPILLS_IN_LOOPS:
                spilled[one["kernel"]] = max(spilled[one["kernel"]], one["spills_in_loops"])
        problems = cell["problems"] + [f"{kernel} spills {count} times in a loop" for kernel, count in spilled.items()]
        yield {
            "triton": cell["triton"],
            "gpu": f"sm_{cell['gpu']}",
            "sources": digest(kind_of(cell["name"])),
            "kernels": cell["name"],
            "outcome": "; ".join(problems) or "compiled",
            "variants": str(len(variants)),
            **{
                column: str(max((one[column] for one in variants), default=0))
                for column in ("shared", "registers", "stack", "spills_in_loops")
            },
            "instructions": " ".join(sorted({kind for one in variants for kind in one["instructions"].split()})),
        }


def read_table() -> list[dict[str, str]]:
    with TABLE.open() as lines:
        return list(csv.DictReader(lines))


def page_table(rows: Sequence[dict[str, str]]) -> str:
    """The page's table: for each Triton and GPU, how much was compiled and the worst of it."""
    lines = [
        "| Triton | GPU | compiled | problems | shared memory | registers | stack | spills in loops | "
        "tensor cores get, for 16 bits |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for version, gpu in dict.fromkeys((row["triton"], row["gpu"]) for row in rows):
        own = [row for row in rows if (row["triton"], row["gpu"]) == (version, gpu)]
        bad = [row["kernels"] for row in own if row["outcome"] != "compiled"]
        worst = [max(int(row[column]) for row in own) for column in ("shared", "registers", "stack", "spills_in_loops")]
        halves = [row for row in own if row["kernels"].startswith("attention") and "float32" not in row["kernels"]]
        kinds = sorted({kind for row in halves for kind in row["instructions"].split()})
        variants = sum(int(row["variants"]) for row in own)
        lines.append(
            f"| {version} | {gpu} | {variants} variants in {len(own)} cells | {', '.join(bad) or 'none'} | "
            f"{' | '.join(map(str, worst))} | {', '.join(kinds)} |"
        )
    return "\n".join(lines)


def place_of(version: str) -> list[int]:
    """Its place among versions."""
    return list(map(int, version.split(".")))


def with_older(rows: Sequence[dict[str, str]], names: Mapping[int, Sequence[str]]) -> list[dict[str, str]]:
    """The rows in the order of the file, with its rows of all cells that are not among them: those of other runs, whose
    sources may be older by now. Of a GPU in ``names``, cells that are not listed there are gone.
    """

    def cell(row: dict[str, str]) -> tuple[str, str, str]:
        return row["triton"], row["gpu"], row["kernels"]

    def place(row: dict[str, str]) -> tuple[list[int], int]:
        return place_of(row["triton"]), GPUS.index(int(row["gpu"].removeprefix("sm_")))

    there = {f"sm_{gpu}": set(of_gpu) for gpu, of_gpu in names.items()}
    older = (row for row in read_table() if row["kernels"] in there.get(row["gpu"], {row["kernels"]}))
    found = {cell(row): row for row in older} | {cell(row): row for row in rows}
    return sorted(found.values(), key=place)


def write(rows: Sequence[dict[str, str]]) -> None:
    """The CSV file, and the table in the page."""
    with TABLE.open("w", newline="") as lines:
        table = csv.DictWriter(lines, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{page_table(read_table())}\n{END}{rest.partition(END)[2]}")


def main(arguments: list[str] | None = None) -> int:
    """Check each version; the exit status is 1 if a kernel does not compile or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="+", metavar="TRITON")
    parser.add_argument("--gpus", nargs="*", type=int, default=GPUS, metavar="SM", help="such as 86 120")
    parser.add_argument("--cells", nargs="*", metavar="NAME", help="only these; named in docs/gpus.csv")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--write", action="store_true", help="write docs/gpus.csv and the table of docs/gpus.md")
    parser.add_argument("--known", action="store_true", help="compile nothing more, report what is known")
    parsed = parser.parse_args(arguments)
    tritons = [unpacked(one) for one in dict.fromkeys(parsed.requirements)]
    newest = max(CACHE.glob("triton-*"), key=lambda folder: place_of(folder.name.removeprefix("triton-")))
    for _, folder in tritons:
        take_disassembler(folder, newest)
    every_name = {gpu: cells_of(gpu) for gpu in parsed.gpus}
    names = {gpu: [one for one in of if parsed.cells is None or one in parsed.cells] for gpu, of in every_name.items()}
    failed = []
    if not parsed.known:
        with ThreadPoolExecutor(parsed.jobs) as pool:
            jobs = [
                pool.submit(compile_missing, version, folder, gpu, kind, names[gpu])
                for version, folder in tritons
                for gpu in parsed.gpus
                for kind in SOURCES
            ]
            failed = [said for job in jobs if (said := job.result())]
    rows = [
        known[name]
        for version, _ in tritons
        for gpu in parsed.gpus
        for known in [known_rows(version, gpu)]
        for name in names[gpu]
        if name in known
    ]
    wrong = [row for row in rows if row["outcome"] != "compiled"]
    for row in wrong:
        print(f"Triton {row['triton']}, {row['gpu']}, {row['kernels']}: {row['outcome']}")
    print(*failed, sep="\n")
    every = sum(map(len, names.values())) * len(tritons)
    print(f"{len(rows)} of {every} cells, {sum(int(row['variants']) for row in rows)} variants, {len(wrong)} wrong")
    if parsed.write and rows:
        written = with_older(rows, every_name)
        write(written)
        old = sum(row["sources"] != digest(kind_of(row["kernels"])) for row in written)
        print(f"{len(written)} rows in {TABLE.name}, {old} of them of older sources")
    return 1 if wrong or failed or len(rows) < every else 0


if __name__ == "__main__":
    sys.exit(main())

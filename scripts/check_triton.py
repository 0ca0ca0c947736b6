"""Compiles the GPU's kernels with other versions of Triton than the installed one, for every GPU; needs no GPU.

usage: python -m scripts.check_triton TRITON...        such as triton==3.8.0, or triton for the newest: 250 MB each
       python -m scripts.check_triton TRITON... --write     and write docs/gpus.csv and the table of docs/gpus.md

A cell is a Triton, a GPU and some kernels. What is known of it is kept in .cache/triton, and with --write in
docs/gpus.csv, the file of a release. A cell is compiled again where Triton's front end makes other IR of its kernels
(:mod:`tests.ops.variants`), or where none is recorded, or all with --again; so a second run is quick, and one that was
interrupted goes on. PTX would say the same and is no cheap question: in four cells that were measured (attention and
norms, Triton 3.9.0) the front end takes 4 to 9 % of the time, and all up to PTX 84 to 91 %. All cells of a version take
hours of one core; of cells that a run leaves out the file keeps what an earlier one found.
"""

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from scripts import marks
from vllm_batch_invariant.ops.common.nvidia_gpus import COMPILED_FOR

ROOT = Path(__file__).parents[1]
CACHE = ROOT / ".cache" / "triton"
PROGRAM = "tests.ops.compiled_kernels"
"""The module that compiles."""
PROCESSES = 4
"""Of a Triton and a GPU, each with a part of the cells."""
MOST_SPILLS_IN_LOOPS = 24
"""Instructions that move a thread's registers to and from memory in a loop, and are no matter: Hopper's prefill kernel,
as fast as it was measured, has 18. Where a block has more running results than registers, they wait in memory while a
split is computed: that is stack, but outside of the loops over keys.
"""
GPUS = tuple(10 * major + minor for major, minor in COMPILED_FOR)
TABLE = ROOT / "docs" / "gpus.csv"
PAGE = ROOT / "docs" / "gpus.md"
BEGIN, END = "<!-- written by python -m scripts.check_triton --write -->", "<!-- end -->"


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


def cells_of(gpus: Sequence[int]) -> dict[int, list[str]]:
    """Names of what there is to compile for each GPU."""
    run = subprocess.run(
        [sys.executable, "-m", PROGRAM, "--names", *map(str, gpus)],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return {int(gpu): names for gpu, names in json.loads(run.stdout).items()}


def kept_at(version: str, gpu: int) -> Path:
    """Where the cells of a Triton and a GPU are kept, a line each."""
    return CACHE / "cells" / f"{version}-sm_{gpu}.jsonl"


def kept(version: str, gpu: int) -> Iterator[dict[str, Any]]:
    """The finished cells, the newest last; a line that was interrupted is none."""
    path = kept_at(version, gpu)
    for line in path.read_text().splitlines() if path.exists() else ():
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def known_rows(version: str, gpu: int) -> dict[str, dict[str, str]]:
    """Rows of the table by cell, of whatever sources: those of the file, and of cells that are not in it yet."""
    found = {row["kernels"]: row for row in read_table() if (row["triton"], row["gpu"]) == (version, f"sm_{gpu}")}
    return found | {cell["name"]: row_of(cell) for cell in kept(version, gpu)}


def brought_up_to_date(
    version: str, folder: Path, gpu: int, names: Sequence[str], again: bool
) -> tuple[dict[str, dict[str, str]], str | None]:
    """Rows of cells as the sources are, by a process of its own, and what went wrong with it, if anything did. Compiled
    are the cells whose IR is not that of their row; all of them where they shall be compiled ``again``.
    """
    known = {} if again else {name: row for name, row in known_rows(version, gpu).items() if row["ir"]}
    irs = json.dumps({name: known[name]["ir"] for name in names if name in known})
    path, commit, found, others = kept_at(version, gpu), commit_here(), {}, []
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as cache, path.open("a") as lines:
        places = {"PYTHONPATH": f"{folder}:{ROOT}", "TRITON_CACHE_DIR": cache, "TRITON_DISABLE_LINE_INFO": "1"}
        with subprocess.Popen(
            [sys.executable, "-m", PROGRAM, "--known", irs, "--cells", str(gpu), *names],
            cwd=ROOT, env=os.environ | places, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        ) as run:  # fmt: skip
            for line in run.stdout or ():
                if not line.startswith('{"triton"'):
                    others.append(line)
                    continue
                cell = json.loads(line) | {"commit": commit}
                if cell["kernels"] is None:
                    found[cell["name"]] = known[cell["name"]]
                else:
                    found[cell["name"]] = row_of(cell)
                    lines.write(f"{json.dumps(cell)}\n")
                    lines.flush()
    said = "".join(others)[-2000:]
    return found, f"Triton {version}, sm_{gpu}: {said}" if run.returncode else None


@cache
def commit_here() -> str:
    """The commit that is checked out, with a plus where what is compiled is not as it was committed."""
    said = [
        subprocess.run(["git", *command], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
        for command in (
            ["rev-parse", "--short=8", "HEAD"],
            ["status", "--porcelain", "--", "vllm_batch_invariant/ops", "tests/ops"],
        )
    ]
    return said[0] + "+" * bool(said[1])


def row_of(cell: Mapping[str, Any]) -> dict[str, str]:
    """The table's row for a cell: the worst of its variants."""
    variants, spilled = cell["kernels"], Counter()
    for one in variants:
        if one["spills_in_loops"] > MOST_SPILLS_IN_LOOPS:
            spilled[one["kernel"]] = max(spilled[one["kernel"]], one["spills_in_loops"])
    problems = cell["problems"] + [f"{kernel} spills {count} times in a loop" for kernel, count in spilled.items()]
    return {
        "triton": cell["triton"],
        "gpu": f"sm_{cell['gpu']}",
        "kernels": cell["name"],
        "outcome": "; ".join(problems) or "compiled",
        "variants": str(len(variants)),
        **{
            column: str(max((one[column] for one in variants), default=0))
            for column in ("shared", "registers", "stack", "spills_in_loops")
        },
        "instructions": " ".join(sorted({kind for one in variants for kind in one["instructions"].split()})),
        **{column: cell[column] for column in ("ir", "ptx", "commit")},
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
    """The rows in the order of the file, with its rows of all cells that are not among them: those of other runs, at
    commits of theirs. Of a GPU in ``names``, cells that are not listed there are gone.
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
    PAGE.write_text(marks.put(PAGE.read_text(), BEGIN, END, f"\n{page_table(read_table())}\n"))


def main(arguments: list[str] | None = None) -> int:
    """Check each version; the exit status is 1 if a kernel does not compile or fit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="+", metavar="TRITON")
    parser.add_argument("--gpus", nargs="*", type=int, default=GPUS, metavar="SM", help="such as 86 120")
    parser.add_argument("--cells", nargs="*", metavar="NAME", help="only these; named in docs/gpus.csv")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time")
    parser.add_argument("--write", action="store_true", help="write docs/gpus.csv and the table of docs/gpus.md")
    parser.add_argument("--known", action="store_true", help="compile nothing more, report what is known")
    parser.add_argument("--again", action="store_true", help="compile also what is as it was")
    parsed = parser.parse_args(arguments)
    tritons = [unpacked(one) for one in dict.fromkeys(parsed.requirements)]
    newest = max(CACHE.glob("triton-*"), key=lambda folder: place_of(folder.name.removeprefix("triton-")))
    for _, folder in tritons:
        take_disassembler(folder, newest)
    every_name = cells_of(parsed.gpus)
    names = {gpu: [one for one in of if parsed.cells is None or one in parsed.cells] for gpu, of in every_name.items()}
    places = [(version, folder, gpu) for version, folder in tritons for gpu in parsed.gpus]
    found = {(version, gpu): known_rows(version, gpu) if parsed.known else {} for version, _, gpu in places}
    failed = []
    if not parsed.known:
        with ThreadPoolExecutor(parsed.jobs) as pool:
            jobs = [
                ((version, gpu), pool.submit(brought_up_to_date, version, folder, gpu, part, parsed.again))
                for version, folder, gpu in places
                for part in (names[gpu][start::PROCESSES] for start in range(PROCESSES))
                if part
            ]
            for place, job in jobs:
                of_part, said = job.result()
                found[place] |= of_part
                failed += [said] if said else []
    rows = [
        found[version, gpu][name] for version, _, gpu in places for name in names[gpu] if name in found[version, gpu]
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
        commits = Counter(row["commit"] for row in written).most_common()
        print(f"{len(written)} rows in {TABLE.name}: {', '.join(f'{count} of {commit}' for commit, count in commits)}")
    return 1 if wrong or failed or len(rows) < every else 0


if __name__ == "__main__":
    sys.exit(main())

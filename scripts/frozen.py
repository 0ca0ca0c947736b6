"""Writes what the project puts out now, and compares two such states: a change of code that is to change nothing shows
so. Needs no GPU.

usage: python -m scripts.frozen write FOLDER [--parts PART[/GROUP] ...]
       python -m scripts.frozen compare BEFORE AFTER

A state is a folder with a file of JSON for each part of :data:`PARTS`: texts with names, in groups. What is compared is
which texts there are; names say where to look. Exit status of ``compare``: 0 equal, 1 different, 2 parts of different
machines or versions, or none that both states have.
"""

import argparse
import ast
import difflib
import gzip
import hashlib
import json
import multiprocessing
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "vllm_batch_invariant"
Entry = tuple[str, str]
"""A name and a text."""
Groups = dict[str, Callable[[], Iterable[Entry]]]
LONGEST = 16
"""Lines of a difference that are printed."""


# PTX of every variant of a kernel for a Hopper, without the kernel's name; its parameters have no names in PTX


def _ptx(_scratch: Path) -> Groups:
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()
    os.environ["TRITON_DISABLE_LINE_INFO"] = "1"
    from triton.backends.nvidia.compiler import CUDABackend

    from tests.ops import compiled_kernels

    CUDABackend.make_cubin = lambda *_: b""  # PTX is enough, and the assembler takes most of the time
    compiled_kernels.compile_instead_of_running()

    def variants(operation: str) -> Iterator[Entry]:
        compiled_kernels.compiled.clear()
        compiled_kernels.VARIANTS[operation]()
        for one in compiled_kernels.compiled:
            yield one.name, stripped(one.kernel.asm["ptx"], one.name)

    return {operation: partial(variants, operation) for operation in compiled_kernels.VARIANTS}


def stripped(ptx: str, name: str) -> str:
    """PTX without the kernel's name, comments and lines of the source."""
    lines = [re.sub(r"\s*//.*", "", line) for line in ptx.replace(name, "kernel").splitlines()]
    return "\n".join(line for line in lines if line.strip() and not re.match(r"\s*\.(file|loc)\b", line))


# The results of commands on the demo model

COMMANDS = {
    "words": (
        *("", "--version", "made-up", "check", "certificate"),
        *("check MODEL --quick --thorough", "reproduce MODEL --made-up"),
    ),
    "tables": ("coverage", "settings"),
    "make-checkpoint": ("make-checkpoint other --layers 1 --experts 4 --dtype float32",),
    "reproduce": ("reproduce MODEL --offline --samples 12 --max-tokens 6 --concurrency 8",),
    "serve": ("reproduce MODEL --samples 100 --max-tokens 6 --concurrency 8 --temperature 1",),
    "bisect": ("bisect MODEL --max-tokens 3 --concurrent 7",),
    "receipt": (
        "receipt make receipt.json MODEL --max-tokens 6 --temperature 0.8 --top-k 50",
        "receipt verify receipt.json MODEL --concurrent 4",
        "receipt compare receipt.json receipt.json",
    ),
    "check": ("check MODEL --quick",),
    "fuzz": ("check MODEL --fuzz 60 --settings 1 --schedules 3",),
}
"""By a name, command lines of vllm-batch-invariant that end with status 0 and JSON; ``words`` are printed, and help of
every command with them.
"""
VARIES = {
    **dict.fromkeys(("began", "date"), "when"),
    **dict.fromkeys(("seconds", "startup_seconds", "latency"), "how long"),
    **dict.fromkeys(("completions_per_second", "tokens_per_second"), "how fast"),
    **dict.fromkeys(("system", "server"), "the machine's kernel, and a port"),
    **dict.fromkeys(("batches", "others", "aborted", "varied", "steps"), "the load beside samples, which follows time"),
    "sha256": "of a receipt, which has a digest of the sources",
}
"""Keys of results whose values are another in every run or of every source, and what they are; :data:`FIXED` stands in
their place.
"""
FIXED = "(varies)"


def _commands(scratch: Path) -> Groups:
    from vllm_batch_invariant import cli
    from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint

    make_checkpoint(scratch / "MODEL", Shape(layers=2))
    receipts = [f"receipt {action}" for action in ("make", "verify", "compare")]
    help_of = [f"{name} --help".strip() for name in ("", *cli.COMMANDS, *receipts)]

    def results(group: str) -> Iterator[Entry]:
        has_words = group == "words"
        for line in (*COMMANDS[group], *(help_of if has_words else ())):
            yield line, f"$ {line}\n{result(line, scratch, has_words)}"

    return {group: partial(results, group) for group in COMMANDS}


def result(line: str, scratch: Path, has_words: bool = False) -> str:
    """The JSON of a command, or its exit status and what it prints.

    Raises:
        RuntimeError: a command with JSON ends with another status than 0.
    """
    command = [sys.executable, "-m", "vllm_batch_invariant.cli", *shlex.split(line)]
    command += [] if has_words else ["--json", "-"]
    chosen = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    done = subprocess.run(command, cwd=scratch, env=chosen | {"COLUMNS": "100"}, capture_output=True, text=True)
    if has_words:
        return placed(f"status {done.returncode}\n{done.stdout}{done.stderr}", scratch)
    if done.returncode:
        raise RuntimeError(f"{line} ended with {done.returncode}: {done.stderr[-2000:]}")
    return placed(json.dumps(fixed(json.loads(done.stdout)), indent=1), scratch)


def fixed(value: Any) -> Any:
    """A result without what varies."""
    if isinstance(value, dict):
        return {key: FIXED if key in VARIES else fixed(inner) for key, inner in value.items()}
    return [*map(fixed, value)] if isinstance(value, list) else value


def placed(text: str, scratch: Path) -> str:
    """A text in which folders of this run have names of their own, and sources no digest."""
    text = re.sub(r"\([0-9a-f]{12}\)", "(sources)", text)
    text = re.sub(r"with \d+ concurrent requests", "with some concurrent requests", text)  # those follow time
    for folder, name in {scratch: "FOLDER", Path(sys.prefix): "PYTHON", ROOT: "CHECKOUT"}.items():
        text = text.replace(str(folder), name)
    return text


# Bits of completions on this kind of CPU

ENGINES: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "dense": ({"layers": 2}, {}),
    "experts": ({"layers": 2, "experts": 8}, {}),
    "leaves": ({"layers": 2}, {"VLLM_BATCH_INVARIANT_TP_TREE": "4"}),
    "exact": ({"layers": 2}, {"VLLM_BATCH_INVARIANT_ARITHMETIC": "exact"}),
}
"""By a name, fields of the demo model's shape, and variables."""


def _completions(scratch: Path) -> Groups:
    from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
    from vllm_batch_invariant.verify.harness.requests import SAMPLING, request, tokens
    from vllm_batch_invariant.verify.harness.worker import Engine

    asked = {f"{length} tokens": request(tokens(length, 0), prompt_logprobs=2) for length in (1, 40, 300)}
    asked |= {name: request(tokens(40, 1), **params) for name, params in SAMPLING.items()}

    def answers(group: str) -> Iterator[Entry]:
        shape, variables = ENGINES[group]
        model = make_checkpoint(scratch / group, Shape(**shape))
        with Engine(str(model), ["--max-model-len", "512"], "1", variables) as engine:
            told = engine.step("all", [*asked.values()]).requests
        for name, answer in zip(asked, told, strict=True):
            bits = json.dumps([answer["completions"], answer["prompt_logprobs"]])
            texts = [one["text"] for one in answer["completions"]]
            yield f"{group}: {name}", f"{group}: {name}: {texts}\nsha256 {hashlib.sha256(bits.encode()).hexdigest()}"

    return {group: partial(answers, group) for group in ENGINES}


# Refusals, word for word


def _refusals(scratch: Path) -> Groups:
    return {"sentences": sentences, "tests": partial(provoked, scratch), "configurations": partial(_gate, scratch)}


def sentences(package: Path = PACKAGE) -> Iterator[Entry]:
    """The arguments of every refusal in the sources, with braces around what is computed."""
    for path in sorted(package.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("NotCovered", "BadSetting"):
                words = [_words(argument) for argument in (*node.args, *(one.value for one in node.keywords))]
                yield words[0], "; ".join(words)


def _words(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(map(_words, node.values))
    inside = (_words(one) for one in ast.walk(node) if one is not node and isinstance(one, ast.Constant))
    return f"{{{', '.join(inside)}}}"


def tests_of_refusals() -> list[Path]:
    """The tests that expect one, but for those that need an engine, a GPU, an interpreter or another environment."""
    expects = re.compile(r"NotCovered|integration.* import .*(coverage|REFUSED)")
    needs = re.compile(r"/(engine|hardware|offline|dispatch|fake_cann)/|_(cuda|interpreted)\.py$|/test_contributing")
    tests = (path for path in sorted((ROOT / "tests").rglob("test_*.py")) if not needs.search(path.as_posix()))
    return [path for path in tests if expects.search(path.read_text())]


def provoked(scratch: Path, tests: Sequence[Path] = ()) -> Iterator[Entry]:
    """Every refusal that tests provoke, and what they find of the features that the gate refuses.

    Raises:
        RuntimeError: a test fails.
    """
    import pytest

    from vllm_batch_invariant.errors import BadSetting, NotCovered
    from vllm_batch_invariant.integration.coverage import Feature

    said: set[str] = set()
    found = Feature.found

    def finds(feature: Feature, config: Any) -> str | None:
        what = found(feature, config)
        if what:
            NotCovered(what, feature.note, feature.remedy or "")
        return what

    def keeping(init: Callable[..., None]) -> Callable[..., None]:
        def says(error: Exception, *words: object) -> None:
            init(error, *words)
            said.add(placed(str(error), scratch))

        return says

    Feature.found = finds  # type: ignore[method-assign]
    for kind in (NotCovered, BadSetting):
        kind.__init__ = keeping(kind.__init__)  # type: ignore[method-assign]
    options = ["-q", "-m", "not engine and not server", "--basetemp", str(scratch / "pytest"), "-p", "no:cacheprovider"]
    if status := pytest.main([*options, *map(str, tests or tests_of_refusals())]):
        raise RuntimeError(f"pytest ended with {status}: a state is written of code that passes its tests")
    for text in sorted(said):
        yield text.partition(":")[0], text


def _gate(scratch: Path) -> Iterator[Entry]:
    """What the gate says to vLLM's configurations, in the tests of engines."""
    from tests.engine import test_refusals
    from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint

    checkpoint = make_checkpoint(scratch / "gate", Shape(layers=3))
    processors = test_refusals.with_a_processor(scratch / "processors")
    for name, line in test_refusals.lines_of(checkpoint, processors, scratch).items():
        yield name, f"{name}: {placed(line, scratch)}"


# Pages: what is generated of them, and tables; tests/docs compare them with the code

TABLE = r"(?:^\|.*\n)+"
MARKED = r"<!-- ?(?!end|/)[^>]*-->(?:.|\n)*?<!-- ?(?:end|/)"
PAGES = {
    "README.md": f"{MARKED}|{TABLE}",
    "docs/coverage.md": TABLE,
    "docs/api.md": r"^## .*\n(?:(?!## ).*\n)*",
    "docs/*.md": MARKED,
}
"""Expressions of what is kept, by pages."""


def _pages(_scratch: Path) -> Groups:
    def kept(pages: str) -> Iterator[Entry]:
        for path in sorted(ROOT.glob(pages)):
            for number, part in enumerate(re.finditer(PAGES[pages], path.read_text(), re.MULTILINE)):
                yield f"{path.name} {number}", f"{path.name}\n{part[0]}"

    return {pages: partial(kept, pages) for pages in PAGES}


# Digests of exact arithmetic, which are those of every machine


def _digests(_scratch: Path) -> Groups:
    from vllm_batch_invariant.ops.exact import FORMAT, cpu, known_answers

    def known() -> Iterator[Entry]:
        yield FORMAT, f"{FORMAT}: recorded {known_answers.DIGEST}, here {known_answers.digest()}"

    def operations() -> Iterator[Entry]:
        import numpy as np
        import torch

        pairs = known_answers.comparisons(cpu, lambda floats: torch.from_numpy(floats).bfloat16())
        for number, (name, *arrays) in enumerate(pairs):
            bits = (np.where(np.isnan(array), np.float32(np.nan), array) for array in arrays)
            here, defined = (hashlib.sha256(array.tobytes()).hexdigest() for array in bits)
            yield f"{name} {number}", f"{name} {number} {arrays[0].shape}: on a CPU {here}, by definition {defined}"

    return {"model": known, "operations": operations}


@dataclass(frozen=True)
class Part:
    """A part of a state.

    Attributes:
        groups: its groups, given a folder to work in.
        needs: what two machines must have alike for it to be comparable: names of :func:`made_with`.
    """

    groups: Callable[[Path], Groups]
    needs: tuple[str, ...] = ()


ENGINE = ("machine", "python", "torch", "vllm", "numba")
PARTS = {
    "pages": Part(_pages),
    "digests": Part(_digests),
    "refusals": Part(_refusals, ("python", "torch", "vllm")),
    "completions": Part(_completions, ENGINE),
    "commands": Part(_commands, ENGINE),
    "ptx": Part(_ptx, ("triton",)),
}


def made_with(needs: Sequence[str]) -> dict[str, str]:
    """The machine and versions of this environment."""
    from scripts.see import data
    from vllm_batch_invariant.integration.reviews.patch_points import installed_version
    from vllm_batch_invariant.provenance import installed

    known = {"machine": lambda: data.here()["machine"], "python": platform.python_version, "vllm": installed_version}
    return {name: known[name]() if name in known else installed(name) for name in needs}


def write(folder: Path, chosen: Sequence[str] = ()) -> None:
    """Write parts, or groups of them ("refusals/sentences"), each in a process of its own; all if none is chosen."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    for name in PARTS:
        groups = [one.partition("/")[2] for one in chosen if one.partition("/")[0] == name]
        if groups or not chosen:
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                made = process.submit(state_of, name, [*filter(None, groups)]).result()
            save(made, folder, name)


def save(made: dict[str, Any], folder: Path, name: str) -> None:
    """Write what :func:`state_of` gives of a part."""
    (folder / f"{name}.json.gz").write_bytes(gzip.compress(json.dumps(made).encode(), mtime=0))


def state_of(name: str, groups: Sequence[str] = ()) -> dict[str, Any]:
    """A part, or some of its groups: ``made_with``, and the entries of each group."""
    found = {}
    with tempfile.TemporaryDirectory(prefix="frozen-") as scratch:
        known = PARTS[name].groups(Path(scratch))
        for group in groups or known:
            found[group] = [list(entry) for entry in known[group]()]
            print(f"{name}/{group}: {len(found[group])}", flush=True)
            if not found[group]:
                raise RuntimeError(f"{name}/{group} is empty: nothing could be compared with it")
    return {"made_with": made_with(PARTS[name].needs), "groups": found}


def compare(before: Path, after: Path) -> int:
    """Print, part by part, what is equal and how the rest differs; returns the exit status."""
    statuses = set()
    for name in PARTS:
        paths = [folder / f"{name}.json.gz" for folder in (before, after)]
        if missing := [path for path in paths if not path.exists()]:
            print(f"{name}: not compared, there is no {' and no '.join(map(str, missing))}")
            continue
        old, new = (json.loads(gzip.decompress(path.read_bytes())) for path in paths)
        if other := [key for key in old["made_with"] if old["made_with"][key] != new["made_with"].get(key)]:
            made = "; ".join(f"{key}: {old['made_with'][key]} and {new['made_with'].get(key)}" for key in other)
            print(f"{name}: cannot be compared, it was made with another {made}")
            statuses.add(2)
            continue
        for group in (one for one in old["groups"] if one in new["groups"]):
            said = [*differences(old["groups"][group], new["groups"][group])]
            print("\n".join([f"{name}/{group}: {'different' if said else 'equal'}", *said]))
            statuses.add(int(bool(said)))
        if other := sorted(old["groups"].keys() ^ new["groups"].keys()):
            print(f"{name}: not compared, in one state alone: {', '.join(other)}")
    return 1 if 1 in statuses else 2 if 2 in statuses or not statuses else 0


def differences(old: Sequence[Entry], new: Sequence[Entry]) -> Iterator[str]:
    """Texts that one of two groups has alone, in words: by their names, the first as a shortened difference."""
    alone: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for side, (mine, others) in enumerate(((old, new), (new, old))):
        known = {text for _, text in others}
        for name, text in dict.fromkeys(map(tuple, mine)):
            if text not in known:
                alone[name][side].append(text)
    for name, (gone, come) in sorted(alone.items()):
        yield f"  {name or '(no name)'}: {len(gone)} are no more, {len(come)} are new"
        first, second = ("".join(texts[:1]).splitlines() for texts in (gone, come))
        lines = [*difflib.unified_diff(first, second, n=1, lineterm="")][2:]
        yield from (f"    {line}" for line in lines[:LONGEST])
        if len(lines) > LONGEST:
            yield f"    and {len(lines) - LONGEST} lines"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or compare; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    writing = actions.add_parser("write")
    writing.add_argument("folder", type=Path)
    writing.add_argument("--parts", nargs="+", default=[], metavar="PART[/GROUP]", help=f"of {', '.join(PARTS)}")
    comparing = actions.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    parsed = parser.parse_args(arguments)
    if parsed.action == "compare":
        return compare(parsed.before, parsed.after)
    if unknown := [part for part in parsed.parts if part.partition("/")[0] not in PARTS]:
        parser.error(f"there is no part {unknown[0]}; there are {', '.join(PARTS)}")
    write(parsed.folder, parsed.parts)
    return 0


if __name__ == "__main__":
    sys.exit(main())

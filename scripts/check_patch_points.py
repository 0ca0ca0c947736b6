"""Checks by reading, not running, that vLLM's sources have every place the plugin patches, and vllm-ascend's; and names
what vLLM's have that nobody has reviewed: functions that sample, fields of configurations, claims of backends.

usage: python -m scripts.check_patch_points PACKAGE==VERSION...   downloads those wheels: vllm 300 MB, vllm-ascend 25 MB
"""

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from vllm_batch_invariant.integration import patch_points, reviewed, reviewed_sampling
from vllm_batch_invariant.integration.ascend import patch_points as ascend_patch_points


def defines(source: str, name: str) -> bool:
    """Whether a module binds ``name`` at its top level, by definition, assignment or import, in any condition."""
    nodes = ast.parse(source).body
    for node in nodes:
        match node:
            case ast.If():
                nodes += node.body + node.orelse
                continue
            case ast.FunctionDef() | ast.ClassDef():
                names = [node.name]
            case ast.Assign():
                names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            case ast.AnnAssign(target=ast.Name(id=target)):
                names = [target]
            case ast.Import() | ast.ImportFrom():
                names = [alias.asname or alias.name for alias in node.names]
            case _:
                names = []
        if name in names:
            return True
    return False


def members(source: str, name: str) -> set[str]:
    """The methods and annotated fields that a class of a module defines."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found |= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            found |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    return found


def missing(wheel: zipfile.ZipFile, places: ModuleType) -> list[str]:
    """Names of the patch points, and of their members, that a wheel does not have."""
    files = set(wheel.namelist())

    def sources(point: patch_points.PatchPoint) -> Iterator[str]:
        for module in point.modules:
            path = module.replace(".", "/")
            for file in (f"{path}.py", f"{path}/__init__.py"):
                if file in files and defines(source := wheel.read(file).decode(), point.attribute):
                    yield source

    absent = []
    for name, point in places.ALL.items():
        source = next(sources(point), None)
        if source is None:
            absent.append(name)
            continue
        wanted = getattr(places, "MEMBERS", {}).get(name, ())
        absent += [f"{name}.{member}" for member in wanted if member not in members(source, point.attribute)]
    return absent


def not_reviewed(wheel: zipfile.ZipFile) -> dict[str, str]:
    """Functions that sample in a wheel of vLLM for GPUs and that nobody has read, with their digests."""
    files = set(wheel.namelist())

    def source_of(module: str) -> str | None:
        file = f"{module.replace('.', '/')}.py"
        return wheel.read(file).decode() if file in files else None

    return reviewed_sampling.not_reviewed(source_of, "cuda")


def configurations(wheel: zipfile.ZipFile) -> dict[str, dict[str, str]]:
    """The fields of every class of configurations, by the name of the class, with what they are declared to be."""
    found = {}
    for file in wheel.namelist():
        if not file.startswith("vllm/config/") or not file.endswith(".py"):
            continue
        for node in ast.parse(wheel.read(file)).body:
            if isinstance(node, ast.ClassDef) and any("config" in ast.unparse(mark) for mark in node.decorator_list):
                items = (item for item in node.body if isinstance(item, ast.AnnAssign))
                declared = {ast.unparse(item.target): ast.unparse(item.annotation) for item in items}
                found[node.name] = {
                    field: kind for field, kind in declared.items() if not kind.startswith(("InitVar", "ClassVar"))
                }
    return found


def unreviewed(wheel: zipfile.ZipFile) -> list[str]:
    """Fields that a vLLM's configuration has, and questions that its attention backends answer, of which no list tells.

    Of a configuration inside another one only what was not judged with the field that holds it.
    """
    classes, names, open_ = configurations(wheel), [], ["VllmConfig"]
    for kind in open_:
        names += sorted(f"{kind}.{field}" for field in reviewed.unreviewed(kind, set(classes[kind])))
        for declared in classes[kind].values() if kind in reviewed.FIELDS else ():
            inside = {node.id for node in ast.walk(ast.parse(declared)) if isinstance(node, ast.Name)}
            open_ += sorted(inside & set(classes) - set(open_))
    for file, name in (("backend", "AttentionBackend"), ("backends/triton_attn", "TritonAttentionBackend")):
        claims = members(wheel.read(f"vllm/v1/attention/{file}.py").decode(), name)
        new = {claim for claim in claims if claim.startswith("supports_")} - reviewed.CLAIMS - reviewed.DENIED
        names += sorted(f"{name}.{claim}" for claim in new)
    return names


PLACES = {"vllm": patch_points, "vllm-ascend": ascend_patch_points}


def main(arguments: list[str] | None = None) -> int:
    """Check each package; the exit status is the number of those that lack something or have something new."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="+", metavar="PACKAGE==VERSION", help=f"one of {', '.join(PLACES)}")
    lacking = 0
    for requirement in parser.parse_args(arguments).requirements:
        package = requirement.partition("==")[0]
        places = PLACES[package]
        with tempfile.TemporaryDirectory() as folder:
            wanted = ["--no-deps", "--only-binary=:all:", "--dest", folder, requirement]
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted], check=True)
            with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
                absent = missing(wheel, places)
                unread = not_reviewed(wheel) if package == "vllm" else {}
                unknown = unreviewed(wheel) if places is patch_points else []
        lacking += bool(absent or unread or unknown)
        print(
            f"{requirement}: "
            + (f"no {', '.join(absent)}" if absent else f"all {len(places.ALL)} patch points are there")
        )
        for name, digest in unread.items():
            print(f"{requirement}: not reviewed: {name} {digest}")
        if unknown:
            print(f"{requirement}: nobody has reviewed {', '.join(unknown)}")
    return lacking


if __name__ == "__main__":
    sys.exit(main())

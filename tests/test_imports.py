"""Imports point one way, and no two modules need each other: read from the sources, not from what happens to be loaded.

Imports inside functions count, because they say as much about who depends on whom; those for type checkers do not. A
device's modules that are found by their names at run time (``import_module``) are where the package stays lazy.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import vllm_batch_invariant

PACKAGE = "vllm_batch_invariant"
ROOT = Path(vllm_batch_invariant.__file__).parent

MAY_IMPORT = {
    "ops": {"errors", "envs", "kept_file", "compare", "version"},
    "aten": {"ops", "errors"},
    "provenance": {"ops", "version"},
    "integration": {"ops", "aten", "provenance", "envs", "errors", "version"},
    "hf": {"ops", "aten", "integration", "provenance", "envs", "errors"},
    "verify": {"ops", "aten", "integration", "provenance", "envs", "errors", "compare", "kept_file", "version"},
    "cli": {"verify", "integration", "envs", "errors", "version"},
    "envs": {"errors"},
    "errors": set(),
    "compare": set(),
    "kept_file": {"envs"},
    "version": set(),
    "__init__": {"aten", "integration", "envs", "errors", "version"},
}
"""Which rooms (folders and modules of the package) a room may import beside itself."""

IMPORT_VLLM = (
    "integration",
    "verify.harness.engine",
    "verify.harness.worker_main",
    "verify.bisect.engine",
    "verify.check.operations",
    "verify.receipt.engine",
)
"""Modules, and packages of them, that may import vLLM."""

DEVICES = ("cpu", "cuda", "npu", "sm90")
"""How an implementation's module or package is called, alone or at the beginning of its name."""

Graph = dict[str, set[str]]


def module_of(path: Path, root: Path) -> str:
    """A file's name as a module, relative to the package: "ops.norm.cuda"; "ops.norm" for a package's ``__init__``."""
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def imported(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import of a module, but those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from imported(node)


@cache
def imports_of(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(imported(ast.parse(source)))


def read(root: Path) -> tuple[Graph, Graph]:
    """For each module of a package, which of its modules it imports, and which other packages."""
    paths = {module_of(path, root): path for path in sorted(root.rglob("*.py"))}
    inside: Graph = {}
    outside: Graph = {}
    for module, path in paths.items():
        inside[module], outside[module] = set(), set()
        package = module.split(".") if path.name == "__init__.py" and module != "__init__" else module.split(".")[:-1]
        for node in imports_of(path.read_text()):
            for name in targets(node, package):
                first, _, rest = name.partition(".")
                if first == PACKAGE:
                    inside[module].add(nearest(rest, paths))
                else:
                    outside[module].add(first)
        inside[module].discard(module)
    return inside, outside


def targets(node: ast.Import | ast.ImportFrom, package: list[str]) -> Iterator[str]:
    """Full names of what an import names: modules, or things in them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
        return
    start = [PACKAGE, *package[: len(package) - node.level + 1]] if node.level else []
    base = ".".join([*start, *([node.module] if node.module else [])])
    yield from (f"{base}.{alias.name}" for alias in node.names)


def nearest(name: str, modules: dict[str, Path]) -> str:
    """The module that a name is, or that it is in."""
    while name and name not in modules:
        name = name.rpartition(".")[0]
    return name or "__init__"


def room(module: str) -> str:
    return module.partition(".")[0]


def wrong_rooms(inside: Graph) -> list[str]:
    """Imports of a room that the importing one must not know."""
    return [
        f"{module} imports {other}"
        for module, others in inside.items()
        for other in sorted(others)
        if room(other) not in {room(module), *MAY_IMPORT.get(room(module), set())}
    ]


def vllm_where_it_must_not_be(outside: Graph) -> list[str]:
    return [
        module
        for module, packages in outside.items()
        if "vllm" in packages and not any(f"{module}.".startswith(f"{place}.") for place in IMPORT_VLLM)
    ]


def device_of(module: str) -> str | None:
    """Which device a module of an operation implements; None if it is for none or all."""
    parts = module.split(".")
    found = [device for part in parts[2:] for device in DEVICES if part == device or part.startswith(f"{device}_")]
    return {"sm90": "cuda"}.get(found[0], found[0]) if found and parts[0] == "ops" else None


def mixed_devices(inside: Graph) -> list[str]:
    """Implementations that import another device's."""
    return [
        f"{module} imports {other}"
        for module, others in inside.items()
        for other in sorted(others)
        if device_of(module) and device_of(other) and device_of(module) != device_of(other)
    ]


def cycles(inside: Graph) -> list[frozenset[str]]:
    """Strongly connected components of several modules (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in sorted(inside[module]):
            if other not in order:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == order[module]:
            component = frozenset(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(component)

    for module in inside:
        if module not in order:
            visit(module)
    return found


INSIDE, OUTSIDE = read(ROOT)


def test_rooms_import_downwards() -> None:
    assert wrong_rooms(INSIDE) == []


def test_every_room_says_what_it_may_import() -> None:
    assert {room(module) for module in INSIDE} == set(MAY_IMPORT)


def test_vllm_is_imported_by_those_who_must() -> None:
    assert vllm_where_it_must_not_be(OUTSIDE) == []


def test_an_implementation_knows_no_other_device() -> None:
    assert mixed_devices(INSIDE) == []


def test_no_two_modules_need_each_other() -> None:
    assert cycles(INSIDE) == []


@pytest.mark.parametrize(
    ("module", "line", "check"),
    [
        ("ops/norm/cpu.py", "from ...integration import patch_points", wrong_rooms),
        ("aten/npu.py", "import vllm_batch_invariant.hf.norm", wrong_rooms),
        ("integration/endpoint.py", "def late():\n    from ..verify import outcome", wrong_rooms),
        ("ops/softmax/cuda.py", "from .cpu import softmax", mixed_devices),
        ("ops/attention/cuda.py", "from . import cpu_kernel", mixed_devices),
        ("aten/overrides.py", "def late():\n    from . import npu", cycles),
        ("integration/patch_points.py", "from .install import check", cycles),
    ],
)
def test_a_wrong_import_is_found(module: str, line: str, check: object, tmp_path: Path) -> None:
    copy = copied(tmp_path)
    path = copy / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    assert len(check(read(copy)[0])) > len(check(INSIDE))


@pytest.mark.parametrize("line", ["import vllm", "from vllm.config import VllmConfig", "def late():\n    import vllm"])
def test_a_wrong_import_of_vllm_is_found(line: str, tmp_path: Path) -> None:
    copy = copied(tmp_path)
    (copy / "ops" / "dispatch.py").write_text(line)
    assert vllm_where_it_must_not_be(read(copy)[1]) == [*vllm_where_it_must_not_be(OUTSIDE), "ops.dispatch"]


def test_an_import_for_type_checkers_does_not_count() -> None:
    tree = ast.parse("if TYPE_CHECKING:\n    import vllm\nif other:\n    import torch")
    assert [node.names[0].name for node in imported(tree)] == ["torch"]


def copied(folder: Path) -> Path:
    """The sources of the package in another folder."""
    for path in ROOT.rglob("*.py"):
        copy = folder / path.relative_to(ROOT)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    return folder

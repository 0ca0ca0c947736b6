"""Imports point one way, and no two modules need each other: read from the sources, not from what happens to be loaded.

Imports for type checkers count, and modules that are imported by a name (``import_module``), as far as it is written
there. Which module of an operation serves is looked up in the tables of ``ops.dispatch`` and ``ops.attention``: an
implementation may call another operation.
"""

import ast
from pathlib import Path

import pytest

from scripts.import_graph import FOLDER, PACKAGE, Graph, at_run_time, by_name, imports, inside, outside, room_of

MAY_IMPORT = {
    "ops": {"errors", "envs", "installing", "kept_file", "sources", "compare", "version"},
    "aten": {"ops", "errors"},
    "batch_invariant_ops": {"aten", "ops"},
    "provenance": {"ops", "sources", "version"},
    "integration": {"ops", "aten", "provenance", "envs", "errors", "installing", "resume", "seeds", "version"},
    "ascend": {"ops", "aten", "integration", "envs", "errors", "sources"},
    "hf": {"ops", "aten", "integration", "provenance", "envs", "errors", "installing"},
    "ray_serve": set(),
    "trl": {"hf", "integration", "envs", "errors", "installing", "seeds"},
    "verl": {"hf", "errors", "seeds"},
    "verify": {
        *(
            "ops",
            "aten",
            "integration",
            "provenance",
            "envs",
            "installing",
            "errors",
            "seeds",
            "compare",
            "kept_file",
            "version",
        ),
        "serve",
    },
    "cli": {"verify", "integration", "envs", "errors", "installing", "version"},
    "testing": {"verify", "compare"},
    "envs": {"errors"},
    "errors": set(),
    "installing": set(),
    "serve": {"envs"},
    "compare": set(),
    "kept_file": {"envs"},
    "sources": {"kept_file"},
    "resume": {"seeds"},
    "seeds": set(),
    "version": set(),
    PACKAGE: {"aten", "integration", "envs", "errors", "version"},
}
"""Which rooms (folders and modules of the package) a room may import beside itself."""

IMPORT_VLLM = (
    "integration",
    "ascend.integration",
    "ray_serve",
    "serve",
    "verify.harness.engine",
    "verify.harness.worker_main",
    "verify.bisect.engine",
    "verify.check.operations",
    "verify.receipt.engine",
)
"""Modules, and packages of them, that may import vLLM."""

DEVICES = ("cpu", "cuda", "sm90")
"""How an implementation's module or package is called, alone or at the beginning of its name."""

ROOMS_OF_DEVICES = ("ascend",)
"""Rooms that are for one device alone; no other room may import them."""


def wrong_rooms(graph: Graph) -> list[str]:
    """Imports of a room that the importing one must not know."""
    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if room_of(other) not in {room_of(module), *MAY_IMPORT.get(room_of(module), set())}
    ]


def vllm_where_it_must_not_be(graph: Graph) -> list[str]:
    return [
        module
        for module, packages in graph.items()
        if "vllm" in packages and not any(f"{module}.".startswith(f"{PACKAGE}.{place}.") for place in IMPORT_VLLM)
    ]


def device_of(module: str) -> str | None:
    """Which device a module of an operation implements; None if it is for none or all."""
    room, *parts = module.split(".")[1:] or [module]
    if room in ROOMS_OF_DEVICES:
        return room
    found = [device for part in parts[1:] for device in DEVICES if part == device or part.startswith(f"{device}_")]
    return {"sm90": "cuda"}.get(found[0], found[0]) if found and room == "ops" else None


def mixed_devices(graph: Graph) -> list[str]:
    """Implementations that import another device's."""
    return [
        f"{module} imports {other}"
        for module, others in graph.items()
        for other in sorted(others)
        if device_of(module) and device_of(other) and device_of(module) != device_of(other)
    ]


def cycles(graph: Graph) -> list[frozenset[str]]:
    """Strongly connected components of several modules (Tarjan 1972)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        stack.append(module)
        for other in sorted(graph[module]):
            if other not in order:
                visit(other)
            if other in stack:
                low[module] = min(low[module], low[other])
        if low[module] == order[module]:
            component = frozenset(stack[stack.index(module) :])
            del stack[stack.index(module) :]
            if len(component) > 1:
                found.append(component)

    for module in graph:
        if module not in order:
            visit(module)
    return found


INSIDE, OUTSIDE = inside(imports()), outside(imports())
WITH_HIDDEN = inside(imports(hidden=True))


def test_rooms_import_downwards() -> None:
    assert wrong_rooms(WITH_HIDDEN) == []


def test_every_room_says_what_it_may_import() -> None:
    assert {room_of(module) for module in INSIDE} == set(MAY_IMPORT)


def test_vllm_is_imported_by_those_who_must() -> None:
    assert vllm_where_it_must_not_be(OUTSIDE) == []


def test_an_implementation_knows_no_other_device() -> None:
    assert mixed_devices(INSIDE) == []


def test_no_two_modules_need_each_other() -> None:
    assert cycles(WITH_HIDDEN) == []


@pytest.mark.parametrize(
    ("module", "line", "check"),
    [
        ("ops/norm/cpu.py", "from ...integration import patch_points", wrong_rooms),
        ("ascend/aten.py", "import vllm_batch_invariant.hf.norm", wrong_rooms),
        ("integration/engine/endpoint.py", "from ...ascend import DEVICE", wrong_rooms),
        ("integration/engine/endpoint.py", "def late():\n    from ...verify import outcome", wrong_rooms),
        ("ops/softmax/cuda.py", "from .cpu import softmax", mixed_devices),
        ("ops/attention/cuda.py", "from . import cpu_kernel", mixed_devices),
        ("ascend/ops/linear.py", "from ...ops.linear import cuda", mixed_devices),
        ("aten/overrides.py", "def late():\n    from . import cpu", cycles),
        ("integration/reviews/patch_points.py", "from ..engine.install import check", cycles),
    ],
)
def test_a_wrong_import_is_found(module: str, line: str, check: object, tmp_path: Path) -> None:
    copy = with_line(module, line, tmp_path)
    assert len(check(inside(imports(copy)))) > len(check(INSIDE))


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("ops/attention/shared_memory.py", "if TYPE_CHECKING:\n    from .plan import Planner"),
        ("integration/engine/endpoint.py", "def late():\n    return import_module('..devices.record', __package__)"),
        (
            "integration/engine/weights.py",
            "def late(name):\n    return importlib.import_module(f'..devices.{name}', __package__)",
        ),
        ("verify/fuzz/options.py", f"def late():\n    return import_module('{PACKAGE}.verify.fuzz.schedule')"),
    ],
)
def test_a_circle_that_is_hidden_is_found(module: str, line: str, tmp_path: Path) -> None:
    copy = with_line(module, line, tmp_path)
    assert cycles(inside(imports(copy))) == []
    assert len(cycles(inside(imports(copy, hidden=True)))) == 1


@pytest.mark.parametrize("line", ["import vllm", "from vllm.config import VllmConfig", "def late():\n    import vllm"])
def test_a_wrong_import_of_vllm_is_found(line: str, tmp_path: Path) -> None:
    copy = copied(tmp_path)
    (copy / "ops" / "dispatch.py").write_text(line)
    assert vllm_where_it_must_not_be(outside(imports(copy))) == [
        *vllm_where_it_must_not_be(OUTSIDE),
        f"{PACKAGE}.ops.dispatch",
    ]


def test_an_import_for_type_checkers_is_told_apart() -> None:
    tree = ast.parse("if TYPE_CHECKING:\n    import vllm\nif other:\n    import torch")
    assert [node.names[0].name for node in at_run_time(tree)] == ["torch"]
    assert [node.names[0].name for node in at_run_time(tree, hidden=True)] == ["vllm", "torch"]


def test_what_is_not_written_of_a_name_may_be_anything() -> None:
    written = "import_module('a.b')\nimport_module(f'.{x}.b_{y}', p)\nimport_module(TABLE[x])\nimport_module(x)"
    assert [*by_name(ast.parse(written))] == ["a.b", ".*.b_*"]


def with_line(module: str, line: str, folder: Path) -> Path:
    """A copy of the package with a line more in a module."""
    copy = copied(folder)
    path = copy / module
    path.write_text(f"{path.read_text()}\n{line}\n")
    return copy


def copied(folder: Path) -> Path:
    """The sources of the package in another folder."""
    for path in FOLDER.rglob("*.py"):
        copy = folder / path.relative_to(FOLDER)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    return folder

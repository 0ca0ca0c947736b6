"""The imports inside the package: between modules, and between rooms. Read from the sources, so that imports inside
functions count, which say as much about who depends on whom; those for type checkers do not.
"""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = "vllm_batch_invariant"
FOLDER = Path(__file__).parents[1] / PACKAGE
Graph = dict[str, set[str]]


def modules(folder: Path = FOLDER) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join((PACKAGE, *parts[: len(parts) - (parts[-1] == "__init__")]))] = path
    return found


def imports(folder: Path = FOLDER) -> Graph:
    """What each module imports: modules of the package by their names, of others by their first name."""
    known = modules(folder)
    return {name: set(_imports_of(name, path, known)) - {name} for name, path in known.items()}


def inside(found: Graph) -> Graph:
    """Of what each module imports, the modules of the package."""
    return {name: {other for other in others if _is_ours(other)} for name, others in found.items()}


def outside(found: Graph) -> Graph:
    """Of what each module imports, the other packages."""
    return {name: {other for other in others if not _is_ours(other)} for name, others in found.items()}


def room_of(module: str) -> str:
    """``ops``, ``integration``, ...; of what lies beside the rooms, the module's own name."""
    return module.split(".")[1] if "." in module else module


def between_rooms(found: Graph) -> set[tuple[str, str]]:
    """Pairs of rooms of which the first imports the second."""
    pairs = {(room_of(name), room_of(other)) for name, others in inside(found).items() for other in others}
    return {(above, below) for above, below in pairs if above != below}


def at_run_time(tree: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import of a module, but those under ``if TYPE_CHECKING``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from at_run_time(node)


@cache
def _read(source: str) -> tuple[ast.Import | ast.ImportFrom, ...]:
    return tuple(at_run_time(ast.parse(source)))


def _imports_of(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in _read(path.read_text()):
        if isinstance(node, ast.Import):
            yield from (_nearest(one.name, known) for one in node.names)
        else:
            above = package[: len(package) - node.level + 1] if node.level else []
            origin = ".".join((*above, node.module) if node.module else above)
            yield from (_nearest(f"{origin}.{one.name}", known) for one in node.names)


def _nearest(name: str, known: dict[str, Path]) -> str:
    """The module of the package that a name is, or that it is in; the first name of another package."""
    if not _is_ours(name):
        return name.partition(".")[0]
    while name not in known:
        name = name.rpartition(".")[0]
    return name


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE

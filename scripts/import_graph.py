"""The imports inside the package: between modules, and between rooms."""

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = "vllm_batch_invariant"
FOLDER = Path(__file__).parents[1] / PACKAGE


def modules(folder: Path = FOLDER) -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder).with_suffix("").parts
        found[".".join((PACKAGE, *parts[: len(parts) - (parts[-1] == "__init__")]))] = path
    return found


def imports(folder: Path = FOLDER) -> dict[str, set[str]]:
    """What each module imports, inside functions too, but not for type checkers alone: modules of the package by their
    names, of others by their first name.
    """
    known = modules(folder)
    return {name: set(_imports_of(name, path, known)) - {name} for name, path in known.items()}


def room_of(module: str) -> str:
    """``ops``, ``integration``, ...; of what lies beside the rooms, the module's own name."""
    return module.split(".")[1] if "." in module else module


def between_rooms(found: dict[str, set[str]]) -> dict[tuple[str, str], int]:
    """How many pairs of modules import each other across each pair of rooms."""
    counts: dict[tuple[str, str], int] = {}
    for module, imported in found.items():
        for other in imported:
            pair = room_of(module), room_of(other)
            if other.startswith(PACKAGE) and pair[0] != pair[1]:
                counts[pair] = counts.get(pair, 0) + 1
    return counts


def _imports_of(name: str, path: Path, known: dict[str, Path]) -> Iterator[str]:
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in _at_run_time(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (_of_package(one.name, known) for one in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            origin = ".".join((*above, node.module) if node.module else above)
            for one in node.names:
                yield _of_package(f"{origin}.{one.name}" if f"{origin}.{one.name}" in known else origin, known)


def _of_package(module: str, known: dict[str, Path]) -> str:
    return module if module in known else module.partition(".")[0]


def _at_run_time(node: ast.AST) -> Iterator[ast.AST]:
    """Every node but those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING":
            continue
        yield child
        yield from _at_run_time(child)

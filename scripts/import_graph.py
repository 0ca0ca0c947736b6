"""The imports inside the package: between modules, and between rooms. Read from the sources, so that imports inside
functions count, which say as much about who depends on whom. Those for type checkers, and those by a name that is
written where it is imported, as in ``import_module(f".{device}", __package__)``, are told apart.
"""

import ast
from collections.abc import Iterator
from fnmatch import fnmatchcase
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


def imports(folder: Path = FOLDER, hidden: bool = False) -> Graph:
    """What each module imports: modules of the package by their names, of others by their first name.

    Args:
        folder: of the package.
        hidden: with those under ``if TYPE_CHECKING`` and those by ``import_module``, of which a part of a name that is
            not written may be anything.
    """
    known = modules(folder)
    return {name: set(_imports_of(name, path, known, hidden)) - {name} for name, path in known.items()}


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


def at_run_time(tree: ast.AST, hidden: bool = False) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import of a module, but those under ``if TYPE_CHECKING`` unless they are wanted."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING" and not hidden:
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        yield from at_run_time(node, hidden)


def by_name(tree: ast.AST) -> Iterator[str]:
    """What ``import_module`` is called with, relative to the package or not; "*" for a part that is not written. Names
    that come from elsewhere altogether are left out.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] == "import_module":
            parts = node.args[0].values if isinstance(node.args[0], ast.JoinedStr) else [node.args[0]]
            name = "".join(str(part.value) if isinstance(part, ast.Constant) else "*" for part in parts)
            if name != "*":
                yield name


@cache
def _read(source: str, hidden: bool) -> tuple[tuple[ast.Import | ast.ImportFrom, ...], tuple[str, ...]]:
    tree = ast.parse(source)
    return tuple(at_run_time(tree, hidden)), tuple(by_name(tree)) if hidden else ()


def _imports_of(name: str, path: Path, known: dict[str, Path], hidden: bool) -> Iterator[str]:
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]

    def origin_of(level: int, module: str | None) -> str:
        above = package[: len(package) - level + 1] if level else []
        return ".".join((*above, module) if module else above)

    written, named = _read(path.read_text(), hidden)
    for node in written:
        if isinstance(node, ast.Import):
            yield from (_nearest(one.name, known) for one in node.names)
        else:
            origin = origin_of(node.level, node.module)
            yield from (_nearest(f"{origin}.{one.name}", known) for one in node.names)
    for one in named:
        module = one.lstrip(".")
        pattern = origin_of(len(one) - len(module), module)
        if _is_ours(pattern):
            yield from (other for other in known if _matches(other, pattern))


def _matches(module: str, pattern: str) -> bool:
    parts, wanted = module.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _nearest(name: str, known: dict[str, Path]) -> str:
    """The module of the package that a name is, or that it is in; the first name of another package."""
    if not _is_ours(name):
        return name.partition(".")[0]
    while name not in known:
        name = name.rpartition(".")[0]
    return name


def _is_ours(name: str) -> bool:
    return name.partition(".")[0] == PACKAGE

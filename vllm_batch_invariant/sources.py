"""The one digest of this package's own sources, for receipts, for what was tuned and for compiled CPU kernels: of their
syntax, so that comments, docstrings and formatting change nothing.

Parsing the two hundred files that can move a bit takes 0.4 s. So the digest of a file's syntax is kept by the digest of
its bytes (:mod:`~.kept_file`): a start where no file changed reads bytes, which takes 0.01 s.
"""

import ast
import gc
import hashlib
import sys
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from . import kept_file

if TYPE_CHECKING:
    from importlib.resources.abc import Traversable

_KEPT = "syntax-{}.{}.json".format(*sys.version_info)
"""By Python: what its parser makes of a source is its own."""
_MOST_KEPT = 2000
"""Files whose digests are kept: those of a few versions of the package."""
_OF_HEADER = 16
"""Bytes of a compiled module before its code: they tell the time and size of its source."""


@cache
def digest(*names: str) -> str:
    """Of modules of this package: 64 hexadecimal digits.

    Args:
        names: folders, with all that is in them, and modules without their suffix, such as "ops" and "ops/devices".

    Raises:
        ModuleNotFoundError: one of them has neither a source nor a compiled module here.
    """
    return digest_of(files(__package__), *names)


def digest_of(root: "Traversable", *names: str) -> str:
    """As :func:`digest`, of a package at a folder, or at a place in an archive.

    A module that came without its source (``.pyc``) is digested as it was compiled.
    """
    found: dict[str, Any] = {}
    for name in names:
        parent, _, last = name.rpartition("/")
        folder = root / parent if parent else root
        modules = dict(_modules(folder / last, f"{name}/") if (folder / last).is_dir() else _module(folder, name, last))
        if not modules:
            raise ModuleNotFoundError(f"{root} has no sources or compiled modules of {name}")
        found |= modules
    found = dict(sorted(found.items()))
    of_each = zip(found, _digests([*found.values()]), strict=True)
    return hashlib.sha256("".join(f"{module}\0{each}\0" for module, each in of_each).encode()).hexdigest()


def syntax(node: ast.AST) -> str:
    """A syntax tree as text: without positions, and without strings that stand alone, such as docstrings. What a tree
    does not have is left out, so that a Python whose trees may have more writes the same.
    """
    parts: list[str] = []
    _write(node, parts.append)
    return "".join(parts)


def _write(value: Any, write: Any) -> None:
    if isinstance(value, ast.AST):
        write(f"({type(value).__name__}")
        for name in value._fields:
            field = getattr(value, name, None)
            if isinstance(value, ast.Constant) and name == "value":
                write(f" {field!r}")
            elif field is not None and field != [] and name != "type_ignores":
                write(f" {name}=")
                _write(field, write)
        write(")")
    elif isinstance(value, list):
        write("[")
        for each in value:
            if not is_text(each):
                _write(each, write)
                write(",")
        write("]")
    else:
        write(repr(value))


def is_text(node: Any) -> bool:
    """Whether a statement is a string that stands alone."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _modules(folder: "Traversable", prefix: str) -> Iterator[tuple[str, tuple[str, bytes]]]:
    """By its path without suffix, whether each module below a folder is a source or compiled, and its content."""
    for entry in folder.iterdir():
        stem, _, suffix = entry.name.rpartition(".")
        if suffix in ("py", "pyc") and entry.is_file():
            yield from _module(folder, f"{prefix}{stem}", stem)
        elif entry.name != "__pycache__" and entry.is_dir():
            yield from _modules(entry, f"{prefix}{entry.name}/")


def _module(folder: "Traversable", name: str, stem: str) -> Iterator[tuple[str, tuple[str, bytes]]]:
    """One module, by its source if that is there, as Python imports it."""
    for suffix in ("py", "pyc"):
        if (path := folder / f"{stem}.{suffix}").is_file():
            yield name, (suffix, path.read_bytes())
            return


def _digests(modules: list[tuple[str, bytes]]) -> list[str]:
    """Of each module's syntax; of a compiled one's code."""
    keys = [hashlib.sha256(content).hexdigest() for _, content in modules]
    kept = kept_file.read(kept_file.path_of(_KEPT))
    known = kept if isinstance(kept, dict) else {}
    new = {}
    was_enabled = gc.isenabled()
    gc.disable()  # trees are many objects and no cycles: it would take a third of the time
    try:
        for key, (suffix, content) in zip(keys, modules, strict=True):
            if key not in known and key not in new:
                text = syntax(ast.parse(content)).encode() if suffix == "py" else content[_OF_HEADER:]
                new[key] = hashlib.sha256(text).hexdigest()
    finally:
        if was_enabled:
            gc.enable()
    if new:
        kept_file.update(kept_file.path_of(_KEPT), lambda content: _newest((content or {}) | new))
    return [new.get(key) or known[key] for key in keys]


def _newest(digests: dict[str, str]) -> dict[str, str]:
    return dict(list(digests.items())[-_MOST_KEPT:])

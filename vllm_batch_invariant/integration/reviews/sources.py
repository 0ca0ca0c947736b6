"""Functions of vLLM's that were read, known by digests of their sources.

Another text is another function, also where it reads the same names: nothing but reading says what it computes.
"""

import ast
import functools
import hashlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FunctionType

from . import functions


def unread(use: str, source_of: Callable[[str], str | None]) -> dict[str, str]:
    """Functions with another source than those that were read, as "module.name", with their digests; "" for one that
    is not there.

    Args:
        use: what they were read for, in ``functions.toml``.
        source_of: the source of a module by its name, or None.
    """
    other: dict[str, str] = {}
    for module, read in functions(use).items():
        found = digests(source_of(module) or "")
        other |= {
            f"{module}.{name}": found.get(name, "") for name, known in read.items() if found.get(name, "") not in known
        }
    return other


def is_read(use: str, function: object) -> bool:
    """Whether a function was read for a use: by its source, and it is what its module defines and no other that
    somebody has put there.
    """
    if not isinstance(function, FunctionType):
        return False
    module, name = function.__module__, function.__code__.co_qualname
    file = getattr(sys.modules.get(module), "__file__", None)
    known = functions(use).get(module, {}).get(name, ())
    if not known or function.__code__.co_filename != file:
        return False
    return digests(Path(file).read_text(encoding="utf-8")).get(name) in known


def installed(module: str) -> str | None:
    """The source of a module of the installed vLLM."""
    import vllm

    file = Path(vllm.__file__).parents[1] / f"{module.replace('.', '/')}.py"
    return file.read_text(encoding="utf-8") if file.exists() else None


@functools.cache
def digests(source: str) -> Mapping[str, str]:
    """By name ("Class.method" for methods), a digest of what a module defines: functions and constants."""
    lines = source.splitlines()

    def text(node: ast.stmt) -> str:
        first = min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", []))])
        return "\n".join(lines[first - 1 : node.end_lineno])

    return {
        name: hashlib.sha256(text(node).encode()).hexdigest()[:16]
        for name, node in _definitions(ast.parse(source).body)
    }


def _definitions(nodes: list[ast.stmt], prefix: str = "") -> Iterator[tuple[str, ast.stmt]]:
    for node in nodes:
        match node:
            case ast.If() | ast.Try():
                yield from _definitions(node.body + node.orelse, prefix)
            case ast.ClassDef():
                yield from _definitions(node.body, f"{prefix}{node.name}.")
            case ast.FunctionDef():
                yield prefix + node.name, node
            case ast.Assign():
                yield from ((prefix + target.id, node) for target in node.targets if isinstance(target, ast.Name))

"""Functions of vLLM that stay in use while it samples, known by digests of their sources.

Nothing but reading says that their arithmetic follows a row alone. So a source that nobody has read is refused.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import NotCovered
from . import patch_points
from .reviewed_sources import REVIEWED

_SECOND_RUNNER = "vllm.v1.worker.gpu."
"""Modules of the model runner that only GPUs have."""
_OF_A_CPU = ("TopKTopPSampler.forward_cpu",)


def check(device_type: str) -> None:
    """Refuse an installed vLLM with a function that was not reviewed.

    Raises:
        NotCovered: with the names of the first three.
    """
    import vllm

    root = Path(vllm.__file__).parents[1]

    def source_of(module: str) -> str | None:
        file = root / f"{module.replace('.', '/')}.py"
        return file.read_text() if file.exists() else None

    names = list(not_reviewed(source_of, device_type))
    if names:
        raise NotCovered(
            f"sampling in vLLM {patch_points.installed_version()}",
            f"nobody has reviewed its {', '.join(names[:3])}{' and others' * (len(names) > 3)}",
            f"install a release of vLLM {patch_points.version_range()} as published",
        )


def not_reviewed(source_of: Callable[[str], str | None], device_type: str) -> dict[str, str]:
    """Functions that a device uses and that have an unknown source, with their digests; "" for one that is not there.

    Args:
        source_of: the source of a module by its name, or None.
    """
    unknown = {}
    for module, reviewed in REVIEWED.items():
        if module.startswith(_SECOND_RUNNER) and device_type != "cuda":
            continue
        found = digests(source_of(module) or "")
        unknown |= {
            f"{module}.{name}": found.get(name, "")
            for name, known in reviewed.items()
            if found.get(name, "") not in known and (device_type == "cpu" or name not in _OF_A_CPU)
        }
    return unknown


def digests(source: str) -> dict[str, str]:
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

"""Functions of vLLM that stay in use while it samples, known by digests of their sources.

Nothing but reading says that their arithmetic follows a row alone. So a source that nobody has read is refused.
"""

import ast
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from ..errors import NotCovered
from . import patch_points, versions
from .reviewed_sources import REVIEWED

_ONLY_ON = {
    "vllm.v1.worker.gpu.": "cuda",
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu": "cpu",
}
"""How the names of functions begin that one device type alone uses: the second model runner's, and a method."""


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
            f"install a release of vLLM {versions.version_range(device_type)} as published",
        )


def not_reviewed(source_of: Callable[[str], str | None], device_type: str) -> dict[str, str]:
    """Functions that a device uses and that have an unknown source, with their digests; "" for one that is not there.

    Args:
        source_of: the source of a module by its name, or None.
    """
    unknown: dict[str, str] = {}
    for module, reviewed in REVIEWED.items():
        found = digests(source_of(module) or "")
        unknown |= {
            f"{module}.{name}": found.get(name, "")
            for name, known in reviewed.items()
            if found.get(name, "") not in known and _is_used(f"{module}.{name}", device_type)
        }
    return unknown


def _is_used(name: str, device_type: str) -> bool:
    return all(only == device_type for start, only in _ONLY_ON.items() if name.startswith(start))


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

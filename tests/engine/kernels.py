"""What serves a model: run in the engine's worker."""

from typing import Any


def kernels(model: Any) -> dict[str, list[str]]:
    """Which classes and functions serve the model's layers."""
    found: dict[str, set[str]] = {}
    for module in model.modules():
        found.setdefault("modules", set()).add(f"{type(module).__module__}.{type(module).__qualname__}")
        for attribute in ("cpu_linear", "impl"):
            value = getattr(module, attribute, None)
            if value is not None:
                owner = value if hasattr(value, "__qualname__") else type(value)
                found.setdefault(attribute, set()).add(f"{owner.__module__}.{owner.__qualname__}")
    return {kind: sorted(names) for kind, names in found.items()}

"""What vLLM passes on of an adapter, with a digest of its files: a module of its own, because it imports vLLM."""

from typing import Any

from ..reviews import patch_points

_Base: Any = patch_points.LORA_REQUEST.get()


class AdapterRequest(_Base):
    """vLLM's, as it goes from an engine to its workers."""

    digest: str = ""
    """Of the files that a worker may read."""

    def __eq__(self, other: object) -> bool:
        """By its number, too: of two of one name in a step vLLM would give the workers one."""
        return isinstance(other, _Base) and _identity(self) == _identity(other)

    def __hash__(self) -> int:
        return hash(_identity(self))


def _identity(adapter: Any) -> tuple[str, int]:
    return adapter.lora_name, adapter.lora_int_id

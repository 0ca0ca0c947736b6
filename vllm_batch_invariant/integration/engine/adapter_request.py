"""What vLLM passes on of an adapter, with a digest of its files: a module of its own, because it imports vLLM."""

from typing import Any

from ..reviews import patch_points

_Base: Any = patch_points.LORA_REQUEST.get()


class AdapterRequest(_Base):
    """vLLM's, as it goes from an engine to its workers."""

    digest: str = ""
    """Of the files that a worker may read."""

    __hash__ = _Base.__hash__
    """That of its name, as vLLM's."""

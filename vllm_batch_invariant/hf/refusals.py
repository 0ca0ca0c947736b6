"""The first thing that a trainer does not cover."""

from collections.abc import Mapping
from typing import Any

from ..errors import NotCovered


def refuse_found(
    found: Mapping[str, Any], trainer: str = "a trainer", remedy: str = "use a configuration without it"
) -> None:
    """Refuse the first thing that was found, by what it is called.

    Raises:
        NotCovered: there is one.
    """
    what = next((what for what, is_found in found.items() if is_found), None)
    if what is not None:
        raise NotCovered(f"{what} in {trainer}", "the bits have not been compared with vLLM's", remedy)

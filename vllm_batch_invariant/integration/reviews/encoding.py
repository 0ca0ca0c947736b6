"""What a multimodal model takes beside text, by its settings, and what of that is encoded (``ran.toml``)."""

from typing import Any

from . import ran

ATTENTION = ("auto", "numba", "triton")
"""Implementations of attention that encoders have been run with."""


def taken(model: Any) -> list[str]:
    """Kinds of items that requests may bring to a model that is served as text, or with some of them.

    Args:
        model: vLLM's configuration of a multimodal model.
    """
    kinds = ran().text_of.get(model.architecture, ())
    return [kind for kind in kinds if model.multimodal_config.get_limit_per_prompt(kind)]


def encoded(model: Any) -> tuple[str, ...]:
    """Kinds of those that an engine encodes.

    Args:
        model: vLLM's configuration of any model.
    """
    if not getattr(model, "is_multimodal_model", False):
        return ()
    return tuple(kind for kind in taken(model) if kind in ran().encoded.get(model.architecture, ()))

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
    return [kind for kind in kinds if model.multimodal_config.get_limit_per_prompt(kind) and _has(model, kind)]


def _has(model: Any, kind: str) -> bool:
    """Whether a checkpoint takes what others of its architecture do: of Gemma 4 and of Nemotron Nano Omni, some have no
    encoder of audio.
    """
    config = getattr(model, "hf_config", None)
    if kind == "audio" and model.architecture.startswith("NemotronH_"):
        return getattr(config, "sound_config", None) is not None
    return getattr(config, f"{kind}_config", kind) is not None


def encoded(model: Any) -> tuple[str, ...]:
    """Kinds of those that an engine encodes.

    Args:
        model: vLLM's configuration of any model.
    """
    if not getattr(model, "is_multimodal_model", False):
        return ()
    return tuple(kind for kind in taken(model) if kind in ran().encoded.get(model.architecture, ()))


def encoded_by(kind: type) -> tuple[str, ...]:
    """Kinds of items that a class of vLLM's encodes, by whatever name a model asks for it.

    Args:
        kind: of a loaded model.
    """
    return tuple(item for name in names_of(kind.__name__) for item in ran().encoded.get(name, ()))


def names_of(kind: str) -> list[str]:
    """By which a model may ask for a class of vLLM's: its own, and those that it serves."""
    return [kind, *(name for name, served in ran().served_by.items() if served == kind)]

"""Batch-invariant inference: the same bits for a request whatever else is being computed.

As a vLLM plugin it is found by itself (entry point group ``vllm.general_plugins``) and acts when
``VLLM_BATCH_INVARIANT=1``. Without vLLM, :func:`batch_invariant_mode` does the same for plain PyTorch.
"""

from typing import TYPE_CHECKING

from .version import __version__

if TYPE_CHECKING:
    from .aten import (
        batch_invariant_mode,
        disable_batch_invariant_mode,
        enable_batch_invariant_mode,
        is_batch_invariant_mode_enabled,
        set_batch_invariant_mode,
    )

__all__ = [
    "__version__",
    "batch_invariant_mode",
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "is_batch_invariant_mode_enabled",
    "register",
    "set_batch_invariant_mode",
]


def __getattr__(name: str) -> object:
    """The functions of ``aten`` on first use, so that importing the package imports neither PyTorch nor a device
    library.
    """
    if name in __all__:
        from . import aten

        return getattr(aten, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def register() -> None:
    """Entry point of the vLLM plugin, called in every process of the engine; does nothing unless the flag is 1, but
    look for a misspelt flag.

    Raises:
        BadSetting: a wrong value of the flag, a misspelt one, or a variable with a wrong name or value.
        NotCovered: a vLLM that this version does not know.
    """
    from . import envs, errors

    try:
        envs.check_flag()
        if not envs.enabled():
            return
        errors.print_as_one_line()
        envs.check_names()
        from .integration.engine.install import install

        install()
    except errors.BadSetting:
        errors.print_as_one_line()
        raise

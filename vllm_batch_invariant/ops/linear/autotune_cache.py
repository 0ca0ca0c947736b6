"""Keeps on disk how GEMMs were tuned on this machine, so that the next start need not measure again."""

from functools import cache
from pathlib import Path
from typing import Any

from ... import kept_file
from ..common.gpu_environment import gpu_environment, kept_path


@cache
def environment(device: int, library: str, *code: str) -> dict[str, str]:
    """Everything that a measurement is true for: another GPU, driver, library or version of this code has its own.

    Args:
        device: index of the GPU.
        library: version of cuBLASLt, or why there is none.
        code: modules beside those of GEMMs that decide what is measured; such measurements have a file of their own.
    """
    return gpu_environment(device, "ops/linear", "ops/common", *code) | {"cublaslt": library}


def _path(of: dict[str, str]) -> Path | None:
    return kept_path("linear", of)


def load(of: dict[str, str]) -> dict[str, dict[str, Any]]:
    """What is known of an environment: problem to M bucket to tuned schedule. Empty for an unknown one, and for a file
    that is broken, which is set aside.
    """
    content = kept_file.read(_path(of))
    if content is None:
        return {}
    if not isinstance(content, dict) or content.get("environment") != of or not _is_table(content.get("gemms")):
        set_aside(of, "it does not hold what it should")
        return {}
    return content["gemms"]


def save(of: dict[str, str], gemms: dict[str, dict[str, Any]]) -> None:
    """Add to what is known of an environment. A folder that cannot be written is left alone: the next start measures
    again.
    """

    def added(content: Any) -> dict[str, Any]:
        known = load(of) if content is not None else {}
        for name, schedules in gemms.items():
            known.setdefault(name, {}).update(schedules)
        return {"environment": of, "gemms": known}

    kept_file.update(_path(of), added)


def set_aside(of: dict[str, str], why: Exception | str) -> None:
    """Put away the file of an environment, because nothing can be made of what it holds."""
    kept_file.set_aside(_path(of), why)


def _is_table(gemms: Any) -> bool:
    return isinstance(gemms, dict) and all(isinstance(schedules, dict) for schedules in gemms.values())

"""The device types that the mode serves vLLM on: a record for each arithmetic, in the module that
:mod:`~..ops.devices` names, imported when needed.
"""

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ... import envs
from ...ops.devices import known
from .refusal import not_covered

if TYPE_CHECKING:
    from .record import VllmDevice


def get(device_type: str) -> "VllmDevice":
    """The record of a device type, for the arithmetic that is asked for; where it has none of its own, it is refused.

    Raises:
        BadSetting: another arithmetic than there is.
        NotCovered: anything but a CPU, an NVIDIA GPU or a device that joined.
    """
    if device_type not in known():
        raise not_covered(device_type)
    module = import_module(known()[device_type].vllm)
    if not envs.is_exact():
        return module.DEVICE
    return module.EXACT if hasattr(module, "EXACT") else replace(module.DEVICE, arithmetic="exact")


def of_config(vllm_config: Any) -> "VllmDevice":
    """The record of the device that a configuration of vLLM is for. Errors as in :func:`get`."""
    return get(vllm_config.device_config.device_type)


def type_of(platform: Any) -> str:
    """The device type of vLLM's platform. ROCm's and others call theirs "cuda", too: these have their own name."""
    return platform.device_name if platform.device_type == "cuda" and not platform.is_cuda() else platform.device_type

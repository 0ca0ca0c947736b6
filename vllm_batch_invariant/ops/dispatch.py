"""Finds the module that implements an operation on a device, importing it when it is first needed."""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from ..errors import NotCovered
from ..installing import how_to_install

MODULES = {
    (operation, device_type): f".{operation}.{device_type}"
    for operation, device_types in {
        "acceptance": ("cpu", "cuda"),
        "all_reduce": ("cpu", "cuda"),
        "attention_backward": ("cpu", "cuda"),
        "linear": ("cpu", "cuda", "npu"),
        "moe": ("cpu", "cuda"),
        "norm": ("cpu", "cuda", "npu"),
        "norm_backward": ("cpu", "cuda"),
        "norm_rotary": ("cuda",),
        "ranking": ("cpu", "cuda"),
        "reduce": ("cpu", "cuda", "npu"),
        "silu": ("cpu", "cuda"),
        "silu_backward": ("cpu", "cuda"),
        "softmax": ("cpu", "cuda", "npu"),
        "top_k_top_p": ("cpu", "cuda"),
    }.items()
    for device_type in device_types
}
"""The module, relative to this package, of each (operation, device type) that is implemented. Attention, which has
several implementations on a device, has a table of its own.
"""

_IN_WORDS = {"reduce": "sums and means", "acceptance": "speculative decoding", "moe": "mixtures of experts"}
"""What users call some operations."""


@cache
def module_for(operation: str, device_type: str) -> ModuleType:
    """The module that implements ``operation`` on a device type, with no regard to autograd.

    Raises:
        NotCovered: no implementation for the device, or its package is missing.
    """
    if (operation, device_type) not in MODULES:
        raise NotCovered(
            f"{operation} on device '{device_type}'",
            f"this version implements it for {', '.join(device for name, device in MODULES if name == operation)} only",
            "move the tensors there, or leave the mode off",
        )
    try:
        return import_module(MODULES[operation, device_type], __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == __package__.split(".")[0]:
            raise
        raise NotCovered(
            f"{_IN_WORDS.get(operation, operation)} on device '{device_type}'",
            f"the package '{error.name}' is not installed",
            "pip install numba" if error.name == "numba" else how_to_install(device_type),
        ) from error


def implementation(operation: str, *tensors: torch.Tensor | None) -> ModuleType:
    """The module that implements ``operation`` where ``tensors`` live, for a call outside autograd.

    Raises:
        NotCovered: no implementation for the device, or its package is missing.
        RuntimeError: tensors on several devices, or one of them wants a gradient, which only
            ``batch_invariant_mode()`` can give.
    """
    present = [tensor for tensor in tensors if tensor is not None]
    devices = {tensor.device for tensor in present}
    if len(devices) != 1:
        raise RuntimeError(f"{operation} needs all tensors on one device, got {sorted(map(str, devices))}")
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in present):
        raise RuntimeError(
            f"the batch-invariant {operation} records no gradient when called by name: "
            "use PyTorch's own function inside batch_invariant_mode(), or torch.no_grad()"
        )
    return module_for(operation, present[0].device.type)

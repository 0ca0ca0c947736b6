"""Finds the implementation of an operation for a device, importing it when it is first needed."""

from functools import cache
from importlib import import_module
from types import ModuleType

import torch

from ..errors import NotCovered

IMPLEMENTED = ("cpu", "cuda", "npu")
"""Device types that have an implementation of every operation."""
DISPATCH_KEYS = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}
"""Where PyTorch's dispatcher keeps the kernels of a device type."""


def present(device_type: str) -> bool:
    """Whether tensors can be on such a device in this process; imports no device library to find out."""
    module = getattr(torch, device_type, None)
    return module is not None and module.is_available()


@cache
def module_for(operation: str, device_type: str) -> ModuleType:
    """The module that implements ``operation`` on a device type, with no regard to autograd.

    Raises:
        NotCovered: no implementation for the device, or its package is missing.
    """
    if device_type not in IMPLEMENTED:
        raise NotCovered(
            f"{operation} on device '{device_type}'",
            f"this version has implementations for {', '.join(IMPLEMENTED)} only",
            "move the tensors there, or leave the mode off",
        )
    try:
        return import_module(f".{operation}.{device_type}", __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] == __package__.split(".")[0]:
            raise
        raise NotCovered(
            f"{operation} on device '{device_type}'",
            f"the package '{error.name}' is not installed",
            f"pip install 'vllm-batch-invariant[{device_type}]'",
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

"""Finds the module that implements an operation in an arithmetic on a device, importing it when it is first needed."""

from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import NoReturn

import torch

from ..errors import NotCovered
from ..installing import how_to_install
from . import devices

_FLOAT = {
    "acceptance": ("cpu", "cuda"),
    "all_reduce": ("cpu", "cuda"),
    "attention_backward": ("cpu", "cuda"),
    "causal_conv": ("cpu", "cuda"),
    "delta_rule": ("cpu", "cuda"),
    "delta_rule_backward": ("cpu",),
    "kv_cache": ("cpu", "cuda"),
    "linear": ("cpu", "cuda"),
    "lora": ("cpu", "cuda"),
    "moe": ("cpu", "cuda"),
    "norm": ("cpu", "cuda"),
    "norm_backward": ("cpu", "cuda"),
    "norm_rotary": ("cuda",),
    "quantise": ("cpu", "cuda"),
    "ranking": ("cpu", "cuda"),
    "reduce": ("cpu", "cuda"),
    "relu_squared": ("cpu", "cuda"),
    "scaled_linear": ("cpu", "cuda"),
    "silu": ("cpu", "cuda"),
    "silu_backward": ("cpu", "cuda"),
    "softmax": ("cpu", "cuda"),
    "top_k_top_p": ("cpu", "cuda"),
}
_EXACT = dict.fromkeys(("norm", "softmax", "top_k_top_p"), ("cpu", "cuda"))
_EITHER = dict.fromkeys(("acceptance", "all_reduce", "kv_cache", "ranking"), ("cpu", "cuda"))
"""Operations that compare or store numbers, or add them in an order that is an argument."""
MODULES = {
    (operation, arithmetic, device_type): module.format(operation=operation, device_type=device_type)
    for arithmetic, module, operations in (
        ("float", ".{operation}.{device_type}", _FLOAT),
        ("exact", ".{operation}.{device_type}", _EITHER),
        ("exact", ".exact.{device_type}", _EXACT),
        ("exact", ".exact.{device_type}_experts", {"moe": ("cpu",)}),
    )
    for operation, device_types in operations.items()
    for device_type in device_types
}
"""The module, relative to this package, of each (operation, arithmetic, device type) that is implemented; devices that
joined name their own. Attention, which has several implementations on a device, has a table of its own.
"""
_arithmetic = "float"

_IN_WORDS = {"reduce": "sums and means", "acceptance": "speculative decoding", "moe": "mixtures of experts"}
"""What users call some operations."""


def choose(arithmetic: str) -> None:
    """Have this process compute in an arithmetic, "float" or "exact": a worker chooses once, before it has a model."""
    global _arithmetic
    _arithmetic = arithmetic


def arithmetic() -> str:
    """The arithmetic of this process."""
    return _arithmetic


class _Undefined(ModuleType):
    """In the place of an operation that an arithmetic does not define: a call of any of its functions refuses."""

    def __getattr__(self, function: str) -> Callable[..., NoReturn]:
        def refuse(*_: object, **__: object) -> NoReturn:
            raise NotCovered(
                f"{function} of floats in exact arithmetic",
                "the order of its sum is not defined there",
                "serve a model made of layers that are, or leave VLLM_BATCH_INVARIANT_ARITHMETIC out",
            )

        return refuse


def module_for(operation: str, device_type: str) -> ModuleType:
    """The module that implements ``operation`` on a device type, with no regard to autograd. Where the arithmetic of
    this process does not define the operation, its functions raise :class:`~.errors.NotCovered`.

    Raises:
        NotCovered: no implementation for the device, or its package is missing.
    """
    return _module(operation, _arithmetic, device_type)


@cache
def _module(operation: str, arithmetic: str, device_type: str) -> ModuleType:
    modules = MODULES | {
        (name, "float", device.type): module
        for device in devices.joined().values()
        for name, module in device.operations.items()
    }
    device_types = [device for name, kind, device in modules if (name, kind) == (operation, "float")]
    if device_type not in device_types:
        raise NotCovered(
            f"{operation} on device '{device_type}'",
            f"this version implements it for {', '.join(device_types)} only",
            "move the tensors there, or leave the mode off",
        )
    name = modules.get((operation, arithmetic, device_type))
    if name is None:
        return _Undefined(operation)
    try:
        return import_module(name, __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] in (__package__.split(".")[0], name.split(".")[0]):
            raise
        raise NotCovered(
            f"{_IN_WORDS.get(operation, operation)} on device '{device_type}'",
            f"the package '{error.name}' is not installed",
            "pip install numba"
            if error.name == "numba"
            else devices.get(device_type).install or how_to_install(device_type),
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

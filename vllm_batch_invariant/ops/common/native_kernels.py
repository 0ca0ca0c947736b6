"""PyTorch's own kernels, taken before an override can stand in their place, so that an implementation can call what it
replaces.
"""

from collections.abc import Callable
from functools import cache, partial

import torch

from ...errors import NotCovered
from .. import devices


@cache
def keep(name: str, key: str) -> Callable[..., torch.Tensor]:
    """The kernel of ``aten::name`` at a dispatch key as it is at the first call; every override calls this before it
    registers. Without one, a function that refuses.
    """
    try:
        boxed = torch.library.get_kernel(f"aten::{name}", key)
    except RuntimeError:
        return partial(_absent, name)
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return lambda *args, **kwargs: boxed.call_boxed(keyset, *args, **kwargs)


def _absent(name: str, *args: object, **kwargs: object) -> torch.Tensor:  # noqa: ARG001 - any operator's
    raise NotCovered(f"{name} of these operands", "the device has no kernel for it", "compute it on the CPU")


def kernel(name: str, tensor: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The kernel of ``aten::name`` for the device of ``tensor``, below autograd."""
    return keep(name, devices.get(tensor.device.type).dispatch_key)


def exists(qualified: str, key: str) -> bool:
    """Whether an operator, named with its namespace and overload, has a kernel of its own at a dispatch key."""
    return torch._C._dispatch_has_kernel(qualified) and torch._C._dispatch_has_kernel_for_dispatch_key(qualified, key)

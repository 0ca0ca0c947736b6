"""PyTorch's own kernels, taken before an override can stand in their place, so that an implementation can call what it
replaces.
"""

from collections.abc import Callable
from functools import cache

import torch


@cache
def keep(name: str, key: str) -> Callable[..., torch.Tensor]:
    """The kernel of ``aten::name`` at a dispatch key as it is at the first call; every override calls this before it
    registers.
    """
    boxed = torch.library.get_kernel(f"aten::{name}", key)
    keyset = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
    return lambda *args, **kwargs: boxed.call_boxed(keyset, *args, **kwargs)


def kernel(name: str, tensor: torch.Tensor) -> Callable[..., torch.Tensor]:
    """The kernel of ``aten::name`` for the device of ``tensor``, below autograd."""
    return keep(name, tensor.device.type.upper())

"""Runs a numba kernel over rows on the threads that PyTorch uses; which thread takes which row moves no bit."""

from collections.abc import Callable

import numba
import torch

from .numba_compile import compiled, threads

_SERIAL_BELOW = 1 << 14
"""Elements under which waking threads costs more than they save."""


class RowKernel:
    """One Python kernel compiled twice, for one thread and for many: the same operations in the same order for every
    row.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.serial = compiled(function)
        self.parallel = compiled(function, parallel=True)

    def __call__(self, elements: int, *tensors_and_numbers: torch.Tensor | float | int) -> None:
        """Call on tensors (numpy arrays to the kernel) and numbers; ``elements`` is the size of the work."""
        arguments = [
            value.detach().numpy() if isinstance(value, torch.Tensor) else value for value in tensors_and_numbers
        ]
        if elements < _SERIAL_BELOW or threads() == 1:
            self.serial(*arguments)
            return
        numba.set_num_threads(threads())
        self.parallel(*arguments)

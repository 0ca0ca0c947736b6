"""Compiles the CPU kernels, with a cache where numba finds a folder to write to, and runs them over rows on the threads
that PyTorch uses; which thread takes which row moves no bit.
"""

import logging
import os
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

if "numba" not in sys.modules:
    # In a process bound to one core numba would start one thread; its pool must hold as many as PyTorch's.
    os.environ.setdefault("NUMBA_NUM_THREADS", str(max(torch.get_num_threads(), os.cpu_count() or 1)))

import numba
import numpy as np
from llvmlite.binding import ffi
from numba import types
from numba.core.caching import FunctionCache
from numba.extending import intrinsic

from ... import sources

logger = logging.getLogger("vllm.batch_invariant")
_COMPILED = "ops"
"""Modules of which any may be compiled into a kernel."""
_SERIAL_BELOW = 1 << 14
"""Elements under which waking threads costs more than they save."""

if hasattr(type(ffi.lib), "_fntab"):
    # vLLM 0.32 looks for kernels in the __dict__ of every module's values; llvmlite's library makes a function of the
    # name, and an engine would not start in a process where another has.
    ffi.lib._fntab.setdefault("__dict__", {})

if numba.config.THREADING_LAYER_PRIORITY == ["tbb", "omp", "workqueue"]:
    # OpenMP first: where PyTorch shares its library, the threads are PyTorch's own, already bound to their cores.
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def compiled(function: Callable[..., Any], parallel: bool = False) -> Callable[..., Any]:
    """The function compiled without fast-math: its additions happen in the order in which they are written."""
    dispatcher = numba.njit(error_model="numpy", parallel=parallel)(function)
    try:
        dispatcher._cache = _Cache(function, parallel)  # as cache=True does
    except RuntimeError:  # neither the package nor the user's cache folder can be written to
        logger.info("The kernel %s is compiled at every start: numba finds no folder for its cache.", function.__name__)
    return dispatcher


class _Cache(FunctionCache):
    """numba's cache of a kernel's machine code, with three differences: code made of other sources of this package is
    not taken, where numba looks only at the file of the kernel itself and not at those of functions that it calls; code
    for one thread and for many are two, where numba takes whichever was kept first for both; and what cannot be read or
    written is compiled again with a warning, where numba raises.
    """

    def __init__(self, function: Callable[..., Any], parallel: bool) -> None:
        super().__init__(function)
        self._name, self._parallel = function.__name__, parallel
        self._cache_file._source_stamp = (self._cache_file._source_stamp, sources.digest(_COMPILED))

    def _index_key(self, *arguments: Any) -> tuple[Any, ...]:
        return *super()._index_key(*arguments), self._parallel

    def load_overload(self, *arguments: Any) -> Any:
        try:
            return super().load_overload(*arguments)
        except Exception as error:  # whatever unpickling a broken file raises
            logger.warning(
                "The kernel %s is compiled again, its cache in %s is broken: %r", self._name, self.cache_path, error
            )
            self._try(self.flush)
        return None

    def save_overload(self, *arguments: Any) -> None:
        self._try(super().save_overload, *arguments)

    def _try(self, write: Callable[..., None], *arguments: Any) -> None:
        try:
            write(*arguments)
        except OSError as error:
            logger.warning("The kernel %s is compiled at every start, its cache is not written: %s", self._name, error)


@intrinsic
def _pointer(typing_context, address):  # noqa: ARG001 - numba's
    def codegen(context, builder, signature, arguments):  # noqa: ARG001
        return builder.inttoptr(arguments[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.intp), codegen


@numba.njit
def array_at(address, size, like):
    """So many elements of the dtype of an array, side by side from an address on. A kernel that takes ``data_ptr()`` is
    called in a fraction of the time that PyTorch takes to make arrays of its tensors.
    """
    return numba.carray(_pointer(address), (size,), like.dtype)


ELEMENTS = {
    torch.bfloat16: np.empty(0, np.uint16),
    torch.float32: np.empty(0, np.float32),
    torch.float64: np.empty(0, np.float64),
}
"""What :func:`array_at` has elements like, of each dtype of a tensor."""


def threads() -> int:
    """How many threads a parallel kernel may use: PyTorch's number, as far as numba's pool goes."""
    return min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)


@cache
def _start_pool() -> None:
    """Have numba start its pool, which tells OpenMP that PyTorch, too, has as many threads as the machine has cores."""
    of_torch = torch.get_num_threads()
    numba.set_num_threads(1)
    torch.set_num_threads(of_torch)


def use_threads(count: int) -> None:
    """Have the next parallel kernel use so many; PyTorch keeps its own number."""
    _start_pool()
    numba.set_num_threads(count)


class RowKernel:
    """One Python kernel compiled twice, for one thread and for many: the same operations in the same order for every
    row.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.serial = compiled(function)
        self.parallel = compiled(function, parallel=True)

    def __call__(self, elements: int, *tensors_and_numbers: torch.Tensor | np.ndarray | float) -> None:
        """Call on tensors (numpy arrays to the kernel) and numbers; ``elements`` is the size of the work."""
        arguments = [
            value.detach().numpy() if isinstance(value, torch.Tensor) else value for value in tensors_and_numbers
        ]
        if elements < _SERIAL_BELOW or threads() == 1:
            self.serial(*arguments)
            return
        use_threads(threads())
        self.parallel(*arguments)

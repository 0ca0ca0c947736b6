"""Compiles the CPU kernels, with threads like PyTorch's and a cache where numba finds a folder to write to."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

if "numba" not in sys.modules:
    # In a process bound to one core numba would start one thread; its pool must hold as many as PyTorch's.
    os.environ.setdefault("NUMBA_NUM_THREADS", str(max(torch.get_num_threads(), os.cpu_count() or 1)))

import numba

if numba.config.THREADING_LAYER_PRIORITY == ["tbb", "omp", "workqueue"]:
    # OpenMP first: where PyTorch shares its library, the threads are PyTorch's own, already bound to their cores.
    numba.config.THREADING_LAYER_PRIORITY = ["omp", "tbb", "workqueue"]


def compiled(function: Callable[..., Any], parallel: bool = False) -> Callable[..., Any]:
    """The function compiled without fast-math: its additions happen in the order in which they are written."""
    options = {"error_model": "numpy", "parallel": parallel}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # neither the package nor the user's cache folder can be written to
        return numba.njit(**options)(function)


def threads() -> int:
    """How many threads a parallel kernel may use: PyTorch's number, as far as numba's pool goes."""
    return min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS)

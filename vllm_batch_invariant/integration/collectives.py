"""Collectives between the workers of one model: floating-point numbers are added by the mode's all-reduce, or not at
all. Whatever else they do moves data.
"""

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import torch.distributed

from ..errors import NotCovered
from ..ops.all_reduce import add_ranks
from . import patch_points

_ADDING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
"""Functions of torch.distributed that may add."""


def install_cpu() -> None:
    """Have workers on CPUs add what each has computed, in the order of their ranks."""
    communicator = patch_points.CPU_COMMUNICATOR.get()
    theirs = communicator.all_reduce

    def all_reduce(self: Any, input_: torch.Tensor) -> torch.Tensor:
        """vLLM's method, which replaces the argument's values."""
        if not input_.is_floating_point():
            return theirs(self, input_)
        partials = self.all_gather(input_.contiguous().unsqueeze(0), 0)  # [ranks, ...]
        return input_.copy_(add_ranks(partials))

    communicator.all_reduce = all_reduce


def refuse_other_sums() -> None:
    """Have PyTorch's collectives refuse to add floating-point numbers of the workers of tensor parallelism: in which
    order they would, follows the size of a message. A trainer in the same process has groups of its own.
    """
    for name in _ADDING:
        setattr(torch.distributed, name, without_sums(getattr(torch.distributed, name)))


def _is_shared(group: Any) -> bool:
    """Whether it is vLLM's tensor-parallel group, of several workers."""
    shared = patch_points.TENSOR_PARALLEL.get()
    return shared is not None and shared.world_size > 1 and group in (shared.device_group, shared.cpu_group)


def without_sums(collective: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch.distributed that raises where it would add floating-point numbers.

    Raises:
        NotCovered: by the function, in vLLM's tensor-parallel group of several workers.
    """
    signature = inspect.signature(collective)

    @wraps(collective)
    def only_exact(*args: Any, **named: Any) -> Any:
        call = signature.bind(*args, **named)
        call.apply_defaults()
        [tensor, *_], operation = call.args, call.arguments["op"]
        exact = operation in (torch.distributed.ReduceOp.MIN, torch.distributed.ReduceOp.MAX)
        if tensor.is_floating_point() and not exact and _is_shared(call.arguments["group"]):
            raise NotCovered(
                f"{collective.__name__} of {str(tensor.dtype).removeprefix('torch.')} by PyTorch",
                "in which order it adds follows the size of the message",
                "serve a model whose layers reduce in vLLM's tensor-parallel group",
            )
        return collective(*args, **named)

    return only_exact

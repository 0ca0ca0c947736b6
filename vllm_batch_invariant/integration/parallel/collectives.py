"""Collectives between the workers of one model: floating-point numbers are added by the mode's all-reduce, or not at
all. Whatever else they do moves data.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
import torch.distributed

from ...errors import NotCovered
from ...ops.all_reduce import add_ranks
from ..reviews import patch_points
from ..side_table import beside

_ADDING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
"""Functions of torch.distributed that may add."""
_ADDING_IN_NCCL = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatterv")
"""Methods of vLLM's wrapper of NCCL that may; the second came later."""
_LAYERS = "tp"
"""What vLLM calls the group of workers that share each layer."""


def install_cpu(tree: bool) -> None:
    """Have workers on CPUs add what each has computed, in the order of their ranks or as a tree."""
    communicator = patch_points.CPU_COMMUNICATOR.get()
    original = communicator.all_reduce

    def all_reduce(self: Any, input_: torch.Tensor) -> torch.Tensor:
        """vLLM's method, which replaces the argument's values."""
        if not input_.is_floating_point():
            return original(self, input_)
        partials = self.all_gather(input_.contiguous().unsqueeze(0), 0)  # [ranks, ...]
        return input_.copy_(add_ranks(partials, tree))

    communicator.all_reduce = all_reduce


def install_cuda(tree: bool) -> None:
    """Have workers on GPUs do so, through memory that all of them see; NCCL adds no floating-point numbers."""
    communicator = patch_points.CUDA_COMMUNICATOR.get()
    make, original = communicator.__init__, communicator.all_reduce

    def __init__(self: Any, *args: Any, **named: Any) -> None:  # noqa: N807 - Python's
        make(self, *args, **named)
        if self.world_size > 1 and self.unique_name.split(":")[0] == _LAYERS:
            from ...ops.all_reduce.cuda import AllReduce
            from ...ops.all_reduce.peers import symmetric_peers

            beside(self).all_reduce = AllReduce(
                self.world_size, symmetric_peers(self.device_group, self.device), tree=tree
            )

    def all_reduce(self: Any, input_: torch.Tensor) -> torch.Tensor:
        """vLLM's method, which gives a new tensor."""
        ours = beside(self).all_reduce
        return ours(input_) if ours and input_.is_floating_point() else original(self, input_)

    scatter = communicator.reduce_scatterv

    def reduce_scatterv(
        self: Any, input_: torch.Tensor, dim: int = -1, sizes: Sequence[int] | None = None
    ) -> torch.Tensor:
        """vLLM's method, by which engines get what all of them made of their tokens: the rows of this rank, added."""
        if not input_.is_floating_point() or dim != 0:
            return scatter(self, input_, dim, sizes)
        rows = list(sizes) if sizes else [len(input_) // self.world_size] * self.world_size
        partials = self.all_gather(input_.contiguous().unsqueeze(0), 0)  # [ranks, rows of all, ...]
        mine = partials.split(rows, dim=1)[self.rank_in_group]
        return add_ranks(mine.contiguous(), tree)

    communicator.__init__, communicator.all_reduce = __init__, all_reduce
    communicator.reduce_scatterv = reduce_scatterv
    nccl = patch_points.NCCL.get()
    make_nccl = nccl.__init__

    def warmed_up(self: Any, *args: Any, **named: Any) -> None:
        make_nccl(self, *args, **named)
        beside(self).is_made = True  # before, it adds a zero to see that it works

    nccl.__init__ = warmed_up
    for name in _ADDING_IN_NCCL:
        if hasattr(nccl, name):
            method = without_sums(getattr(nccl, name), lambda call: beside(call["self"]).is_made)
            setattr(nccl, name, method)


def rows_of_all(rows: torch.Tensor) -> torch.Tensor:
    """Rows of which each is at one worker of tensor parallelism, and 0 at the others, at all of them: their bits are
    joined, and nothing is added.

    Args:
        rows: [..., N] of 4 bytes a number, or of 2 with an even N.
    """
    gathered = patch_points.TENSOR_PARALLEL.get().all_gather(rows.contiguous().unsqueeze(0), 0)
    first, *others = gathered.view(torch.int32).unbind(0)
    for one in others:
        first = first | one
    return first.view(rows.dtype)


def refuse_other_sums() -> None:
    """Have PyTorch's collectives refuse to add floating-point numbers of the workers of tensor parallelism: in which
    order they would, follows the size of a message. A trainer in the same process has groups of its own.
    """
    for name in _ADDING:
        collective = without_sums(getattr(torch.distributed, name), lambda call: _is_shared(call["group"]))
        setattr(torch.distributed, name, collective)


def _is_shared(group: Any) -> bool:
    """Whether it is vLLM's tensor-parallel group, of several workers."""
    shared = patch_points.TENSOR_PARALLEL.get()
    return shared is not None and shared.world_size > 1 and group in (shared.device_group, shared.cpu_group)


def without_sums(collective: Callable[..., Any], is_of_layers: Callable[[dict[str, Any]], bool]) -> Callable[..., Any]:
    """A collective that raises where it would add floating-point numbers.

    Args:
        collective: a function of torch.distributed, or a method; its operation is called ``op``.
        is_of_layers: whether a call, by the names of its arguments, is between the workers of tensor parallelism.

    Raises:
        NotCovered: by the collective.
    """
    signature = inspect.signature(collective)

    @wraps(collective)
    def only_exact(*args: Any, **named: Any) -> Any:
        call = signature.bind(*args, **named)
        call.apply_defaults()
        operation = call.arguments["op"]
        tensor = next(value for value in call.args if isinstance(value, torch.Tensor))
        exact = operation in (torch.distributed.ReduceOp.MIN, torch.distributed.ReduceOp.MAX)
        if tensor.is_floating_point() and not exact and is_of_layers(call.arguments):
            raise NotCovered(
                f"{collective.__name__} of {str(tensor.dtype).removeprefix('torch.')} by PyTorch or NCCL",
                "in which order it adds follows the size of the message",
                "serve a model whose layers reduce by vLLM's all_reduce",
            )
        return collective(*args, **named)

    return only_exact

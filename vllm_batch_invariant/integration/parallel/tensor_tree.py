"""The same bits with 1, 2, 4 or 8 tensor-parallel workers: what one worker adds alone, and several together, is one
tree. :data:`~vllm_batch_invariant.envs.TP_TREE` says of how many slices; exact arithmetic always has one, of sums that
are rounded once, at its root.

Layers whose K workers share add it in that many slices, and a worker's partial result is the sum of a subtree. A column
of the other layers has the same bits in every part of its layer.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ... import envs
from ...errors import NotCovered
from ..reviews import patch_points
from ..side_table import beside

if TYPE_CHECKING:
    import torch

SLICE_STEP = 16
"""A slice of K has a multiple of so many elements, as many as a tensor core adds at once."""


def k_slices() -> int:
    """Of the tree; 1: there is none, or only that of exact arithmetic."""
    return int(envs.TP_TREE.read())


def setting() -> dict[str, str]:
    """What of it decides bits, as an engine or a trainer describes itself."""
    return {"tensor_parallel_tree": str(k_slices())} if k_slices() > 1 else {}


def of_layer(layer: "torch.nn.Module") -> int:
    """Slices that a linear layer or an output embedding adds this worker's K in.

    Raises:
        NotCovered: its sizes cannot be cut into the slices of the tree.
    """
    workers = getattr(layer, "tp_size", 1)
    if k_slices() == 1 or isinstance(layer, patch_points.REPLICATED.get()):
        return 1
    if isinstance(layer, patch_points.ROW_PARALLEL.get()):
        return of_inputs(layer.input_size, layer.prefix, workers)
    sizes = getattr(layer, "output_partition_sizes", None) or [layer.num_embeddings_per_partition]
    check_outputs([size * workers for size in sizes], getattr(layer, "prefix", "the embedding"))
    return 1


def of_inputs(k: int, name: str, workers: int = 1) -> int:
    """Slices of a worker's part of a layer whose K inputs the workers share.

    Args:
        name: of the layer, in messages.
        workers: that there are.

    Raises:
        NotCovered: they cannot be cut into the slices of the tree.
    """
    most = k_slices()
    if most == 1:
        return 1
    if k % (SLICE_STEP * most):
        raise _not_divisible(f"the {k} inputs of {name}", most)
    return most // workers


def check_outputs(sizes: Sequence[int], name: str) -> None:
    """Refuse a layer that not every number of workers of the tree can share.

    Args:
        sizes: outputs of each of the layers that it is merged of, of all workers.
        name: of the layer, in messages.

    Raises:
        NotCovered: a tree, and they cannot be cut into as many equal parts.
    """
    most = k_slices()
    for size in sizes:
        if size % most:
            raise _not_divisible(f"{size} outputs of {name}", most)


def _not_divisible(what: str, most: int) -> NotCovered:
    return NotCovered(
        f"{envs.TP_TREE.name}={most} for {what}",
        "they cannot be cut into so many equal parts",
        "take a smaller tree, or leave it out",
    )


def install(finish: "Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]") -> None:
    """Have row-parallel layers finish the whole sum, as no one worker does it.

    Args:
        finish: makes a layer's output of the sum over all workers, and of its bias, if it adds one.
    """
    layer = patch_points.ROW_PARALLEL.get()
    original = layer.forward

    def forward(self: Any, input_: "torch.Tensor") -> Any:
        """vLLM's method."""
        if not self.reduce_results and not beside(self).norm_adds:
            raise NotCovered(
                f"a tree of partial results in {self.prefix}",
                "its partial results are added to others before the workers add theirs",
                f"leave out {envs.TP_TREE.name}, and {envs.ARITHMETIC.name}",
            )
        bias_is_returned, self.skip_bias_add = self.skip_bias_add, True
        try:
            found = original(self, input_)
        finally:
            self.skip_bias_add = bias_is_returned
        total, bias = found if self.return_bias else (found, self.bias)
        output = finish(total, None if bias_is_returned else bias)
        return (output, bias if bias_is_returned else None) if self.return_bias else output

    layer.forward = forward


def defer_sum(layer: Any) -> None:
    """Have a row-parallel layer give its worker's partial result, which the norm behind it adds to the others'."""
    layer.reduce_results = False
    beside(layer).norm_adds = True


def whole_sums(shared_experts: "torch.nn.Module | None") -> None:
    """Have the row-parallel layers of a layer's shared experts give the sum over all workers, if there are any: a gate
    and a factor round it, and it is added to what routed experts make, which is whole, too.

    Args:
        shared_experts: vLLM's layer of them, or None.
    """
    if shared_experts is None:
        return
    for layer in shared_experts.modules():
        if isinstance(layer, patch_points.ROW_PARALLEL.get()):
            layer.reduce_results = True
    shared_experts._stream = None  # a GPU's second one, where sums could wait for the exchange of rows on the first


def with_bias(total: "torch.Tensor", bias: "torch.Tensor | None") -> "torch.Tensor":
    """A layer's output under :data:`~vllm_batch_invariant.envs.TP_TREE`, whose nodes are rounded."""
    return total if bias is None else total + bias

"""Views of a tensor as rows to reduce: the reduced dimensions last and contiguous, everything else one index."""

import math

import torch


def normalise_dims(dims: int | list[int] | tuple[int, ...] | None, rank: int) -> list[int]:
    """Dimension indices as non-negative numbers, ascending; None or nothing means all.

    Raises:
        IndexError: a dimension out of range, with PyTorch's wording.
        RuntimeError: a dimension named twice.
    """
    if dims is None or (isinstance(dims, list | tuple) and len(dims) == 0):
        return list(range(rank))
    wanted = [dims] if isinstance(dims, int) else list(dims)
    extent = max(rank, 1)
    for dim in wanted:
        if not -extent <= dim < extent:
            raise IndexError(
                f"Dimension out of range (expected to be in range of [{-extent}, {extent - 1}], but got {dim})"
            )
    found = sorted(dim % extent for dim in wanted)
    if len(set(found)) != len(found):
        raise RuntimeError(f"dim {wanted} appears multiple times in the list of dims")
    return found if rank else []


def row_length(x: torch.Tensor, dims: list[int]) -> int:
    """Elements of a row over ``dims``."""
    return math.prod(x.shape[dim] for dim in dims)


def as_rows(x: torch.Tensor, dims: list[int], dtype: torch.dtype) -> torch.Tensor:
    """x with ``dims`` moved last, as a contiguous [rows, row length] in ``dtype``."""
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    rows = math.prod(x.shape[dim] for dim in kept)
    return x.permute([*kept, *dims]).reshape(rows, row_length(x, dims)).to(dtype).contiguous()


def from_rows(reduced: torch.Tensor, like: torch.Tensor, dims: list[int], keepdim: bool) -> torch.Tensor:
    """One value a row, back in the shape that reducing ``like`` over ``dims`` has."""
    shape = [1 if dim in dims else size for dim, size in enumerate(like.shape)]
    if not keepdim:
        shape = [size for dim, size in enumerate(like.shape) if dim not in dims]
    return reduced.reshape(shape)


def rows_back(rows: torch.Tensor, like: torch.Tensor, dims: list[int]) -> torch.Tensor:
    """Whole rows of :func:`as_rows`, back in the shape of ``like``."""
    kept = [dim for dim in range(like.dim()) if dim not in dims]
    order = [*kept, *dims]
    inverse = [order.index(dim) for dim in range(like.dim())]
    return rows.reshape([like.shape[dim] for dim in order]).permute(inverse)


def with_packed_rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, copied if a row's elements do not lie side by side."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()

"""The candidates of a row, in one order: the higher value first, and of equal values the lower index."""

import torch

from ..dispatch import implementation

__all__ = ["first", "top_and_ranks"]


def first(values: torch.Tensor) -> torch.Tensor:
    """The first index of each row in that order.

    Args:
        values: [rows, length] fp32, bf16 or fp16, of one value or more.

    Returns:
        [rows] int64.

    Raises:
        NotCovered: a device without an implementation.
    """
    return implementation("ranking", values).first(values)


def top_and_ranks(values: torch.Tensor, count: int, chosen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The first ``count`` indices of each row in that order, and the rank of one given index in it.

    Both follow from the row alone: the first 5 of a row are the beginning of its first 20. -0.0 and 0.0 are equal, and
    NaN is the largest value.

    Args:
        values: [rows, length] fp32, bf16 or fp16.
        count: 0 to length.
        chosen: [rows] integers, each an index of its row.

    Returns:
        [rows, count] int64, and [rows] int64 of 1 to length.

    Raises:
        ValueError: ``count`` is not a number of a row's values.
        IndexError: an index outside the row, on a CPU. On a GPU its rank means nothing.
        NotCovered: a device without an implementation.
    """
    if not 0 <= count <= values.shape[1]:
        raise ValueError(f"a row of {values.shape[1]} values has no first {count}")
    return implementation("ranking", values, chosen).top_and_ranks(values, count, chosen)

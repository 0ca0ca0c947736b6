"""What no implementation of exact arithmetic computes, because it has no definition."""

from ...errors import NotCovered
from .definition import LARGEST_K

LEAVE_IT = "leave VLLM_BATCH_INVARIANT_ARITHMETIC out"
"""What to do about any of it."""


def check_k(k: int) -> None:
    """Refuse a product over too many elements.

    Raises:
        NotCovered: more than :data:`.definition.LARGEST_K`.
    """
    if k > LARGEST_K:
        raise NotCovered(
            f"a product over {k} elements in exact arithmetic", f"the sums of {LARGEST_K} fit an int32", LEAVE_IT
        )


def check_whole_rows(variance_size: int | None, length: int) -> None:
    """Refuse a norm of rows of ``length`` elements whose mean of squares is not of all of them.

    Raises:
        NotCovered: it is of ``variance_size`` others.
    """
    if variance_size not in (None, length):
        raise NotCovered("the mean of squares of a part of a row", "it has no definition in exact arithmetic", LEAVE_IT)

"""What the mode replaces on a GPU keeps a row's bits; ``python -m tests.aten.operator_cases`` has all cases."""

import pytest

from tests.aten.operator_cases import measure
from vllm_batch_invariant import batch_invariant_mode

COVERED = (
    "sum", "mean", "nansum", "nanmean", "prod", "cumprod", "cumsum", "logsumexp", "var", "std", "var_mean", "std_mean",
    "vector_norm", "vector_norm, 1", "vector_norm, 3", "norm", "normalize", "softmax", "log_softmax", "linear", "bmm",
    "cdist", "cdist, to many", "cdist, by matmul",
)  # fmt: skip


@pytest.mark.parametrize("name", COVERED)
def test_a_row_has_the_same_bits_whatever_the_batch(name: str) -> None:
    with batch_invariant_mode():
        ran, found = measure(name, "cuda")
    assert ran
    assert found == []

"""softmax and log_softmax: right, and with the same bits for a row whatever other rows there are."""

import pytest
import torch

from tests.assertions import DTYPES, ROW_COUNTS, assert_near, assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import softmax as operation
from vllm_batch_invariant.ops.softmax import reference

FUNCTIONS = ("softmax", "log_softmax")


def logits(rows: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, length, generator=torch.Generator().manual_seed(length)) * 4).to(dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 63, 65, 1000])
def test_a_row_has_the_same_bits_at_every_batch_size(length: int, dtype: torch.dtype, name: str) -> None:
    function = getattr(operation, name)
    x = logits(1000, length, dtype)
    whole = function(x, -1)
    for rows in ROW_COUNTS:
        assert_same_bits(function(x[1000 - rows :], -1), whole[1000 - rows :], f"{rows} rows")


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_vocabulary_row_has_the_same_bits_alone_and_on_any_number_of_threads(name: str, threads) -> None:
    function = getattr(operation, name)
    x = logits(5, 151_936, torch.float32)
    whole = function(x)
    threads(1)
    for row in range(5):
        assert_same_bits(function(x[row : row + 1]), whole[row : row + 1])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_values_are_near_the_float64_reference(dim: int, dtype: torch.dtype, name: str) -> None:
    x = logits(6 * 40, 50, dtype).view(6, 40, 50)
    assert_near(getattr(operation, name)(x, dim), getattr(reference, name)(x, dim), factor=2)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_masked_infinite_and_nan_entries_are_those_of_pytorch(name: str) -> None:
    x = logits(6, 40, torch.float32)
    x[0, ::2] = -torch.inf
    x[1] = -torch.inf
    x[2, 3] = torch.inf
    x[3, 5] = torch.nan
    x[4, 7] = 1e4
    ours, stock = getattr(operation, name)(x), getattr(torch, name)(x, -1)
    assert_same_bits(ours.isnan(), stock.isnan())
    torch.testing.assert_close(ours, stock, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_the_result_can_be_wider_than_the_input() -> None:
    out = operation.softmax(logits(3, 9, torch.bfloat16), dtype=torch.float32)
    assert out.dtype == torch.float32


def test_fp64_is_refused_by_name() -> None:
    with pytest.raises(NotCovered, match="float64"):
        operation.softmax(torch.ones(3, dtype=torch.float64))

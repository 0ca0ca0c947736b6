"""Sum and mean: right, and with the same bits for a row whatever other rows there are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.assertions import DTYPES, ROW_COUNTS, assert_near, assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import reduce
from vllm_batch_invariant.ops.reduce import reference

LENGTHS = (1, 2, 63, 64, 65, 777, 4096)


def rows_of(length: int, dtype: torch.dtype, rows: int = 1000) -> torch.Tensor:
    return (torch.randn(rows, length, generator=torch.Generator().manual_seed(length)) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_has_the_same_bits_at_every_batch_size(length: int, dtype: torch.dtype) -> None:
    x = rows_of(length, dtype)
    whole = reduce.sum(x, -1)
    means = reduce.mean(x, -1)
    for rows in ROW_COUNTS:
        assert_same_bits(reduce.sum(x[1000 - rows :], -1), whole[1000 - rows :], f"{rows} rows")
        assert_same_bits(reduce.mean(x[:rows], -1), means[:rows], f"{rows} rows")


def test_one_long_row_has_the_bits_of_a_row_among_others() -> None:
    x = rows_of(150_000, torch.float32, rows=3)
    assert_same_bits(reduce.sum(x[:1], -1), reduce.sum(x, -1)[:1])


def test_the_stock_sum_of_one_long_row_fails_the_same_check(threads) -> None:
    threads(2)
    x = rows_of(150_000, torch.float32, rows=32)
    assert any(not torch.equal(x[row : row + 1].sum(-1), x.sum(-1)[row : row + 1]) for row in range(32))


def test_the_number_of_threads_moves_no_bit(threads) -> None:
    x = rows_of(777, torch.float32)
    threads(1)
    alone = reduce.sum(x, -1)
    threads(2)
    assert_same_bits(reduce.sum(x, -1), alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [None, 0, 1, 2, -1, [0, 2], [1, 2], [0, 1, 2], []])
@pytest.mark.parametrize("keepdim", [False, True])
def test_any_dimensions_are_near_the_float64_reference(dim, keepdim: bool, dtype: torch.dtype) -> None:
    x = (torch.randn(7, 65, 33, generator=torch.Generator().manual_seed(1)) + 1).to(dtype)
    for name in ("sum", "mean"):
        out = getattr(reduce, name)(x, dim, keepdim)
        expected = getattr(reference, name)(x, dim, keepdim)
        assert out.shape == expected.shape
        assert_near(out, expected)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 39))
def test_any_row_of_any_matrix_can_be_taken_out(rows: int, length: int, which: int) -> None:
    x = rows_of(length, torch.float32, rows)
    which %= rows
    assert_same_bits(reduce.sum(x[which : which + 1], 1), reduce.sum(x, 1)[which : which + 1])
    assert_same_bits(reduce.sum(x.t(), 0), reduce.sum(x, 1))


def test_empty_rows_sum_to_zero_and_have_no_mean() -> None:
    assert_same_bits(reduce.sum(torch.ones(3, 0), -1), torch.zeros(3))
    assert reduce.mean(torch.ones(3, 0), -1).isnan().all()
    assert reduce.sum(torch.tensor(2.5)).item() == 2.5


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(IndexError, match="out of range"):
        reduce.sum(torch.ones(3, 4), 2)
    with pytest.raises(RuntimeError, match="multiple times"):
        reduce.sum(torch.ones(3, 4), [1, -1])
    with pytest.raises(NotCovered, match="complex64"):
        reduce.sum(torch.ones(3, dtype=torch.complex64))

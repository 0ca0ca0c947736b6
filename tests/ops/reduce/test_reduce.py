"""Sum and mean: right, and with the same bits for a row whatever other rows there are."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.assertions import DTYPES, assert_near, assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import reduce
from vllm_batch_invariant.ops.reduce import reference

LENGTHS = (1, 2, 63, 64, 65, 777, 4096, 9001)


def rows_of(length: int, dtype: torch.dtype, rows: int = 1000) -> torch.Tensor:
    return (torch.randn(rows, length, generator=torch.Generator().manual_seed(length)) + 0.5).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_is_near_the_float64_reference_and_has_the_same_bits_at_every_batch_size(length, dtype, device):
    most = device.row_counts[-1]
    x = device.draw(most, length, dtype=dtype) + 0.5
    whole, means = reduce.sum(x, -1), reduce.mean(x, -1)
    assert_near(whole, reference.sum(x, -1))
    assert_near(means, reference.mean(x, -1))
    for rows in device.row_counts:
        assert_same_bits(reduce.sum(x[most - rows :], -1), whole[most - rows :], f"{rows} rows")
        assert_same_bits(reduce.mean(x[:rows], -1), means[:rows], f"{rows} rows")


@pytest.mark.parametrize("length", [65_536, 65_537, 151_936, 200_000])
def test_a_long_row_has_the_bits_of_a_row_among_others(length, device):
    x = device.draw(5, length)
    sums = reduce.sum(x, -1)
    for row in range(5):
        assert_same_bits(reduce.sum(x[row : row + 1], -1), sums[row : row + 1])


def test_the_stock_sum_of_one_long_row_fails_the_same_check(threads, device):
    threads(2)
    x = device.draw(64, 150_000)
    assert any(not torch.equal(x[row : row + 1].sum(-1), x.sum(-1)[row : row + 1]) for row in range(64))


def test_the_number_of_threads_moves_no_bit(threads) -> None:
    x = rows_of(777, torch.float32)
    threads(1)
    alone = reduce.sum(x, -1)
    threads(2)
    assert_same_bits(reduce.sum(x, -1), alone)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("dim", [None, 0, 1, 2, -1, [0, 2], [1, 2], [0, 1, 2], []])
@pytest.mark.parametrize("keepdim", [False, True])
def test_any_dimensions_are_near_the_float64_reference(keepdim, dim, dtype, device):
    shape = (2, 3, 5) if device.is_interpreted else (7, 65, 33)
    x = device.draw(*shape, dtype=dtype) + 1
    for name in ("sum", "mean"):
        out = getattr(reduce, name)(x, dim, keepdim)
        expected = getattr(reference, name)(x, dim, keepdim)
        assert out.shape == expected.shape
        if dtype == torch.float64:
            torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
        else:
            assert_near(out, expected)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 40), st.integers(1, 300), st.integers(0, 39))
def test_any_row_of_any_matrix_can_be_taken_out(rows: int, length: int, which: int) -> None:
    x = rows_of(length, torch.float32, rows)
    which %= rows
    assert_same_bits(reduce.sum(x[which : which + 1], 1), reduce.sum(x, 1)[which : which + 1])
    assert_same_bits(reduce.sum(x.t(), 0), reduce.sum(x, 1))


def test_empty_rows_sum_to_zero_and_have_no_mean(device):
    empty = torch.ones(3, 0, device=device.type)
    assert_same_bits(reduce.sum(empty, -1), torch.zeros(3, device=device.type))
    assert reduce.mean(empty, -1).isnan().all()
    assert reduce.sum(empty.t(), -1).shape == (0,)
    assert reduce.sum(torch.tensor(2.5, device=device.type)).item() == 2.5


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(IndexError, match="out of range"):
        reduce.sum(torch.ones(3, 4), 2)
    with pytest.raises(RuntimeError, match="multiple times"):
        reduce.sum(torch.ones(3, 4), [1, -1])
    with pytest.raises(NotCovered, match="complex64"):
        reduce.sum(torch.ones(3, dtype=torch.complex64))

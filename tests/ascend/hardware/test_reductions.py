"""sum and mean: a row has the same bits alone and in any batch, over any dimensions."""

import pytest
import torch

from tests.ascend.hardware.sweep import ROWS, assert_rows_keep_their_bits, draw
from tests.assertions import DTYPES, assert_same_bits
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.ops import reduce

NAMES = ("sum", "mean")
LENGTHS = (1, 63, 64, 777, 4096, 9001)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_has_the_same_bits_in_any_batch(length, dtype, name, device):
    x = draw(ROWS, length, dtype=dtype, device=device) + 0.5
    assert_rows_keep_their_bits(lambda rows: getattr(reduce, name)(rows, -1), x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [65_536, 65_537, 151_936, 200_000])
def test_a_long_row_has_the_same_bits_in_any_batch(length, name, device):
    x = draw(5, length, device=device)
    assert_rows_keep_their_bits(lambda rows: getattr(reduce, name)(rows, -1), x, counts=range(1, 5))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize("dim", [1, 2, -1, -3, [1, 2], [1, 3], [2, 3], [1, 2, 3]])
def test_an_entry_has_the_same_bits_in_any_batch_over_any_dimensions(dim, keepdim, name, device):
    x = draw(130, 7, 65, 33, device=device) + 0.5
    counts = (1, 2, 7, 64, 129)
    assert_rows_keep_their_bits(lambda entries: getattr(reduce, name)(entries, dim, keepdim), x, counts=counts)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_may_be_the_inner_dimension(name, device):
    x = draw(130, 777, device=device)
    assert_rows_keep_their_bits(lambda rows: getattr(reduce, name)(rows.t(), 0), x)
    assert_rows_keep_their_bits(lambda rows: getattr(reduce, name)(rows.t().contiguous(), 0), x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reductions_of_pytorch_keep_the_bits_of_a_row_in_the_mode(dtype, name, device):
    x = draw(ROWS, 777, dtype=dtype, device=device) + 0.5
    with batch_invariant_mode(), torch.no_grad():
        assert_rows_keep_their_bits(lambda rows: getattr(torch, name)(rows, -1), x)
        assert_rows_keep_their_bits(lambda rows: getattr(torch, name)(rows, 1, out=rows.new_zeros(len(rows))), x)
        assert_rows_keep_their_bits(lambda rows: getattr(rows.view(-1, 7, 111), name)((1, 2)), x)
        assert_rows_keep_their_bits(lambda rows: torch.logsumexp(rows, -1), x)


@pytest.mark.parametrize("name", NAMES)
def test_the_sum_of_everything_is_the_same_again(name, device):
    x = draw(300, 10_007, device=device) + 0.5
    first = getattr(reduce, name)(x)
    for _ in range(5):
        assert_same_bits(getattr(reduce, name)(x), first)


def test_more_rows_than_a_grid_of_65535(device):
    x = draw(70_001, 40, device=device)
    for name in NAMES:
        assert_same_bits(getattr(reduce, name)(x, -1)[-9:], getattr(reduce, name)(x[-9:], -1))


def test_empty_rows_sum_to_zero_and_have_no_mean(device):
    empty = torch.ones(3, 0, device=device)
    assert reduce.sum(empty, -1).tolist() == [0, 0, 0]
    assert reduce.mean(empty, -1).isnan().all()
    assert reduce.sum(empty.t(), -1).shape == (0,)
    assert reduce.sum(torch.tensor(2.5, device=device)).item() == 2.5

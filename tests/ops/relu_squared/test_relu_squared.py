"""``max(x, 0) ** 2``: rounded once, and with the same bits for an element wherever it lies."""

import pytest
import torch

from tests.assertions import DTYPES, assert_same_bits
from vllm_batch_invariant.ops.relu_squared import relu_squared


def expected(x: torch.Tensor) -> torch.Tensor:
    """In float64, where a square of each of these dtypes is exact; rounded once."""
    return x.double().relu().square().to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 96, 1024, 1025, 3000])
def test_results_are_those_of_float64_rounded_once(length, dtype, device):
    x = 4 * device.draw(3, length, dtype=dtype)
    assert_same_bits(relu_squared(x), expected(x))


@pytest.mark.parametrize("length", [77, 1216])
def test_a_row_has_the_same_bits_at_every_batch_size(length, device):
    most = device.row_counts[-1]
    x = device.draw(most, length, dtype=torch.bfloat16)
    whole = relu_squared(x)
    for rows in device.row_counts:
        last = slice(most - rows, None)
        assert_same_bits(relu_squared(x[last]), whole[last], f"{rows} rows")


def test_numbers_of_every_kind(device):
    x = torch.tensor([-torch.inf, -2.0, -0.0, 0.0, 3.0, 2e19, torch.inf, torch.nan]).to(device.type)
    assert relu_squared(x).tolist()[:7] == [0, 0, 0, 0, 9, torch.inf, torch.inf]
    assert relu_squared(x)[7].isnan()


def test_what_is_too_large_for_fp16_is_infinite(device):
    x = torch.tensor([-300.0, 200.0, 300.0], dtype=torch.float16).to(device.type)
    assert relu_squared(x).tolist() == [0, 40_000, torch.inf]


def test_any_dimensions_and_no_element(device):
    x = device.draw(2, 3, 20)
    assert_same_bits(relu_squared(x).view(6, 20), relu_squared(x.view(6, 20)))
    assert_same_bits(relu_squared(x.mT), relu_squared(x).mT)
    assert relu_squared(x[:0]).shape == (0, 3, 20)

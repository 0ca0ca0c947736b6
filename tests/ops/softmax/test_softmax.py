"""softmax and log_softmax: right, and with the same bits for a row whatever other rows there are."""

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import softmax as operation
from vllm_batch_invariant.ops.softmax import reference

FUNCTIONS = ("softmax", "log_softmax")
LONG = 16_385
"""One element more than a program on a GPU holds at once."""


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 63, 64, 65, 777, 4096, 9001])
def test_a_row_has_the_same_bits_at_every_batch_size(length, dtype, name, device):
    function, most = getattr(operation, name), device.row_counts[-1]
    x = device.draw(most, length, dtype=dtype) * 4
    whole = function(x, -1)
    for rows in device.row_counts:
        assert_same_bits(function(x[most - rows :], -1), whole[most - rows :], f"{rows} rows")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [LONG - 1, LONG, 151_936])
def test_a_long_row_has_the_same_bits_alone(length, dtype, name, device):
    function = getattr(operation, name)
    x = device.draw(5, length, dtype=dtype) * 4
    whole = function(x)
    for row in (0, 4):
        assert_same_bits(function(x[row : row + 1]), whole[row : row + 1])
    assert_same_bits(function(x.t()[:, 1:], 0), whole.t()[:, 1:])


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("length", [151_936])
def test_a_vocabulary_row_has_the_same_bits_on_any_number_of_threads(length, name, threads, device):
    function = getattr(operation, name)
    x = device.draw(2, length) * 4
    whole = function(x)
    threads(1)
    assert_same_bits(function(x), whole)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [0, 1, 2, -1])
def test_values_over_any_dimension_are_near_the_float64_reference(dim, dtype, name, device):
    x = device.draw(2, 3, 50, dtype=dtype) * 4
    assert_near(getattr(operation, name)(x, dim), getattr(reference, name)(x, dim), factor=2)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [63, 64, 77, 777, 4096, 9001, LONG - 1, LONG, 151_936])
def test_values_are_near_the_float64_reference(length, dtype, name, device):
    x = device.draw(2, length, dtype=dtype) * 4
    assert_near(getattr(operation, name)(x), getattr(reference, name)(x, -1), factor=2)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("length", [40, LONG])
def test_masked_infinite_and_nan_entries_are_those_of_pytorch(length, name, device):
    x = device.draw(7, length) * 4
    x[0, : length // 2] = -torch.inf  # whole chunks among them
    x[1] = -torch.inf
    x[2, 3] = torch.inf
    x[3, length - 1] = torch.nan
    x[4, 7] = 1e4
    x[5, 1:] = -torch.inf
    x[6] = torch.inf
    ours, stock = getattr(operation, name)(x), getattr(torch, name)(x, -1)
    assert_same_bits(ours.isnan(), stock.isnan())
    torch.testing.assert_close(ours, stock, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [1, 77, LONG - 1, LONG, 151_936])
def test_a_result_wider_than_the_input_has_the_bits_of_one_of_the_wide_row(length, dtype, device):
    x = device.draw(2, length, dtype=dtype) * 4
    for name in FUNCTIONS:
        function = getattr(operation, name)
        out = function(x, dtype=torch.float32)
        assert out.dtype == torch.float32
        assert_same_bits(out, function(x.float()), name)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("length", [77, 777, LONG, 20_011])
def test_gradients_are_near_those_of_float64_and_a_row_has_the_same_bits_alone(length, name, device):
    x, grad = device.draw(2, length) * 4, device.draw(2, length + 1, seed=1)[:, :length].contiguous() * 4
    wide = x.double().requires_grad_()
    getattr(torch, name)(wide, -1).backward(grad.double())
    backward, output = getattr(device.module("softmax"), f"{name}_backward"), getattr(operation, name)(x)
    ours = backward(grad, output, -1, torch.float32)
    # The sum of the gradients, which is not near 0, times a probability of the same relative error.
    assert_near(ours, wide.grad, factor=10)
    assert_same_bits(backward(grad[1:2], output[1:2], -1, torch.float32), ours[1:2])


def test_fp64_is_refused_by_name() -> None:
    with pytest.raises(NotCovered, match="float64"):
        operation.softmax(torch.ones(3, dtype=torch.float64))

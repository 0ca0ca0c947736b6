"""The gradient of ``silu(gate) * up``: right, and with the same bits for an element wherever it lies."""

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from vllm_batch_invariant.ops.silu_backward import silu_and_mul_backward


def expected(x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    """By PyTorch's autograd, in float64."""
    leaf = x.double().requires_grad_()
    gate, up = leaf.chunk(2, dim=-1)
    (torch.nn.functional.silu(gate) * up).backward(grad.double())
    return leaf.grad


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 96, 1024, 1025, 3000])
def test_gradients_are_near_those_of_float64(length, dtype, device):
    x, grad = 4 * device.draw(3, 2 * length, dtype=dtype), device.draw(3, length, dtype=dtype, seed=1)
    assert_near(silu_and_mul_backward(x, grad), expected(x, grad))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [77, 1216])
def test_a_row_has_the_same_bits_at_every_batch_size(length, dtype, device):
    most = device.row_counts[-1]
    x, grad = device.draw(most, 2 * length, dtype=dtype), device.draw(most, length, dtype=dtype, seed=1)
    whole = silu_and_mul_backward(x, grad)
    for rows in device.row_counts:
        last = slice(most - rows, None)
        assert_same_bits(silu_and_mul_backward(x[last], grad[last]), whole[last], f"{rows} rows")


def test_large_gates_of_either_sign_have_finite_gradients(device):
    x = torch.tensor([[-3e4, -100.0, 100.0, 3e4, 1.0, 1.0, 1.0, 1.0]]).to(device.type)
    found = silu_and_mul_backward(x, torch.ones(1, 4).to(device.type))
    assert_near(found, expected(x, torch.ones(1, 4).to(device.type)))


def test_any_dimensions_before_the_last_and_none_of_them(device):
    x, grad = device.draw(2, 3, 20), device.draw(2, 3, 10, seed=1)
    assert_same_bits(silu_and_mul_backward(x, grad).view(6, 20), silu_and_mul_backward(x.view(6, 20), grad.view(6, 10)))
    assert silu_and_mul_backward(x[:0], grad[:0]).shape == (0, 3, 20)

"""``silu(gate) * up``: right, and with the same bits for an element wherever it lies."""

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from vllm_batch_invariant.ops.silu import silu_and_mul


def expected(x: torch.Tensor) -> torch.Tensor:
    """In float64."""
    gate, up = x.double().chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 96, 1024, 1025, 3000])
def test_results_are_near_those_of_float64(length, dtype, device):
    x = 4 * device.draw(3, 2 * length, dtype=dtype)
    assert_near(silu_and_mul(x), expected(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [77, 1216])
def test_a_row_has_the_same_bits_at_every_batch_size(length, dtype, device):
    most = device.row_counts[-1]
    x = device.draw(most, 2 * length, dtype=dtype)
    whole = silu_and_mul(x)
    for rows in device.row_counts:
        last = slice(most - rows, None)
        assert_same_bits(silu_and_mul(x[last]), whole[last], f"{rows} rows")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_silu_is_rounded_before_it_is_multiplied(dtype, device):
    x = 4 * device.draw(40, 2 * 600, dtype=dtype)
    gate, up = x.float().chunk(2, dim=-1)
    silu = torch.nn.functional.silu(gate)
    at_once, rounded = (silu * up).to(dtype), (silu.to(dtype).float() * up).to(dtype)
    found = silu_and_mul(x)
    differ = (found != rounded).sum().item()
    assert differ <= 40, "exponentials may round otherwise"
    assert (found != at_once).sum().item() > 100 + differ


def test_large_gates_of_either_sign_and_nan(device):
    x = torch.tensor([[-3e4, -100.0, 100.0, 3e4, torch.nan, 1.0, 1.0, 1.0, 1.0, 1.0]]).to(device.type)
    found = silu_and_mul(x)
    assert_near(found[:, :4], expected(x)[:, :4])
    assert found[0, 4].isnan()


def test_any_dimensions_before_the_last_and_none_of_them(device):
    x = device.draw(2, 3, 20)
    assert_same_bits(silu_and_mul(x).view(6, 10), silu_and_mul(x.view(6, 20)))
    assert silu_and_mul(x[:0]).shape == (0, 3, 10)

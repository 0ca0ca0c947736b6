"""The GPU's softmax kernels in Triton's interpreter, on the CPU."""

import math

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from vllm_batch_invariant.ops.softmax import cuda as softmax
from vllm_batch_invariant.ops.softmax import reference as exact

HALF = torch.float16
"""The interpreter truncates to bf16."""
LONG = softmax.LONGEST_WHOLE + 1
FUNCTIONS = ("softmax", "log_softmax")


def draw(rows: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, length, generator=torch.Generator().manual_seed(length)) * 4).to(dtype)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF])
@pytest.mark.parametrize("length", [1, 77, LONG - 1, LONG])
def test_values_are_near_the_float64_reference_and_a_row_has_the_same_bits_alone(length, dtype, name):
    x = draw(2, length, dtype)
    function = getattr(softmax, name)
    whole = function(x, -1)
    if length > 1:
        assert_near(whole, getattr(exact, name)(x, -1), factor=2)
    assert_same_bits(function(x.t()[:, 1:], 0), whole.t()[:, 1:])
    if dtype == HALF:
        wide = function(x, -1, dtype=torch.float32)
        assert_same_bits(wide, function(x.float(), -1), "widened")


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("length", [40, LONG])
def test_masked_infinite_and_nan_entries_are_those_of_pytorch(length, name):
    x = draw(7, length)
    x[0, : length // 2] = -torch.inf  # whole chunks among them
    x[1] = -torch.inf
    x[2, 3] = torch.inf
    x[3, length - 1] = torch.nan
    x[4, 7] = 1e4
    x[5, 1:] = -torch.inf
    x[6] = torch.inf
    ours, stock = getattr(softmax, name)(x, -1), getattr(torch, name)(x, -1)
    assert_same_bits(ours.isnan(), stock.isnan())
    torch.testing.assert_close(ours, stock, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("length", [77, LONG])
def test_gradients_are_near_those_of_float64_and_a_row_has_the_same_bits_alone(length, name):
    x, grad = draw(2, length), draw(2, length + 1)[:, :length].contiguous()
    wide = x.double().requires_grad_()
    getattr(torch, name)(wide, -1).backward(grad.double())
    backward, output = getattr(softmax, f"{name}_backward"), getattr(softmax, name)(x, -1)
    ours = backward(grad, output, -1, torch.float32)
    # The sum of the gradients, which is not near 0, times a probability of the same relative error.
    assert_near(ours, wide.grad, factor=10)
    assert_same_bits(backward(grad[1:2], output[1:2], -1, torch.float32), ours[1:2])


def test_blocks_cover_short_rows_and_are_chunks_of_long_ones():
    for length in (1, 31, 4096, LONG - 1, LONG, 151_936, 262_144, 262_145, 10_000_000, 10**9):
        layout = softmax.layout_for(length)
        whole = length <= softmax.LONGEST_WHOLE
        assert layout.block >= length if whole else softmax.CHUNK <= layout.block <= softmax.LONGEST_WHOLE
        assert 32 * layout.warps <= layout.block == 2 ** int(math.log2(layout.block))
    assert softmax.layout_for(151_936).block == softmax.CHUNK

"""softmax and log_softmax on a GPU: many rows of a vocabulary."""

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from tests.ops.linear.cases import draw
from vllm_batch_invariant.ops import softmax as operation
from vllm_batch_invariant.ops.dispatch import module_for
from vllm_batch_invariant.ops.softmax import reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [16_385, 65_537, 151_936, 262_145])
def test_a_vocabulary_row_and_its_gradients_have_the_same_bits_at_every_batch_size(length, dtype):
    x, grad = draw(300, length, dtype=dtype) * 4, draw(300, length, dtype=dtype, seed=1)
    module = module_for("softmax", "cuda")
    for name in ("softmax", "log_softmax"):
        function, backward = getattr(operation, name), getattr(module, f"{name}_backward")
        whole = function(x)
        assert_near(whole[:5], getattr(reference, name)(x[:5], -1), factor=2)
        gradients = backward(grad, whole, -1, dtype)
        for rows in (1, 2, 3, 7, 16, 64, 299):
            last = slice(300 - rows, None)
            assert_same_bits(function(x[last]), whole[last], f"{name}, {rows} rows")
            assert_same_bits(backward(grad[last], whole[last], -1, dtype), gradients[last], f"{name}, {rows} rows")
        if dtype == torch.float32:  # the check can fail: the same terms in another order are another reduction
            assert not torch.equal(function(x.roll(1, -1)).roll(-1, -1), whole)


def test_more_rows_than_a_grid_axis_of_65535_have_their_bits():
    x = draw(70_001, 40)
    assert_same_bits(operation.softmax(x)[-9:], operation.softmax(x[-9:]))

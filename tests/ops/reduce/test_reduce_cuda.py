"""Sum and mean on a GPU: many rows."""

from tests.assertions import assert_near, assert_same_bits
from tests.ops.linear.cases import draw
from vllm_batch_invariant.ops import reduce
from vllm_batch_invariant.ops.reduce import reference


def test_the_sum_of_everything_is_chunked():
    x = draw(3_000, 10_007)
    assert_near(reduce.sum(x + 0.5), reference.sum(x + 0.5))
    assert_near(reduce.mean(x + 0.5), reference.mean(x + 0.5))


def test_more_rows_than_a_grid_axis_of_65535_have_their_bits():
    x = draw(70_001, 40)
    assert_same_bits(reduce.sum(x, -1)[-9:], reduce.sum(x[-9:], -1))

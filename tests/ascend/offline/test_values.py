"""In Triton's interpreter: values near float64, and the same bits for a row whatever other rows there are.

The interpreter adds as NumPy does and not as an NPU does. What it shows is that the kernels compute what they should,
and that nothing in a row's result follows the other rows, their number or its place among them.
"""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.ascend.offline import controls
from tests.ascend.offline.driver import CHIPS
from tests.ascend.offline.interpreter import interpreted
from tests.assertions import DTYPES, assert_near, assert_same_bits
from vllm_batch_invariant.ascend.ops import linear, norm, reduce, reductions, softmax
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.linear import reference as exact_linear
from vllm_batch_invariant.ops.linear.spec import BIASED
from vllm_batch_invariant.ops.norm import reference as exact_norm
from vllm_batch_invariant.ops.reduce import reference as exact_reduce
from vllm_batch_invariant.ops.softmax import reference as exact_softmax

ROWS = 41
"""More than one for each core of the smaller chip."""
PADDED_ROWS = 130
"""More than a tile of a product."""
SMALLER = (1, 2, 3, 15, 16, 17, 64, 100)
LENGTHS = (1, 100, 777, 9001)
MODULES = (linear, norm, reduce, softmax, controls)


@pytest.fixture(autouse=True)
def on_the_cpu(device):
    with interpreted(*MODULES):
        yield


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def assert_rows_keep_their_bits(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Compare ``function`` of all rows of x with that of them in another order, of one alone, and of several numbers of
    them that begin at other places.

    Returns:
        function(x)
    """
    whole, order = function(x), torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    assert_same_bits(function(x[order]), whole[order], "in another order")
    for rows in (rows for rows in SMALLER if rows < len(x)):
        start = 7 * rows % (len(x) - rows)
        part = slice(start, start + rows)
        assert_same_bits(function(x[part]), whole[part], f"{rows} rows from {start}")
    return whole


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_sums_are_near_float64_and_keep_their_bits(length, dtype):
    x = draw(ROWS, length, dtype=dtype) + 0.5
    assert_near(assert_rows_keep_their_bits(lambda x: reduce.sum(x, -1), x), exact_reduce.sum(x, -1))
    assert_near(assert_rows_keep_their_bits(lambda x: reduce.mean(x, -1), x), exact_reduce.mean(x, -1))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_softmaxes_are_near_float64_and_keep_their_bits(length, dtype, name):
    x = draw(ROWS, length, dtype=dtype) * 4
    out = assert_rows_keep_their_bits(lambda x: getattr(softmax, name)(x, -1), x)
    if length > 1:
        assert_near(out, getattr(exact_softmax, name)(x, -1), factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("length", [100, 896, 9001])
def test_norms_are_near_float64_and_keep_their_bits(length, residual, dtype):
    weight = draw(length, dtype=dtype)
    x, added = draw(ROWS, length, dtype=dtype), draw(ROWS, length, dtype=dtype, seed=1)
    if residual:
        both = torch.cat([x, added], 1)
        fused = assert_rows_keep_their_bits(
            lambda rows: torch.cat(norm.rms_norm(rows[:, :length], weight, 1e-6, rows[:, length:], None), 1), both
        )
        assert_same_bits(fused[:, length:], (x.float() + added.float()).to(dtype))
        assert_near(fused[:, :length], exact_norm.rms_norm(x.double() + added.double(), weight, 1e-6), factor=2)
    else:
        out = assert_rows_keep_their_bits(lambda x: norm.rms_norm(x, weight, 1e-6, None, None), x)
        assert_near(out, exact_norm.rms_norm(x, weight, 1e-6), factor=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "k", "turned", "biased"),
    [(128, 256, True, False), (200, 300, True, True), (200, 300, False, False), (1, 77, False, True)],
)
def test_products_are_near_float64_and_keep_their_bits(n, k, turned, biased, dtype):
    weight, x = draw(n, k, dtype=dtype), draw(PADDED_ROWS, k, dtype=dtype)
    b = weight.t() if turned else weight.t().contiguous()
    bias = draw(n, dtype=dtype, seed=1) if biased else None
    out = assert_rows_keep_their_bits(lambda x: linear.mm(x, b, bias), x)
    assert out.is_contiguous()
    assert_near(out, exact_linear.linear(x, weight, bias))


def test_a_product_in_wide_tiles_is_near_float64_and_keeps_its_bits():
    weight, x = draw(8193, 5, dtype=torch.bfloat16), draw(9, 5, dtype=torch.bfloat16)
    whole = linear.mm(x, weight.t())
    assert_near(whole, exact_linear.linear(x, weight))
    assert_same_bits(linear.mm(x[4:5], weight.t()), whole[4:5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_entry_of_a_batched_product_has_the_bits_of_a_product(dtype):
    a, b = draw(2, 40, 200, dtype=dtype), draw(2, 200, 150, dtype=dtype)
    for operand in (b.transpose(1, 2).contiguous().transpose(1, 2), b[:, :, ::2]):
        out = linear.bmm(a, operand)
        assert out.is_contiguous()
        for entry in range(2):
            assert_same_bits(out[entry], linear.mm(a[entry], operand[entry]))
        assert_same_bits(linear.accumulate_batch(a, operand).to(dtype), out)


@pytest.mark.parametrize("length", [65_536, 65_537, 151_936])
def test_long_rows_keep_their_bits_and_are_near_float64(length):
    x = draw(5, length) + 0.5
    for function, exact in (
        (lambda x: reduce.sum(x, -1), exact_reduce.sum(x, -1)),
        (lambda x: reduce.mean(x, -1), exact_reduce.mean(x, -1)),
        (lambda x: softmax.log_softmax(x, -1), exact_softmax.log_softmax(x, -1)),
    ):
        whole = function(x)
        assert_near(whole, exact, factor=2)
        for row in range(5):
            assert_same_bits(function(x[row : row + 1]), whole[row : row + 1])


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_gradients_are_those_of_float64(name):
    x, grad = draw(20, 5000) * 2, draw(20, 5000, seed=1)
    exact = x.double().requires_grad_()
    out = getattr(torch, name)(exact, -1)
    out.backward(grad.double())
    backward = getattr(softmax, f"{name}_backward")
    both = torch.cat([grad, out.detach().float()], 1)
    ours = assert_rows_keep_their_bits(lambda rows: backward(rows[:, :5000], rows[:, 5000:], -1, torch.float32), both)
    assert_near(ours, exact.grad, factor=2)


@pytest.mark.parametrize("chip", CHIPS, ids=str)
def test_the_number_of_cores_moves_no_bit(chip, device):
    x, weight = draw(60, 200), draw(300, 200)
    few = reduce.mean(x, -1), softmax.softmax(x, -1), linear.mm(x, weight.t()), norm.rms_norm(x, None, 1e-6, None, None)
    device.chip = chip
    many = (
        reduce.mean(x, -1),
        softmax.softmax(x, -1),
        linear.mm(x, weight.t()),
        norm.rms_norm(x, None, 1e-6, None, None),
    )
    for one, other in zip(few, many, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("dim", [None, 0, 1, -1, [0, 2], []])
def test_reductions_over_any_dimensions_are_near_float64(dim):
    x = draw(5, 9, 7) + 1
    for keepdim in (False, True):
        for name in ("sum", "mean"):
            out, expected = getattr(reduce, name)(x, dim, keepdim), getattr(exact_reduce, name)(x, dim, keepdim)
            assert out.shape == expected.shape
            assert_near(out, expected)
    assert_near(softmax.softmax(x, 1), exact_softmax.softmax(x, 1), factor=2)


def test_special_values_are_those_of_pytorch():
    x = draw(6, 50)
    x[0, ::2] = -torch.inf
    x[1] = -torch.inf
    x[2, 3] = torch.inf
    x[3, 5] = torch.nan
    x[4, 7] = 1e4
    for name in ("softmax", "log_softmax"):
        ours, stock = getattr(softmax, name)(x, -1), getattr(torch, name)(x, -1)
        torch.testing.assert_close(ours, stock, equal_nan=True, rtol=1e-5, atol=1e-6)


def test_empty_operands_have_the_results_of_pytorch():
    assert reduce.sum(torch.ones(3, 0), -1).tolist() == [0, 0, 0]
    assert reduce.mean(torch.ones(3, 0), -1).isnan().all()
    assert reduce.sum(torch.ones(0, 3), -1).shape == (0,)
    assert reduce.sum(torch.tensor(2.5), None).item() == 2.5
    assert softmax.softmax(torch.ones(0, 4), -1).shape == (0, 4)
    assert_same_bits(linear.mm(torch.ones(2, 0), torch.ones(0, 3), torch.ones(3)), torch.ones(2, 3))
    assert linear.bmm(torch.ones(2, 0, 4), torch.ones(2, 4, 5)).shape == (2, 0, 5)


def test_wider_weights_and_part_of_a_row_are_near_float64():
    x, weight = draw(40, 96, dtype=torch.bfloat16), draw(96)
    assert_near(norm.rms_norm(x, weight, 1e-6, None, None), exact_norm.rms_norm(x, weight, 1e-6))
    assert_near(norm.rms_norm(x.float(), None, 1e-6, None, 40), exact_norm.rms_norm(x, None, 1e-6, 40), factor=2)
    assert_near(reduce.sum(x, -1, dtype=torch.float32), exact_reduce.sum(x, -1))
    assert_near(softmax.softmax(x, -1, dtype=torch.float32), exact_softmax.softmax(x, -1), factor=2)


def test_dtypes_without_a_reduction_are_refused_in_one_line():
    double, whole = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2, dtype=torch.int64)
    for x in (double, whole, whole.bool()):
        for call in (
            lambda x=x: reduce.sum(x, -1),
            lambda x=x: softmax.softmax(x, -1),
            lambda x=x: linear.mm(x, x),
            lambda x=x: norm.rms_norm(x, None, 1e-6, None, None),
        ):
            with pytest.raises(NotCovered, match=r"^.*use fp32, bf16.*$"):
                call()
    assert reduce.mean(whole.bool(), -1, dtype=torch.float32).tolist() == [1, 1]


def test_prepare_needs_no_row_and_moves_no_bit():
    weight, x = draw(70, 90, dtype=torch.bfloat16), draw(4, 90, dtype=torch.bfloat16)
    before = linear.mm(x, weight.t())
    linear.prepare(weight, 8192, BIASED, sizes=(1, 2, 4))
    assert_same_bits(linear.mm(x, weight.t()), before)


def in_order(x: torch.Tensor, block: int, order: Callable[[range], object]) -> torch.Tensor:
    """Row sums of x: [rows, length], one accumulator for each of ``block`` lanes, over its blocks in an order."""
    padded = np.zeros((len(x), -(-x.shape[1] // block) * block), np.float32)
    padded[:, : x.shape[1]] = x.numpy()
    acc = np.zeros((len(x), block), np.float32)
    for index in order(range(padded.shape[1] // block)):
        acc += padded[:, index * block : (index + 1) * block]
    return torch.from_numpy(np.stack([np.sum(lanes) for lanes in acc]))


def block_of_sums(x: torch.Tensor) -> int:
    return reductions.reduce(x.shape[1], x.dtype).block


def test_blocks_are_added_upwards():
    x = draw(ROWS, 60_000)
    assert_same_bits(reduce.sum(x, -1), in_order(x, block_of_sums(x), iter))
    assert not torch.equal(reduce.sum(x, -1), in_order(x, block_of_sums(x), reversed))


def test_a_sum_in_a_wrong_order_is_seen(device):
    def sums(x):
        out = torch.empty(len(x))
        controls.late_blocks_first_kernel[(4,)](x, out, len(x), x.shape[1], block=block_of_sums(x))
        return out

    x = draw(ROWS, 60_000)
    assert_near(sums(x), exact_reduce.sum(x, -1))
    with pytest.raises(AssertionError, match="elements differ"):
        assert_same_bits(sums(x), in_order(x, block_of_sums(x), iter))


def test_a_block_that_follows_the_number_of_rows_is_seen(monkeypatch):
    def sums(x):
        reduction = reductions.reduce(x.shape[1], x.dtype)
        reduction = replace(reduction, block=512 if len(x) < 16 else reduction.block)
        with monkeypatch.context() as patch:
            patch.setattr(reductions, "reduce", lambda *_: reduction)
            return reduce.sum(x, -1)

    with pytest.raises(AssertionError, match="elements differ"):
        assert_rows_keep_their_bits(sums, draw(ROWS, 9001))


def test_a_tile_that_follows_the_number_of_rows_is_seen(monkeypatch):
    def product(x):
        other = replace(reductions.linear(100, 1000, x.dtype), k_step=32 if len(x) < 64 else 128)
        with monkeypatch.context() as patch:
            patch.setattr(reductions, "linear", lambda *_: other)
            return linear.mm(x, weight.t())

    weight = draw(100, 1000)
    with pytest.raises(AssertionError, match="elements differ"):
        assert_rows_keep_their_bits(product, draw(PADDED_ROWS, 1000))


def test_a_result_of_the_interpreter_without_its_repairs_is_seen():
    x, weight = draw(4, 300, dtype=torch.bfloat16), draw(20, 300, dtype=torch.bfloat16)
    exact = exact_linear.linear(x, weight)
    assert_near(linear.mm(x, weight.t()), exact)
    with interpreted(*MODULES, repaired=False), pytest.raises(AssertionError, match=r"relative error|NaN"):
        assert_near(linear.mm(x, weight.t()), exact)

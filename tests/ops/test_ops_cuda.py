"""Sums, softmax and norms on a GPU: right, and with the same bits for a row whatever other rows there are."""

import pytest
import torch

from tests.assertions import DTYPES, ROW_COUNTS, assert_near, assert_same_bits
from tests.ops.linear.cases import draw
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import reduce
from vllm_batch_invariant.ops import softmax as softmaxes
from vllm_batch_invariant.ops.dispatch import module_for
from vllm_batch_invariant.ops.norm import reference as exact_norm
from vllm_batch_invariant.ops.norm import rms_norm
from vllm_batch_invariant.ops.norm_rotary import norm_rotary
from vllm_batch_invariant.ops.norm_rotary import reference as exact_norm_rotary
from vllm_batch_invariant.ops.reduce import reference as exact_reduce
from vllm_batch_invariant.ops.softmax import reference as exact_softmax

LENGTHS = (1, 63, 64, 777, 4096, 9001)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_row_sum_has_the_same_bits_at_every_batch_size(length, dtype):
    x = draw(1000, length, dtype=dtype) + 0.5
    whole, means = reduce.sum(x, -1), reduce.mean(x, -1)
    assert_near(whole, exact_reduce.sum(x, -1))
    assert_near(means, exact_reduce.mean(x, -1))
    for rows in ROW_COUNTS:
        assert_same_bits(reduce.sum(x[1000 - rows :], -1), whole[1000 - rows :], f"{rows} rows")
        assert_same_bits(reduce.mean(x[:rows], -1), means[:rows], f"{rows} rows")


@pytest.mark.parametrize("length", [65_536, 65_537, 151_936, 200_000])
def test_a_long_row_has_the_bits_of_a_row_among_others(length):
    x = draw(5, length)
    sums = reduce.sum(x, -1)
    for row in range(5):
        assert_same_bits(reduce.sum(x[row : row + 1], -1), sums[row : row + 1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [16_385, 65_537, 151_936, 262_145])
def test_a_softmax_of_a_vocabulary_has_the_same_bits_at_every_batch_size_and_gradients_too(length, dtype):
    x, grad = draw(300, length, dtype=dtype) * 4, draw(300, length, dtype=dtype, seed=1)
    module = module_for("softmax", "cuda")
    for name in ("softmax", "log_softmax"):
        function, backward = getattr(softmaxes, name), getattr(module, f"{name}_backward")
        whole = function(x)
        assert_near(whole[:5], getattr(exact_softmax, name)(x[:5], -1), factor=2)
        gradients = backward(grad, whole, -1, dtype)
        for rows in (1, 2, 3, 7, 16, 64, 299):
            last = slice(300 - rows, None)
            assert_same_bits(function(x[last]), whole[last], f"{name}, {rows} rows")
            assert_same_bits(backward(grad[last], whole[last], -1, dtype), gradients[last], f"{name}, {rows} rows")
        if dtype == torch.float32:  # the check can fail: the same terms in another order are another reduction
            assert not torch.equal(function(x.roll(1, -1)).roll(-1, -1), whole)


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("length", [777, 20_011])
def test_gradients_of_a_softmax_are_near_those_of_float64(length, name):
    x, grad = draw(6, length) * 4, draw(6, length, seed=1)
    wide = x.double().requires_grad_()
    getattr(torch, name)(wide, -1).backward(grad.double())
    backward = getattr(module_for("softmax", "cuda"), f"{name}_backward")
    assert_near(backward(grad, getattr(softmaxes, name)(x), -1, torch.float32), wide.grad, factor=10)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("length", [777, 20_011, 151_936])
def test_a_softmax_that_widens_has_the_bits_of_one_of_the_wide_row(length, dtype):
    x = draw(9, length, dtype=dtype) * 4
    for function in (softmaxes.softmax, softmaxes.log_softmax):
        assert_same_bits(function(x, dtype=torch.float32), function(x.float()))


def test_the_stock_sum_of_one_long_row_fails_the_same_check():
    x = draw(64, 150_000)
    assert any(not torch.equal(x[row : row + 1].sum(-1), x.sum(-1)[row : row + 1]) for row in range(64))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("dim", [None, 0, 1, 2, -1, [0, 2], [1, 2], [0, 1, 2], []])
def test_sums_over_any_dimensions_are_near_the_float64_reference(dim, dtype):
    x = draw(7, 65, 33, dtype=dtype) + 1
    for keepdim in (False, True):
        for name in ("sum", "mean"):
            out, expected = getattr(reduce, name)(x, dim, keepdim), getattr(exact_reduce, name)(x, dim, keepdim)
            assert out.shape == expected.shape
            if dtype == torch.float64:
                torch.testing.assert_close(out, expected, rtol=1e-13, atol=1e-13)
            else:
                assert_near(out, expected)


def test_the_sum_of_everything_is_chunked():
    x = draw(3_000, 10_007)
    assert_near(reduce.sum(x + 0.5), exact_reduce.sum(x + 0.5))
    assert_near(reduce.mean(x + 0.5), exact_reduce.mean(x + 0.5))


def test_more_rows_than_a_grid_axis_of_65535():
    x = draw(70_001, 40)
    assert_same_bits(reduce.sum(x, -1)[-9:], reduce.sum(x[-9:], -1))
    assert_same_bits(softmaxes.softmax(x)[-9:], softmaxes.softmax(x[-9:]))
    assert_same_bits(rms_norm(x, None, 1e-6)[-9:], rms_norm(x[-9:], None, 1e-6))


def test_empty_rows_sum_to_zero_and_have_no_mean():
    empty = torch.ones(3, 0, device="cuda")
    assert reduce.sum(empty, -1).tolist() == [0, 0, 0]
    assert reduce.mean(empty, -1).isnan().all()
    assert reduce.sum(empty.t(), -1).shape == (0,)
    assert reduce.sum(torch.tensor(2.5, device="cuda")).item() == 2.5


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [*LENGTHS, 16_384])
def test_a_row_of_a_softmax_has_the_same_bits_at_every_batch_size(length, dtype, name):
    function = getattr(softmaxes, name)
    x = draw(1000, length, dtype=dtype) * 4
    whole = function(x, -1)
    if length > 1:
        assert_near(whole, getattr(exact_softmax, name)(x, -1), factor=2)
    for rows in ROW_COUNTS:
        assert_same_bits(function(x[1000 - rows :], -1), whole[1000 - rows :], f"{rows} rows")


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_softmax_over_any_dimension_and_of_special_values_is_that_of_pytorch(name):
    x = draw(6, 40, 50) * 4
    for dim in range(3):
        assert_near(getattr(softmaxes, name)(x, dim), getattr(exact_softmax, name)(x, dim), factor=2)
    for length in (50, 20_011):
        x = draw(7, length) * 4
        x[0, : length // 2] = -torch.inf
        x[1] = -torch.inf
        x[2, 3] = torch.inf
        x[3, length - 1] = torch.nan
        x[4, 7] = 1e4
        x[5, 1:] = -torch.inf
        ours, stock = getattr(softmaxes, name)(x), getattr(torch, name)(x, -1)
        assert_same_bits(ours.isnan(), stock.isnan())
        torch.testing.assert_close(ours, stock, equal_nan=True, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [64, 100, 896, 4096, 9001])
def test_a_row_of_a_norm_has_the_same_bits_at_every_batch_size(length, dtype):
    x, residual, weight = draw(1000, length, dtype=dtype), draw(1000, length, dtype=dtype, seed=1), draw(length)
    weight = weight.to(dtype)
    plain = rms_norm(x, weight, 1e-6)
    fused, summed = rms_norm(x, weight, 1e-6, residual)
    assert_near(plain, exact_norm.rms_norm(x, weight, 1e-6), factor=2)
    assert_near(fused, exact_norm.rms_norm(x.double() + residual.double(), weight, 1e-6), factor=2)
    assert_same_bits(summed, (x.float() + residual.float()).to(dtype))
    for rows in ROW_COUNTS:
        last = slice(1000 - rows, None)
        assert_same_bits(rms_norm(x[last], weight, 1e-6), plain[last], f"{rows} rows")
        fused_part, summed_part = rms_norm(x[last], weight, 1e-6, residual[last])
        assert_same_bits(fused_part, fused[last], f"{rows} rows")
        assert_same_bits(summed_part, summed[last], f"{rows} rows")


def test_norms_of_part_of_a_row_without_weight_with_a_wider_one_and_of_strided_heads():
    x, weight = draw(40, 8, 96), draw(96, seed=1)
    for size in (1, 40):
        expected = exact_norm.rms_norm(x, weight, 1e-6, size)
        assert_near(rms_norm(x, weight, 1e-6, variance_size=size), expected, factor=2)
    assert_near(rms_norm(x, None, 1e-6), exact_norm.rms_norm(x, None, 1e-6), factor=2)
    half = x.bfloat16()
    assert_near(rms_norm(half, weight, 1e-6), exact_norm.rms_norm(half, weight, 1e-6))
    assert_same_bits(rms_norm(x[:, 2:5], weight, 1e-6), rms_norm(x, weight, 1e-6)[:, 2:5])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [64, 100, 128, 256, 1024])
def test_a_norm_of_strided_heads_has_the_bits_of_packed_ones_and_copies_nothing(length, dtype):
    wide, weight = draw(300, 12 * length, dtype=dtype), draw(length, dtype=dtype, seed=1)
    for heads in (wide[:, : 8 * length], wide[:, 8 * length : 10 * length]):
        view = heads.unflatten(1, (-1, length))
        packed = view.contiguous()
        expected = rms_norm(packed, weight, 1e-6)
        assert_same_bits(rms_norm(packed.flatten(0, 1), weight, 1e-6).view_as(expected), expected)
        assert_same_bits(rms_norm(packed.transpose(0, 1), weight, 1e-6), expected.transpose(0, 1))
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        out = rms_norm(view, weight, 1e-6)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before + 1 or length % 8
        assert_same_bits(out, expected)
        for rows in (1, 2, 3, 17, 299):
            assert_same_bits(rms_norm(view[300 - rows :], weight, 1e-6), expected[300 - rows :], f"{rows} rows")
        residual = wide.flip(1)[:, : heads.shape[1]].view_as(view)
        packed_pair = rms_norm(packed, weight, 1e-6, residual.contiguous())
        for part, whole in zip(rms_norm(view, weight, 1e-6, residual), packed_pair, strict=True):
            assert_same_bits(part, whole)


@pytest.mark.parametrize("length", [128, 4096])
def test_a_row_has_the_same_bits_alone_and_anywhere_among_16384(length):
    x, weight = draw(16384, length, dtype=torch.bfloat16), draw(length, dtype=torch.bfloat16, seed=1)
    x[5000:5100] = x[7]
    for residual in (None, x.flip(1)):
        outs = rms_norm(x, weight, 1e-6, residual)
        whole = outs if residual is None else outs[0]
        assert (whole[5000:5100] == whole[7]).all()
        for row in (0, 7, 15, 16, 5001, 16383):
            one = slice(row, row + 1)
            outs = rms_norm(x[one], weight, 1e-6, None if residual is None else residual[one])
            assert_same_bits(outs if residual is None else outs[0], whole[one], f"row {row}")


def heads_to_turn(tokens, heads, kv_heads, size, dtype):
    """qkv, positions, both weights and a cache of cosines and sines."""
    qkv = draw(tokens, (heads + 2 * kv_heads) * size, dtype=dtype)
    weights = [draw(size, dtype=dtype, seed=seed) for seed in (1, 2)]
    positions = torch.arange(tokens, device="cuda") * 7919 % 4096
    exponents = torch.arange(0, size, 2, device="cuda").float() / size
    angles = torch.arange(4096, device="cuda").float()[:, None] / 1e6**exponents
    return qkv, positions, *weights, torch.cat((angles.cos(), angles.sin()), dim=-1).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(32, 8, 128), (14, 2, 64), (3, 1, 256), (32, 4, 128)])
def test_norm_and_rotation_in_one_have_the_bits_of_the_norm_and_then_of_vllms_kernel(heads, kv_heads, size, dtype):
    rotary = pytest.importorskip("vllm._custom_ops").rotary_embedding
    qkv, positions, *weights, cache = heads_to_turn(1000, heads, kv_heads, size, dtype)
    turned = norm_rotary(qkv, positions, *weights, cache, 1e-6, heads, kv_heads)
    views = [part.unflatten(1, (-1, size)) for part in qkv.split([heads * size, kv_heads * size, kv_heads * size], 1)]
    apart = [rms_norm(view, weight, 1e-6).flatten(1) for view, weight in zip(views, weights, strict=False)]
    rotary(positions, *apart, size, cache, True)
    for out, expected, view, weight in zip(turned, apart, views, weights, strict=False):
        assert_same_bits(out, expected)
        reference = exact_norm_rotary.norm_rotary(view, positions, weight, cache, 1e-6)
        assert_near(out.view_as(view), reference, factor=2)
    for rows in (1, 2, 3, 64, 999):
        part = norm_rotary(qkv[1000 - rows :], positions[1000 - rows :], *weights, cache, 1e-6, heads, kv_heads)
        for out, whole in zip(part, turned, strict=True):
            assert_same_bits(out, whole[1000 - rows :], f"{rows} rows")
    # The check can fail: a rotation of bf16 products is another.
    cos, sin = cache[positions][:, None].chunk(2, dim=-1)
    first, second = rms_norm(views[0], weights[0], 1e-6).chunk(2, dim=-1)
    rounded = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).flatten(1)
    assert not torch.equal(rounded, turned[0])


def test_norm_and_rotation_refuse_what_they_would_compute_otherwise():
    qkv, positions, *weights, cache = heads_to_turn(4, 4, 2, 64, torch.bfloat16)
    with pytest.raises(ValueError, match="does not take"):
        norm_rotary(qkv, positions, *weights, cache.float(), 1e-6, 4, 2)
    with pytest.raises(ValueError, match="does not take"):
        norm_rotary(qkv, positions[:3], *weights, cache, 1e-6, 4, 2)
    with pytest.raises(NotCovered, match="float32"):
        norm_rotary(qkv.float(), positions, *weights, cache, 1e-6, 4, 2)

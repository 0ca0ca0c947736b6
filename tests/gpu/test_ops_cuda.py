"""Products, sums, softmax and norms on a GPU: right, and with the same bits for a row whatever other rows there are."""

import pytest
import torch

from tests.bits import DTYPES, ROW_COUNTS, assert_near, assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import linear as products
from vllm_batch_invariant.ops import reduce
from vllm_batch_invariant.ops import softmax as softmaxes
from vllm_batch_invariant.ops.linear import bmm, linear, mm
from vllm_batch_invariant.ops.linear.reference import linear as exact_linear
from vllm_batch_invariant.ops.linear.schedule import Tile, tiles
from vllm_batch_invariant.ops.norm import reference as exact_norm
from vllm_batch_invariant.ops.norm import rms_norm
from vllm_batch_invariant.ops.reduce import reference as exact_reduce
from vllm_batch_invariant.ops.softmax import reference as exact_softmax

SHAPES = ((896, 4864), (6144, 4096), (100, 300), (1, 512))
"""(N, K): narrow and deep, wide, odd, a single column."""
LENGTHS = (1, 63, 64, 777, 4096, 9001)
OTHER_TILES = (
    Tile(16, 128, 64, warps=8, stages=2),
    Tile(32, 64, 32, warps=4, stages=3),
    Tile(64, 128, 128, warps=8, stages=2),
    Tile(128, 64, 32, warps=4, stages=4),
    Tile(128, 256, 64, warps=8, stages=3),
)


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def operands(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    return draw(rows, depth, dtype=dtype), draw(columns, depth, dtype=dtype, seed=1), draw(columns, dtype=dtype, seed=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_a_row_of_a_product_has_the_same_bits_at_every_batch_size(columns, depth, dtype):
    x, weight, bias = operands(4096, columns, depth, dtype)
    whole = linear(x, weight, bias)
    assert_same_bits(linear(x[:1000], weight, bias), whole[:1000], "1000 rows")
    for rows in ROW_COUNTS:
        assert_same_bits(linear(x[:rows], weight, bias), whole[:rows], f"{rows} rows")
        assert_same_bits(linear(x[4096 - rows :], weight, bias), whole[4096 - rows :], f"last {rows} rows")


def test_stock_products_fail_the_same_sweep():
    x, weight, _ = operands(4096, 896, 4864, torch.bfloat16)
    whole = torch.mm(x, weight.t())
    assert any(not torch.equal(torch.mm(x[:rows], weight.t()), whole[:rows]) for rows in ROW_COUNTS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize("rows", [1, 7, 16, 100, 1000])
def test_tiles_of_a_product_are_only_a_schedule(rows, columns, depth, dtype):
    from vllm_batch_invariant.ops.linear.cuda import _product

    x, weight, bias = operands(rows, columns, depth, dtype)
    first, *others = [*tiles(dtype), *(OTHER_TILES[:2] if dtype == torch.float32 else OTHER_TILES)]
    expected = _product(x[None], weight.t()[None], bias, dtype, first)
    for tile in others:
        assert_same_bits(_product(x[None], weight.t()[None], bias, dtype, tile), expected, str(tile))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_a_row_of_a_product_has_the_same_bits_at_every_position(dtype):
    x, weight, _ = operands(257, 384, 640, dtype)
    whole = linear(x, weight)
    for seed in range(5):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).cuda()
        assert_same_bits(linear(x[order], weight), whole[order], f"permutation {seed}")
    for rows in (1, 2, 16, 17, 200):
        assert_same_bits(linear(x[:rows], weight), whole[:rows], f"{rows} rows")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
@pytest.mark.parametrize("rows", [1, 37, 300])
def test_products_are_near_the_float64_reference(rows, columns, depth, dtype):
    x, weight, bias = operands(rows, columns, depth, dtype)
    # A chain of tensor-core steps truncates: up to K/16 steps of 2**-24 of the running sum each.
    assert_near(linear(x, weight, bias), exact_linear(x, weight, bias), factor=2)


def test_fp64_products_are_exact_to_fp64():
    x, weight, bias = operands(37, 65, 130, torch.float64)
    torch.testing.assert_close(linear(x, weight, bias), exact_linear(x, weight, bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("depth", [130, 128])
def test_strided_and_misaligned_operands_give_the_bits_of_packed_ones(depth, dtype):
    x, weight, _ = operands(40, 65, depth, dtype)
    packed = linear(x, weight)
    assert_same_bits(linear(torch.cat([x, x], 1)[:, :depth], weight), packed)
    assert_same_bits(mm(x.t().contiguous().t(), weight.t().contiguous()), packed)
    assert_same_bits(linear(x[:, None].expand(-1, 2, -1), weight)[:, 1], packed)
    shifted = torch.empty(65 * depth + 1, dtype=dtype, device="cuda")[1:].view(65, depth).copy_(weight)
    assert_same_bits(linear(x, shifted), packed)


def test_neighbours_of_nan_and_infinity_do_not_reach_a_row():
    x, weight, _ = operands(40, 128, 256, torch.bfloat16)
    clean = linear(x, weight)
    x[1::2] = float("nan")
    x[3] = float("inf")
    assert_same_bits(linear(x, weight)[::2], clean[::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_entry_of_a_batched_product_has_the_bits_of_a_product(dtype):
    a, b = draw(9, 21, 48, dtype=dtype), draw(9, 48, 33, dtype=dtype, seed=1)
    whole = bmm(a, b)
    assert_near(whole, a.double() @ b.double())
    for entries in range(1, 10):
        assert_same_bits(bmm(a[:entries], b[:entries]), whole[:entries])
    assert_same_bits(whole[4], mm(a[4], b[4]))
    assert_same_bits(bmm(a[:, :3], b), whole[:, :3])
    assert_same_bits(bmm(a, b[:1].expand(9, -1, -1))[0], whole[0])


def test_any_number_of_entries_fits_the_grid():
    a, b = draw(70_000, 1, 16), draw(70_000, 16, 3, seed=1)
    torch.testing.assert_close(bmm(a, b), (a.mT * b).sum(1, keepdim=True), rtol=1e-4, atol=1e-5)


def test_an_operand_may_have_more_than_2_to_the_31_elements():
    rows = 2**31 // 4096 + 100
    x, weight = torch.zeros(rows, 4096, dtype=torch.bfloat16, device="cuda"), draw(48, 4096, dtype=torch.bfloat16)
    x[-50:] = draw(50, 4096, dtype=torch.bfloat16, seed=1)
    assert_same_bits(linear(x, weight)[-50:], linear(x[-50:].clone(), weight))
    assert_same_bits(mm(weight, x.t())[:, -50:], mm(weight, x[-50:].t()))


def test_empty_products_have_their_shape():
    ones = torch.ones(5, 8, device="cuda")
    assert linear(ones[:0], ones).shape == (0, 5)
    assert linear(ones[:3], ones[:0]).shape == (3, 0)
    assert torch.equal(linear(ones[:3, :0], ones[:, :0], ones[:, 0]), ones[:3, :5])
    assert bmm(ones[None, :, :0], ones[None, :0]).abs().sum() == 0


def test_products_of_integers_are_refused_by_name():
    with pytest.raises(NotCovered, match="int32"):
        mm(torch.ones(3, 8, dtype=torch.int32, device="cuda"), torch.ones(8, 5, dtype=torch.int32, device="cuda"))
    with pytest.raises(RuntimeError, match="one device"):
        products.linear(torch.ones(3, 8, device="cuda"), torch.ones(5, 8))


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
    sums, softmax = reduce.sum(x, -1), softmaxes.log_softmax(x)
    for row in range(5):
        assert_same_bits(reduce.sum(x[row : row + 1], -1), sums[row : row + 1])
        assert_same_bits(softmaxes.log_softmax(x[row : row + 1]), softmax[row : row + 1])


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
@pytest.mark.parametrize("length", LENGTHS)
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
    x = x[0, :6].clone()
    x[0, ::2] = -torch.inf
    x[1] = -torch.inf
    x[2, 3] = torch.inf
    x[3, 5] = torch.nan
    x[4, 7] = 1e4
    ours, stock = getattr(softmaxes, name)(x), getattr(torch, name)(x, -1)
    assert torch.equal(ours.isnan(), stock.isnan())
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

"""Products of codes: those that are written out, for each row by itself, on every device."""

from functools import partial

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from tests.ops.quantise.written_out import product_of
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.quantise import quantise
from vllm_batch_invariant.ops.scaled_linear import LARGEST_K, cpu, prepare, reference, scaled_linear
from vllm_batch_invariant.ops.scaled_linear.schedule import SCHEDULES, scaled_linear_schedule

HOPPER = Gpu("Hopper", 132, 232_448, True, 60 << 20, True)


@pytest.fixture(autouse=True)
def gpu_of_the_interpreter(device, monkeypatch):
    if device.is_interpreted:
        monkeypatch.setattr(Gpu, "of", lambda _: HOPPER)


def operands(device, m: int, n: int, k: int, dtype: torch.dtype, seed: int = 0) -> list[torch.Tensor]:
    """Codes, some at the bounds, scales of several sizes, and a bias that the products nearly cancel."""
    draw = torch.Generator().manual_seed(seed)
    codes, weight = (torch.randint(-128, 128, (rows, k), generator=draw, dtype=torch.int8) for rows in (m, n))
    codes[: m // 4], weight[n // 2 :: 3] = 127, -128
    scale, weight_scale = (10 ** (2 * torch.rand(rows, generator=draw) - 4) for rows in (m, n))
    bias = (-codes[0].long() @ weight.long().t()).float() * weight_scale * scale[0]
    return [one.to(device.type) for one in (codes, scale, weight, weight_scale, bias.to(dtype))]


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (3, 70, 33), (20, 40, 600), (65, 33, 256)])
def test_products_are_those_that_are_written_out(m, n, k, dtype, has_bias, device):
    *operand, bias = operands(device, m, n, k, dtype)
    bias = bias if has_bias else None
    found = scaled_linear(*operand, bias, dtype)
    assert_same_bits(found.cpu(), product_of(*operand, bias, dtype))
    if device.supports(dtype) and m > 1:  # of one element the bias leaves nothing but what was rounded
        assert_near(found, reference.scaled_linear(*operand, bias))


def test_the_order_of_scales_and_of_the_roundings_shows(device):
    """In fp32 each other way to compute the same gives other bits, and so the definition is not another one."""
    codes, scale, weight, weight_scale, bias = operands(device, 40, 60, 300, torch.float32)
    found = scaled_linear(codes, scale, weight, weight_scale, bias, torch.float32)
    sums = (codes.long().cpu() @ weight.long().cpu().t()).float().to(found.device)
    columns, rows = weight_scale[None], scale[:, None]
    others = {
        "the row's scale first": sums * rows * columns + bias,
        "the scales multiplied first": sums * (rows * columns) + bias,
        "a fused addition": ((sums * columns).double() * rows.double() + bias.double()).float(),
    }
    for name, other in others.items():
        differ = (found != other).double().mean()
        assert differ > 0.02, name
    assert_same_bits(found, sums * columns * rows + bias)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_at_every_batch_size(dtype, device):
    most = device.row_counts[-1]
    codes, scale, weight, weight_scale, bias = operands(device, most, 100, 130, dtype)
    whole = scaled_linear(codes, scale, weight, weight_scale, bias, dtype)
    for count in device.row_counts:
        last = slice(most - count, None)
        found = scaled_linear(codes[last], scale[last], weight, weight_scale, bias, dtype)
        assert_same_bits(found, whole[last], f"{count} rows")


def test_no_tile_moves_a_bit(device):
    if device.name == "cpu":
        pytest.skip("it has no tiles")
    codes, scale, weight, weight_scale, bias = operands(device, 70, 200, 300, torch.bfloat16)
    expected = product_of(codes, scale, weight, weight_scale, bias, torch.bfloat16)
    from vllm_batch_invariant.ops.scaled_linear import cuda
    from vllm_batch_invariant.ops.scaled_linear.reduction import ScaledLinearReduction

    multiply = partial(cuda.scaled_linear, codes, scale, weight, weight_scale, bias)
    for schedule in SCHEDULES:
        found = multiply(ScaledLinearReduction.of(300, torch.bfloat16), schedule)
        assert_same_bits(found.cpu(), expected, str(schedule))


def test_a_row_that_is_not_finite_has_nan_and_its_neighbours_have_not(device):
    x, weight = device.draw(3, 64), operands(device, 1, 20, 64, torch.float32)[2]
    x[1, 5] = torch.nan
    found = scaled_linear(*quantise(x), weight, torch.ones(20).to(device.type), None, torch.bfloat16)
    assert found.isnan().all(1).tolist() == [False, True, False]
    assert not found[[0, 2]].isnan().any()


def test_any_dimensions_before_the_last_and_none_of_them(device):
    codes, scale, weight, weight_scale, bias = operands(device, 12, 20, 40, torch.bfloat16)
    whole = scaled_linear(codes, scale, weight, weight_scale, bias, torch.bfloat16)
    shaped = scaled_linear(codes.view(3, 4, 40), scale.view(3, 4), weight, weight_scale, bias, torch.bfloat16)
    assert_same_bits(shaped.view(12, 20), whole)
    assert scaled_linear(codes[:0], scale[:0], weight, weight_scale, bias, torch.bfloat16).shape == (0, 20)
    one = scaled_linear(codes[3], scale[3], weight, weight_scale, bias, torch.bfloat16)
    assert_same_bits(one, whole[3])


def test_the_largest_sums_fit_and_more_are_refused(device):
    k = 1000 if device.is_interpreted else LARGEST_K
    codes = torch.full((1, k), -128, dtype=torch.int8).to(device.type)
    ones = torch.ones(1).to(device.type)
    found = scaled_linear(codes, ones, codes, ones, None, torch.float32)
    assert found.item() == torch.tensor(k * 128**2).float().item()
    long = torch.zeros(1, LARGEST_K + 1, dtype=torch.int8).to(device.type)
    assert (LARGEST_K + 1) * 128**2 > 2**31 - 1
    multiply = partial(scaled_linear, long, ones, long, ones, None, torch.float32)
    for call in (multiply, partial(prepare, long, torch.float32)):
        with pytest.raises(NotCovered, match="a product of int8 over 131072 elements: the sums of 131071 fit an int32"):
            call()


def test_what_does_not_fit_is_refused(device):
    codes, scale, weight, weight_scale, bias = operands(device, 3, 5, 8, torch.bfloat16)
    for arguments, words in (
        ((codes[:, :7], scale, weight, weight_scale, bias), r"got \[\[3, 7\], \[3\], \[5, 8\], \[5\], \[5\]\]"),
        ((codes, scale[:2], weight, weight_scale, bias), "scaled_linear takes"),
        ((codes, scale, weight, weight_scale[:1], bias), "scaled_linear takes"),
        ((codes, scale, weight, weight_scale, bias[:4]), "scaled_linear takes"),
        ((codes, scale, weight.short(), weight_scale, bias), "scaled_linear takes int8"),
        ((codes, scale.bfloat16(), weight, weight_scale, bias), "scaled_linear takes int8"),
        ((codes, scale, weight, weight_scale, bias.float()), "a bias of torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            scaled_linear(*arguments, torch.bfloat16)
    with pytest.raises(NotCovered, match=r"products of int8 in torch.float64"):
        scaled_linear(codes, scale, weight, weight_scale, None, torch.float64)


def test_tiles_follow_rows_and_all_are_chosen_by_some():
    chosen = {scaled_linear_schedule(m, n, HOPPER) for m in (1, 20, 100, 5000) for n in (512, 12_288)}
    assert chosen == set(SCHEDULES)


def saturating(codes: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Pairs of products added in 16 bits, as a CPU without VNNI may: unsigned codes by signed weights."""
    pairs = (codes.int() + 128)[:, None] * weight.int()
    pairs = torch.nn.functional.pad(pairs, (0, pairs.shape[-1] % 2)).unflatten(-1, (-1, 2)).sum(-1)
    return (pairs.clamp(-(2**15), 2**15 - 1).sum(-1) - 128 * weight.int().sum(1)).to(torch.int32)


@pytest.mark.parametrize("by_int8", [saturating, None])
def test_a_cpu_whose_int8_matmul_is_not_exact_is_served_by_its_blas(by_int8, device, monkeypatch):
    if device.name != "cpu":
        pytest.skip("of CPUs")
    codes, scale, weight, weight_scale, bias = operands(device, 9, 300, 2100, torch.bfloat16)
    expected = product_of(codes, scale, weight, weight_scale, bias, torch.bfloat16)
    if by_int8:
        monkeypatch.setattr(cpu, "by_int8", by_int8)
        assert not torch.equal(by_int8(codes, weight), cpu.by_blas(codes, weight))
    cpu.multiplies_exactly.cache_clear()
    used = []
    monkeypatch.setattr(cpu, "by_blas", lambda *of, theirs=cpu.by_blas: used.append(of) or theirs(*of))
    prepare(weight, torch.bfloat16)
    used.clear()
    assert_same_bits(scaled_linear(codes, scale, weight, weight_scale, bias, torch.bfloat16), expected)
    assert bool(used) == (not cpu.multiplies_exactly(300, 2100, torch.get_num_threads()))
    if by_int8:
        assert used
    cpu.multiplies_exactly.cache_clear()

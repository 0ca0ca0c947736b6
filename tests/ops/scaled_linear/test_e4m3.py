"""Products of codes of e4m3: those that are written out, for each row by itself, with each kind of sum."""

from collections.abc import Iterator
from functools import partial

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from tests.ops.conftest import HOPPER as WITHOUT_FP8
from tests.ops.quantise.written_out import E4M3, e4m3_product, exact_sum, fma, fp32, hopper_sum
from tests.ops.scaled_linear.hopper_core import HOPPER, interpret
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import scaled_linear as package
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.common.nvidia_gpus import COMPILED_FOR, FP8_MMA
from vllm_batch_invariant.ops.quantise import quantise
from vllm_batch_invariant.ops.scaled_linear import (
    EXACT,
    WGMMA,
    ScaledLinearReduction,
    prepare,
    reference,
    scaled_linear,
)
from vllm_batch_invariant.ops.scaled_linear.schedule import E4M3_SCHEDULES, e4m3_schedule

WRITTEN_OUT = {EXACT: exact_sum, WGMMA: hopper_sum}
SHAPES = [(1, 1, 1), (3, 70, 33), (5, 130, 300), (17, 40, 256)]
IN_BLOCKS = pytest.mark.parametrize("in_blocks", [False, True], ids=["channels", "blocks"])


@pytest.fixture(autouse=True)
def tensor_core_of_the_interpreter(device, monkeypatch) -> Iterator[None]:
    """A Hopper: its ``tl.dot`` of e4m3 are the sums of the integer model, and it has no others."""
    if not device.is_interpreted:
        yield
        return
    interpret(monkeypatch)
    yield


def kinds(device) -> list[str]:
    return [WGMMA] if device.is_interpreted else [EXACT, WGMMA] if device.name == "cpu" else []


def operands(
    device, m: int, n: int, k: int, dtype: torch.dtype, in_blocks: bool, cancels: bool = True
) -> list[torch.Tensor]:
    """Codes of every size, most of whose products cancel another, scales of no powers of two, and a bias."""
    draw = torch.Generator().manual_seed(m + n + k)
    x, w = (torch.randn(rows, k, generator=draw) * 10 ** (2 * torch.rand(rows, k, generator=draw)) for rows in (m, n))
    x[m // 2], w[n // 2] = 448, -448
    if cancels:
        half = k // 2 - k // 16
        x[:, half : 2 * half], w[:, half : 2 * half] = -x[:, :half], w[:, :half]
    codes, weight = (one.clamp(-448, 448).to(E4M3) for one in (x, w))
    groups = -(-k // 128)
    sizes = ((m, groups), (-(-n // 128), groups)) if in_blocks else ((m,), (n,))
    scale, weight_scale = (10 ** (torch.rand(*size, generator=draw) - 3) for size in sizes)
    bias = -reference.scaled_linear(codes[:1], scale[:1], weight, weight_scale)[0]
    return [one.to(device.type) for one in (codes, scale, weight, weight_scale, bias.to(dtype))]


@IN_BLOCKS
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_products_are_those_that_are_written_out(m, n, k, dtype, has_bias, in_blocks, device):
    *operand, bias = operands(device, m, n, k, dtype, in_blocks)
    bias = bias if has_bias else None
    for mma in kinds(device):
        found = scaled_linear(*operand, bias, dtype, mma)
        assert_same_bits(found, e4m3_product(*operand, bias, dtype, WRITTEN_OUT[mma]), mma)


@IN_BLOCKS
def test_products_are_near_those_of_float64(in_blocks, device):
    operand = operands(device, 20, 200, 700, torch.float32, in_blocks, cancels=False)[:4]
    found = scaled_linear(*operand, None, torch.float32)
    assert_near(found, reference.scaled_linear(*operand), 1 if device.name == "cpu" else 500)


@IN_BLOCKS
def test_a_row_has_the_same_bits_at_every_batch_size(in_blocks, device):
    most = device.row_counts[-1]
    codes, scale, weight, weight_scale, bias = operands(device, most, 150, 260, torch.bfloat16, in_blocks)
    for mma in kinds(device) or [None]:
        counts = (1, 2, 8, 9) if mma == WGMMA else device.row_counts[::-6][::-1]
        rows = slice(most - counts[-1], None)
        multiply = partial(scaled_linear, bias=bias, dtype=torch.float32 if bias is None else bias.dtype, mma=mma)
        whole = multiply(codes[rows], scale[rows], weight, weight_scale)
        for count in counts:
            found = multiply(codes[most - count :], scale[most - count :], weight, weight_scale)
            assert_same_bits(found, whole[len(whole) - count :], f"{count} rows, {mma}")


def test_no_tile_moves_a_bit(device):
    if not device.is_interpreted:
        pytest.skip("a CPU has no tiles, and a GPU a test of its own")
    from vllm_batch_invariant.ops.scaled_linear import cuda

    for in_blocks in (False, True):
        *operand, bias = operands(device, 70, 140, 130, torch.float32, in_blocks)
        expected = e4m3_product(*operand, bias, torch.float32, hopper_sum)
        reduction = ScaledLinearReduction.of(130, torch.float32, E4M3, in_blocks, WGMMA)
        for schedule in E4M3_SCHEDULES:
            assert_same_bits(cuda.scaled_linear(*operand, bias, reduction, schedule), expected, str(schedule))


@pytest.mark.parametrize("mma", [EXACT, WGMMA])
@pytest.mark.parametrize(
    ("mistake", "in_blocks"),
    [
        ({"add": lambda sums, s, t, total: fma(fp32(sums * s), t + 0 * s, total)}, True),
        ({"add": lambda sums, s, t, total: fma(fp32(sums * t), s + 0 * t, total)}, True),
        ({"add": lambda sums, s, t, total: fp32(fp32(fp32(s * t) * sums) + total)}, True),
        ({"shifted": 1}, True),
        ({"powers": True}, True),
        ({"finish": lambda total, s, t: fp32(fp32(total * t) * s)}, False),
        ({"finish": lambda total, s, t: fp32(total * fp32(s * t))}, False),
        ({"promote": 1 << 20}, False),
        ({"promote": 256}, False),
        ({"promote": 64}, False),
        ({"promote": 32}, False),
    ],
    ids=[
        *("row's scale on the sum", "column's scale on the sum", "no fma", "next group's scales", "powers of two"),
        *("column's scale first", "scales multiplied first", "no promotion", "at 256", "at 64", "at 32"),
    ],
)
def test_each_mistake_is_found(mistake, in_blocks, mma, device):
    if device.name != "cpu":
        pytest.skip("a CPU has both sums")
    *operand, bias = operands(device, 12, 40, 512, torch.float32, in_blocks)
    found = scaled_linear(*operand, bias, torch.float32, mma)
    written = partial(e4m3_product, bias=bias, dtype=torch.float32, sum_of=WRITTEN_OUT[mma])
    assert_same_bits(found, written(*operand))
    mistake = dict(mistake)  # every test has the same one
    if mistake.pop("powers", False):
        operand[1] = 2 ** operand[1].log2().ceil()
    differ = (found != written(*operand, **mistake)).double().mean()
    assert differ > 0.02


@pytest.mark.parametrize("mistake", [{"fraction": 25}, {"fraction": 12}, {"k_step": 16}])
def test_each_other_tensor_core_is_found(mistake, device):
    if device.name != "cpu":
        pytest.skip("of the model")
    operand = operands(device, 12, 40, 256, torch.float32, False)[:4]
    found = scaled_linear(*operand, None, torch.float32, WGMMA)
    other = e4m3_product(*operand, None, torch.float32, partial(hopper_sum, **mistake))
    assert (found != other).double().mean() > 0.5


def test_threads_move_no_bit(device, threads):
    if device.name != "cpu":
        pytest.skip("of CPUs")
    *operand, bias = operands(device, 40, 200, 300, torch.float32, True)
    for mma in kinds(device):
        whole = scaled_linear(*operand, bias, torch.float32, mma)
        threads(1)
        assert_same_bits(scaled_linear(*operand, bias, torch.float32, mma), whole, mma)


@IN_BLOCKS
def test_parts_of_k_are_those_of_packed_copies(in_blocks, device):
    codes, scale, weight, weight_scale, bias = operands(device, 12, 150, 512, torch.bfloat16, in_blocks)
    multiply = partial(scaled_linear, bias=bias, dtype=bias.dtype)
    for rows in (1, 12):
        parts = [codes[:rows, 128:384], scale[:rows], weight[:, 128:384], weight_scale]
        if in_blocks:
            parts[1], parts[3] = parts[1][:, 1:3], parts[3][:, 1:3]
        assert_same_bits(multiply(*parts), multiply(*(part.contiguous() for part in parts)), f"{rows} rows")


@IN_BLOCKS
def test_what_is_not_finite_has_nan_and_its_neighbours_have_not(in_blocks, device):
    x, (_, _, weight, weight_scale, _) = device.draw(3, 300), operands(device, 1, 20, 300, torch.float32, in_blocks)
    x[1, 5], weight[3, 299] = torch.inf, torch.nan
    codes, scale = quantise(x, codes=E4M3, group=128 if in_blocks else None)
    for mma in kinds(device) or [None]:
        is_nan = scaled_linear(codes, scale, weight, weight_scale, None, torch.bfloat16, mma).isnan()
        assert is_nan[1].all()
        assert is_nan[0].nonzero().tolist() == is_nan[2].nonzero().tolist() == [[3]]


@IN_BLOCKS
def test_any_dimensions_before_the_last_and_none_of_them(in_blocks, device):
    codes, scale, weight, weight_scale, bias = operands(device, 12, 20, 130, torch.float32, in_blocks)
    multiply = partial(scaled_linear, weight=weight, weight_scale=weight_scale, bias=bias, dtype=bias.dtype)
    whole = multiply(codes, scale)
    shaped = multiply(codes.view(3, 4, 130), scale.view(3, 4, *scale.shape[1:]))
    assert_same_bits(shaped.view(12, 20), whole)
    assert multiply(codes[:0], scale[:0]).shape == (0, 20)
    assert_same_bits(multiply(codes[3], scale[3]), whole[3])
    nothing = scaled_linear(
        codes[:, :0],
        scale[:, :0] if in_blocks else scale,
        weight[:, :0],
        weight_scale[:, :0] if in_blocks else weight_scale,
        bias,
        bias.dtype,
    )
    assert_same_bits(nothing, bias.expand(12, 20).contiguous())


def test_what_does_not_fit_is_refused(device):
    codes, scale, weight, weight_scale, bias = operands(device, 3, 130, 200, torch.bfloat16, True)
    for arguments, words in (
        ((codes, scale[:, :1], weight, weight_scale, bias), r"\[N / 128, K / 128\] for the scales"),
        ((codes, scale, weight, weight_scale[:1], bias), "scaled_linear takes"),
        ((codes, scale, weight, weight_scale[0], bias), "scaled_linear takes"),
        ((codes, scale, weight.view(torch.int8), weight_scale, bias), "scaled_linear takes e4m3, e4m3"),
        ((codes, scale, weight, weight_scale, bias.float()), "a bias of torch.bfloat16"),
    ):
        with pytest.raises(ValueError, match=words):
            scaled_linear(*arguments, torch.bfloat16)
    with pytest.raises(NotCovered, match=r"products of e4m3 in torch.float64"):
        scaled_linear(codes, scale, weight, weight_scale, None, torch.float64)
    with pytest.raises(NotCovered, match=r"sums of e4m3 of sm120 mma\.sync on"):
        scaled_linear(codes, scale, weight, weight_scale, bias, torch.bfloat16, "sm120 mma.sync")


def test_a_gpu_without_e4m3_is_refused(device, monkeypatch):
    if not device.is_interpreted:
        pytest.skip("of GPUs")
    codes, scale, weight, weight_scale, bias = operands(device, 3, 130, 200, torch.bfloat16, True)
    monkeypatch.setattr(Gpu, "of", lambda _: WITHOUT_FP8)
    monkeypatch.setattr(package, "module_for", lambda operation, _: device.module(operation))
    for call in (
        partial(scaled_linear, codes, scale, weight, weight_scale, bias, torch.bfloat16),
        partial(prepare, weight, torch.bfloat16),
    ):
        with pytest.raises(NotCovered, match="products of e4m3 on this GPU: its tensor cores have none"):
            call()


def test_tiles_follow_rows_and_all_are_chosen_by_some():
    chosen = {e4m3_schedule(m, n, HOPPER) for m in (1, 20, 50, 5000) for n in (512, 12_288, 40_000)}
    assert chosen == set(E4M3_SCHEDULES)
    for tile in E4M3_SCHEDULES:
        assert (tile.block_n if tile.swap_ab else tile.block_m) >= 64
        assert 128 % tile.block_n == 0
        assert tile.block_k == 128
    assert FP8_MMA.keys() < set(COMPILED_FOR)

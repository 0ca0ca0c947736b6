"""Codes of e4m3 and their products on a GPU: a Hopper has the bits of the integer model, by every tile and for every
number of rows. Cold, 20 kernels are compiled.
"""

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.common.nvidia_gpus import FP8_MMA
from vllm_batch_invariant.ops.quantise import E4M3, quantise
from vllm_batch_invariant.ops.scaled_linear import EXACT, WGMMA, ScaledLinearReduction, cuda, reference, scaled_linear
from vllm_batch_invariant.ops.scaled_linear.schedule import E4M3_SCHEDULES

ROWS = (1, 2, 15, 16, 17, 63, 64, 65, 127, 128, 129, 300)
SHAPES = ((384, 1024), (200, 400))
"""(N, K), one of which has neither whole blocks nor whole groups."""
OPERANDS = ("normal", "cancelling", "one sign", "spread")
IN_BLOCKS = pytest.mark.parametrize("in_blocks", [False, True], ids=["channels", "blocks"])


@pytest.fixture(scope="module", autouse=True)
def mma() -> str:
    """What multiplies on this GPU."""
    kind = Gpu.of(torch.cuda.current_device()).fp8_mma
    if kind is None:
        pytest.skip("this GPU has no products of e4m3")
    assert kind in FP8_MMA.values()
    return kind


def drawn(kind: str, rows: int, k: int, sign: int, seed: int) -> torch.Tensor:
    """Numbers [rows, K] of which products with those of the other sign cancel, or are of several sizes, or of one
    sign.
    """
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, k, generator=draw)
    if kind == "one sign":
        return x.abs()
    if kind == "spread":
        return x * 2.0 ** torch.randint(-12, 12, (rows, k), generator=draw)
    if kind == "cancelling":
        half = k // 2 - k // 32
        x[:, half : 2 * half] = sign * x[:, :half]
    return x


def layer(kind: str, n: int, k: int, in_blocks: bool) -> list[torch.Tensor]:
    """Codes of 300 rows with their scales, a weight with its own, of which none is a power of two; all rows' groups
    have one scale if operands cancel, so that the order of scales shows.
    """
    x, w = drawn(kind, ROWS[-1], k, -1, 0), drawn(kind, n, k, 1, 1)
    codes, scale = quantise(x, codes=E4M3, group=128 if in_blocks else None)
    weight, weight_scale = quantise(w, codes=E4M3)
    if in_blocks:
        draw = torch.Generator().manual_seed(2)
        weight_scale = 10 ** (torch.rand(-(-n // 128), -(-k // 128), generator=draw) - 2)
    if kind == "cancelling":
        codes, scale = (8 * x).clamp(-448, 448).to(E4M3), torch.full_like(scale, 0.0173)
        weight_scale = torch.full_like(weight_scale, 0.0379)
    return [codes, scale, weight, weight_scale]


@pytest.mark.parametrize("group", [None, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_gpu_has_the_codes_of_a_cpu(dtype, group):
    for k in (1, 400, 4096):
        x = drawn("spread", ROWS[-1], k, 1, k).to(dtype)
        x[3], x[5, 0], x[7, k // 2] = 0, torch.nan, torch.inf
        given = (None, torch.tensor([0.037])) if group is None else (None,)
        for scale in given:
            codes, scales = quantise(x, scale, codes=E4M3, group=group)
            for count in (1, 2, 17, ROWS[-1]):
                found = quantise(x[-count:].cuda(), None if scale is None else scale.cuda(), codes=E4M3, group=group)
                assert_same_bits(found[0].cpu().view(torch.uint8), codes[-count:].view(torch.uint8), f"{count} rows")
                assert_same_bits(found[1].cpu(), scales[-count:], f"{count} rows")


@IN_BLOCKS
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("kind", OPERANDS)
def test_a_hopper_has_the_bits_of_the_model(kind, n, k, in_blocks, mma):
    if mma != WGMMA:
        pytest.skip("a tensor core without a model")
    operands = layer(kind, n, k, in_blocks)
    on_gpu = [one.cuda() for one in operands]
    for dtype in (torch.float32, torch.bfloat16):
        bias = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(dtype)
        expected = scaled_linear(*operands, bias, dtype, WGMMA)
        for count in ROWS:
            rows = [one[-count:] for one in on_gpu[:2]]
            found = scaled_linear(*rows, *on_gpu[2:], bias.cuda(), dtype)
            assert_same_bits(found.cpu(), expected[-count:], f"{count} rows in {dtype}")
    if kind == "cancelling" or (kind == "one sign" and k > 128):  # these show another sum
        exact = scaled_linear(*operands, bias.float(), torch.float32, EXACT)
        assert (exact != scaled_linear(*operands, bias.float(), torch.float32, WGMMA)).double().mean() > 0.5


@IN_BLOCKS
def test_no_tile_and_no_number_of_rows_moves_a_bit(in_blocks, mma):
    """Of a layer of a usual size, on every GPU, with operands whose sums are rounding errors."""
    n, k = 4096, 4096
    operands = [one.cuda() for one in layer("cancelling", n, k, in_blocks)]
    reduction = ScaledLinearReduction.of(k, torch.float32, E4M3, in_blocks, mma)
    expected = cuda.scaled_linear(*operands, None, reduction, E4M3_SCHEDULES[0])
    for schedule in E4M3_SCHEDULES[1:]:
        assert_same_bits(cuda.scaled_linear(*operands, None, reduction, schedule), expected, str(schedule))
    for count in ROWS:
        rows = [one[-count:] for one in operands[:2]]
        assert_same_bits(scaled_linear(*rows, *operands[2:], None, torch.float32), expected[-count:], f"{count} rows")
    on_cpu = [one[:4].cpu() for one in operands[:2]] + [one.cpu() for one in operands[2:]]
    if mma == WGMMA:
        assert_same_bits(expected[:4].cpu(), scaled_linear(*on_cpu, None, torch.float32, WGMMA))


@IN_BLOCKS
def test_products_are_near_those_of_float64(in_blocks):
    operands = [one.cuda() for one in layer("normal", 384, 1024, in_blocks)]
    found = scaled_linear(*operands, None, torch.float32)
    assert_near(found, reference.scaled_linear(*operands), 500)

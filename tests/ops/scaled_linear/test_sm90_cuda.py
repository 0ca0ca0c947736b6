"""Products of e4m3 on a Hopper have the bits of its tensor core's model, by every tile and among any rows."""

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops.common.cancelling import cancelling
from vllm_batch_invariant.ops.quantise import quantise
from vllm_batch_invariant.ops.scaled_linear import E4M3, EXACT, GROUP, WGMMA, ScaledLinearReduction, cuda, scaled_linear
from vllm_batch_invariant.ops.scaled_linear.schedule import E4M3_SCHEDULES
from vllm_batch_invariant.ops.scaled_linear.sm90_schedule import SM90_SCHEDULES, Sm90Schedule

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no Hopper"
)
ROWS = (1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257)
IN_BLOCKS = pytest.mark.parametrize("in_blocks", [False, True], ids=["channels", "blocks"])


def operands(m: int, n: int, k: int, in_blocks: bool, cancels: bool = True) -> list[torch.Tensor]:
    """Codes whose products cancel, so that results are what the tensor core has cut off, or are of one sign."""
    x, weight = cancelling(m, n, k, torch.float32, "cuda") if cancels else (
        torch.rand(m, k, device="cuda") * 100, torch.rand(n, k, device="cuda") * 100
    )  # fmt: skip
    draw, groups = torch.Generator("cuda").manual_seed(m + n + k), -(-k // GROUP)
    sizes = ((m, groups), (-(-n // GROUP), groups)) if in_blocks else ((m,), (n,))
    scales = [torch.rand(size, generator=draw, device="cuda") * 0.02 + 1e-3 for size in sizes]
    if in_blocks and cancels:  # those of groups are the same, or nothing cancels
        scales = [one[:, :1].expand(-1, groups).contiguous() for one in scales]
    return [x.to(E4M3), scales[0], weight.to(E4M3), scales[1]]


def by_tile(tile: Sm90Schedule, given: list[torch.Tensor], dtype: torch.dtype, m: int | None = None) -> torch.Tensor:
    codes, scale, *rest = given
    m = m or len(codes)
    reduction = ScaledLinearReduction.of(codes.shape[1], dtype, E4M3, scale.dim() == 2, WGMMA)
    return cuda.scaled_linear(codes[-m:], scale[-m:], *rest, None, reduction, tile)


@IN_BLOCKS
@pytest.mark.parametrize("cancels", [True, False], ids=["cancelling", "one sign"])
@pytest.mark.parametrize("tile", SM90_SCHEDULES, ids=lambda tile: tile.about)
def test_a_tile_has_the_bits_of_the_tensor_core_s_model(tile, cancels, in_blocks):
    for n, k in ((200, 1104), (16, 128), (72, 640)):  # K with whole groups and without, of odd and even number
        given = operands(150, n, k, in_blocks, cancels)
        found = by_tile(tile, given, torch.float32)
        on_cpu = [one[-40:].cpu() if index < 2 else one.cpu() for index, one in enumerate(given)]
        assert_same_bits(found[-40:].cpu(), scaled_linear(*on_cpu, None, torch.float32, WGMMA), f"N={n} K={k}")
        for m in ROWS[:-1]:
            assert_same_bits(by_tile(tile, given, torch.float32, min(m, 150)), found[-m:], f"{m} rows")
    exact = scaled_linear(*on_cpu, None, torch.float32, EXACT)
    assert (found[-40:].cpu() != exact).double().mean() > 0.5, "operands show nothing"


@pytest.mark.parametrize(("n", "k"), [(6144, 4096), (4096, 12_288)])
def test_all_tiles_have_the_same_bits_of_a_layer(n, k):
    given = operands(ROWS[-1], n, k, True)
    expected = by_tile(E4M3_SCHEDULES[-1], given, torch.bfloat16)
    for tile in SM90_SCHEDULES:
        for m in ROWS:
            assert_same_bits(by_tile(tile, given, torch.bfloat16, m), expected[-m:], f"{tile.about}, {m} rows")


@IN_BLOCKS
def test_a_row_has_the_same_bits_among_any_others_behind_its_quantisation(in_blocks):
    x = torch.randn(4097, 4096, device="cuda").bfloat16()
    _, _, weight, weight_scale = operands(1, 4096, 4096, in_blocks)
    bias = torch.randn(4096, device="cuda").bfloat16()

    def layer(rows: torch.Tensor) -> torch.Tensor:
        codes = quantise(rows, codes=E4M3, group=GROUP if in_blocks else None)
        return scaled_linear(*codes, weight, weight_scale, bias, x.dtype, weight_is_constant=True)

    expected = layer(x)
    for m in (*ROWS, 512, 1000, 2049):
        for _ in range(3):  # launches that overlap
            assert_same_bits(layer(x[-m:]), expected[-m:], f"{m} rows")


def test_scales_beside_those_that_are_asked_for_are_not_read():
    codes, scale, weight, weight_scale = operands(70, 264, 1104, True)
    wide = torch.full((12, 96), torch.nan, device="cuda")
    wide[1 : 1 + scale.shape[1], 5:75] = scale.t()
    for tile in SM90_SCHEDULES:
        expected = by_tile(tile, [codes, scale, weight, weight_scale], torch.float32)
        turned = by_tile(tile, [codes, wide[1 : 1 + scale.shape[1], 5:75].t(), weight, weight_scale], torch.float32)
        assert_same_bits(turned, expected, tile.about)


def test_a_row_that_is_not_finite_is_nan_and_moves_no_other():
    codes, scale, weight, weight_scale = operands(40, 256, 512, True)
    for tile in SM90_SCHEDULES:
        expected = by_tile(tile, [codes, scale, weight, weight_scale], torch.bfloat16)
        broken = scale.clone()
        broken[3, 2] = torch.nan
        found = by_tile(tile, [codes, broken, weight, weight_scale], torch.bfloat16)
        assert found[3].isnan().all()
        assert_same_bits(found[4:], expected[4:], tile.about)
        assert_same_bits(found[:3], expected[:3], tile.about)

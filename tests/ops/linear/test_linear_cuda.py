"""GEMMs on a GPU: right, and with the same bits for a row whatever other rows there are, whoever computes them."""

from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from tests.assertions import DTYPES, ROW_COUNTS, assert_near, assert_same_bits
from tests.ops.linear.cases import HALVES, KINDS, at_once, draw, launch, operands, sequential_k, turned
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.common.cancelling import cancelling_gated
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.linear import LinearReduction, bmm, gated_linear, linear, mm, prepare, schedule
from vllm_batch_invariant.ops.linear.problem import leading_dim, supports_tma
from vllm_batch_invariant.ops.linear.reference import linear as exact_linear
from vllm_batch_invariant.ops.linear.schedule import GATED_TILES, NARROW_TILES, Tile
from vllm_batch_invariant.ops.linear.spec import GATED, spec_of
from vllm_batch_invariant.ops.norm import rms_norm
from vllm_batch_invariant.ops.silu import silu_and_mul

pytest.importorskip("triton")

from vllm_batch_invariant.ops.linear import cuda, triton_gemm

SHAPES = ((896, 4864), (768, 4096), (1280, 8192), (2560, 2048), (6144, 4096))
"""(N, K): narrow and deep, where a library would split K, and wide."""
ODD_SHAPES = ((100, 300), (65, 130), (1, 512), (1, 300), (24, 40), (40, 8), (17, 1))
"""Not whole tiles, not whole steps, not aligned, a single column, a single term."""
NARROW_SHAPES = ((8, 16), (40, 64), (72, 328), (1280, 8192), (896, 4864), (2048, 1096))
"""Less than a tile or than a step of K, not whole ones, and those that narrow tiles are for."""
ALL_ROW_COUNTS = (*ROW_COUNTS, 4095, 4096, 4097)
GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
OTHER_PTR_TILES = (
    Tile(16, 128, 64, num_warps=8, num_stages=2),
    Tile(32, 64, 32, num_warps=4, num_stages=3),
    Tile(64, 128, 128, num_warps=8, num_stages=2),
    Tile(128, 64, 32, num_warps=4, num_stages=4),
    Tile(128, 256, 64, num_warps=8, num_stages=3),
)
"""None that the schedule would choose."""
LAYOUTS = [
    pytest.param(turn_x, turn_weight, id=f"x {'KM' if turn_x else 'MK'}, weight {'KN' if turn_weight else 'NK'}")
    for turn_x, turn_weight in product((False, True), repeat=2)
]


@pytest.fixture
def fp32_precision():
    """Sets how PyTorch lets fp32 be multiplied."""
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    yield lambda precision: setattr(settings, "fp32_precision", precision)
    settings.fp32_precision = before


def assert_any_tile_gives(expected, a, b, bias, tiles) -> None:
    """``expected``: a @ b + bias, below rows that are not asked for."""
    device = Gpu.of(a.device.index)
    calls = {f"pointers {tile}": partial(launch, triton_gemm.gemm_ptr, tile, a[None], b[None], bias) for tile in tiles}
    if supports_tma(a, b, a.dtype):
        for tile in schedule.tma_tiles(a.dtype.itemsize, device):
            calls[f"TMA {tile}"] = partial(launch, triton_gemm.gemm_tma, tile, a, b, bias)
        if device.has_wgmma and leading_dim(a)[1] and leading_dim(b.t())[1]:
            for tile in NARROW_TILES:
                calls[tile.about] = partial(launch, triton_gemm.gemm_sm90_swap_ab, tile, a, b, bias)
    for name, out in zip(calls, at_once(calls.values()), strict=True):
        assert_same_bits(out.view(-1, b.shape[1]), expected[-len(a) :], f"{len(a)} rows, {name}")


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("biased", [False, True])
def test_tiles_are_only_a_schedule(biased, dtype):
    tiles = schedule.ptr_tiles(dtype)
    if dtype == torch.bfloat16 and biased:
        tiles += OTHER_PTR_TILES
    for kind in KINDS:
        x, weight, bias = operands(kind, 1000, 528, 2048, dtype)
        bias = bias if biased else None
        expected = sequential_k(x, weight, bias)
        for m in (1, 7, 16, 100, 1000):
            assert supports_tma(x[-m:], weight.t(), dtype)
            assert_any_tile_gives(expected, x[-m:], weight.t(), bias, tiles)


@pytest.mark.parametrize(("turn_x", "turn_weight"), LAYOUTS)
def test_layouts_are_only_a_schedule(turn_x, turn_weight):
    tiles = schedule.ptr_tiles(torch.bfloat16)
    for kind in KINDS:
        x, weight, bias = operands(kind, 1000, 528, 2048, torch.bfloat16)
        expected = sequential_k(x, weight, bias)
        for m in (8, 104, 1000):
            a, b = turned(x[-m:], turn_x), turned(weight, turn_weight).t()
            assert supports_tma(a, b, torch.bfloat16)
            assert_any_tile_gives(expected, a, b, bias, tiles)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_tiles_are_only_a_schedule_in_fp32(precision, fp32_precision):
    fp32_precision(precision)
    tiles = (*schedule.ptr_tiles(torch.float32), *OTHER_PTR_TILES[:2])
    for kind in KINDS:
        x, weight, bias = operands(kind, 1000, 528, 2048, torch.float32)
        expected = sequential_k(x, weight, bias)
        for m in (1, 16, 100, 1000):
            assert_any_tile_gives(expected, x[-m:], weight.t(), bias, tiles)


@pytest.mark.parametrize("dtype", HALVES)
def test_the_edge_of_a_descriptor_reads_as_zero(dtype):
    for kind, k in product(KINDS, (16, 40, 136, 2088)):
        x, weight, _ = operands(kind, 130, 72, k, dtype)
        wide_x, wide_weight = (F.pad(matrix, (0, -k % 256)) for matrix in (x, weight))
        wide_weight = F.pad(wide_weight, (0, 0, 0, -72 % 256))
        for tile in schedule.tma_tiles(dtype.itemsize, Gpu.of(0)):
            whole = launch(triton_gemm.gemm_tma, tile, wide_x, wide_weight.t())
            assert_same_bits(launch(triton_gemm.gemm_tma, tile, x, weight.t()), whole[:, :72], f"{k} {tile}")
        for tile in NARROW_TILES if Gpu.of(0).has_wgmma else ():
            whole = launch(triton_gemm.gemm_sm90_swap_ab, tile, wide_x, wide_weight.t())
            assert_same_bits(launch(triton_gemm.gemm_sm90_swap_ab, tile, x, weight.t()), whole[:, :72], f"{k} {tile}")


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("tile", NARROW_TILES, ids=lambda tile: tile.about)
def test_a_narrow_tile_has_the_bits_of_sequential_k(tile, biased, dtype):
    for kind, (n, k) in product(KINDS, NARROW_SHAPES):
        x, weight, bias = operands(kind, 300, n, k, dtype)
        bias = bias if biased else None
        expected = sequential_k(x, weight, bias)
        reduction = LinearReduction.of_device("cuda", n, k, dtype)
        # Room behind the result, where what belongs to no row or column would land.
        memory = torch.empty(300 * n + 4096, dtype=dtype, device="cuda")
        for m in (1, 2, 15, 16, 17, 31, 32, 33, 64, 100, 127, 128, 300):
            out = memory.fill_(torch.nan)[: m * n].view(m, n)
            triton_gemm.gemm_sm90_swap_ab(x[-m:], weight.t(), bias, out, reduction, tile)
            what = f"{kind}, {m} rows, {n} x {k}"
            assert_same_bits(out, expected[-m:], what)
            assert memory[m * n :].isnan().all(), what


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tile", GATED_TILES, ids=lambda tile: tile.about)
def test_a_gated_tile_has_the_bits_of_sequential_k_and_an_activation(tile, dtype):
    for kind, (n, k) in product(KINDS, ((16, 16), (32, 40), (208, 328), (2048, 4096), (6144, 1096))):
        x, weight, _ = operands(kind, 300, n, k, dtype)
        if kind == "cancelling":
            x, weight = cancelling_gated(300, n, k, dtype, "cuda")
        wide_x, wide_weight = (F.pad(matrix, (8, 16), value=torch.nan)[:, 8:-16] for matrix in (x, weight))
        product_of_all = sequential_k(x, weight)
        expected = silu_and_mul(product_of_all)
        if k > 40:
            assert not torch.equal(expected, silu_and_mul(product_of_all.roll(n // 2, 1))), "gate and up differ"
        reduction = LinearReduction.of_device("cuda", n, k, dtype)
        memory = torch.empty(300 * n // 2 + 4096, dtype=dtype, device="cuda")
        for m in (1, 2, 15, 16, 17, 33, 64, 100, 127, 128, 129, 256, 300):
            for a, b in ((x[-m:], weight), (wide_x[-m:], wide_weight)):
                out = memory.fill_(torch.nan)[: m * n // 2].view(m, n // 2)
                triton_gemm.gemm_sm90_swap_ab(a, b.t(), None, out, reduction, tile, True, GATED)
                what = f"{kind}, {m} rows, {n} x {k}"
                assert_same_bits(out, expected[-m:], what)
                assert memory[m * n // 2 :].isnan().all(), what


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf, 3e38])
def test_a_gated_tile_hands_on_what_is_not_finite(value):
    x, weight, _ = operands("random", 40, 64, 256, torch.bfloat16)
    x[3, 5], x[7, 200] = value, -value
    expected = silu_and_mul(sequential_k(x, weight))
    assert expected[3].isnan().any() or expected[3].isinf().any()
    reduction = LinearReduction.of_device("cuda", 64, 256, torch.bfloat16)
    for tile in GATED_TILES:
        out = torch.empty(40, 32, dtype=x.dtype, device="cuda")
        triton_gemm.gemm_sm90_swap_ab(x, weight.t(), None, out, reduction, tile, True, GATED)
        assert_same_bits(out, expected, tile.about)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gated_layer_has_the_bits_of_its_matmul_and_activation(dtype):
    for n, k in ((48, 96), (40, 96), (1024, 512), (6144, 2048)):
        x, weight, _ = operands("cancelling", 520, n, k, dtype)
        prepare(weight, 512, GATED, sizes=(1, 100))
        whole = silu_and_mul(linear(x, weight))
        for m in (1, 2, 7, 64, 100, 129, 256, 257, 512, 520):
            assert_same_bits(gated_linear(x[:m], weight, True), whole[:m], f"{m} rows of {n} x {k}")
        assert_same_bits(gated_linear(x[:6].view(2, 3, k), weight), whole[:6].view(2, 3, n // 2))
        turned_x, turned_weight = x.t().contiguous().t(), weight.t().contiguous().t()
        assert_same_bits(gated_linear(turned_x, turned_weight), whole, "the other sides inside")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = gated_linear(x[:9], weight, True)
        out.fill_(torch.nan)
        graph.replay()
        assert_same_bits(out, whole[:9], "a graph")


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("tile", NARROW_TILES, ids=lambda tile: tile.about)
def test_launches_that_overlap_have_the_bits_of_those_that_wait(tile):
    """Of layers whose operand the kernel right before makes; more tiles than programs, and fewer."""
    reduction = LinearReduction.of_device("cuda", 2048, 2048, torch.bfloat16)
    weights = [draw(2048, 2048, dtype=torch.bfloat16, seed=seed) for seed in range(12)]
    scale = torch.ones(2048, dtype=torch.bfloat16, device="cuda")

    def layers(x: torch.Tensor, overlaps: bool) -> list[torch.Tensor]:
        made = []
        for weight in weights:
            x = rms_norm(x, scale, 1e-6)
            x = triton_gemm.gemm_sm90_swap_ab(x, weight.t(), None, torch.empty_like(x), reduction, tile, overlaps)
            made.append(x)
        return made

    for m in (1, tile.block_m, 300):
        x = draw(m, 2048, dtype=torch.bfloat16, seed=99)
        right, found = layers(x, False), layers(x, True)
        for number, (one, other) in enumerate(zip(found, right, strict=True)):
            assert_same_bits(one, other, f"layer {number} of {m} rows")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layers(x, True)
        for _ in range(20):
            captured[-1].fill_(torch.nan)
            graph.replay()
            assert_same_bits(captured[-1], right[-1], f"a replay of {m} rows")


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("tile", NARROW_TILES, ids=lambda tile: tile.about)
def test_a_narrow_tile_takes_operands_among_other_columns_and_splits_nothing(tile):
    x, weight, bias = operands("cancelling", 100, 200, 328, torch.bfloat16)
    expected = sequential_k(x, weight, bias)
    wide_x, wide_weight = (F.pad(matrix, (8, 16), value=torch.nan)[:, 8:-16] for matrix in (x, weight))
    for m in (1, 33, 100):
        assert_same_bits(launch(triton_gemm.gemm_sm90_swap_ab, tile, wide_x[:m], wide_weight.t(), bias), expected[:m])
    split = sum(triton_gemm.accumulate(x[:, part], weight[:, part].t()) for part in (slice(160), slice(160, None)))
    assert not torch.equal(split.bfloat16(), launch(triton_gemm.gemm_sm90_swap_ab, tile, x, weight.t()))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
def test_a_row_has_the_same_bits_at_every_batch_size(n, k, dtype, biased, untuned):
    for kind in KINDS:
        x, weight, bias = operands(kind, 4097, n, k, dtype)
        bias = bias if biased else None
        prepare(weight, 4096, spec_of(biased), GRAPH_SIZES)
        whole = sequential_k(x, weight, bias)
        for m in ALL_ROW_COUNTS:
            assert_same_bits(linear(x[:m], weight, bias), whole[:m], f"{kind}, {m} rows")
            assert_same_bits(linear(x[-m:], weight, bias), whole[-m:], f"{kind}, last {m} rows")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "k"), [(896, 4864), (100, 300)])
def test_a_row_has_the_same_bits_at_every_batch_size_in_fp32(n, k, kind):
    x, weight, bias = operands(kind, 4097, n, k, torch.float32)
    whole = linear(x, weight, bias)
    for m in ALL_ROW_COUNTS:
        assert_same_bits(linear(x[:m], weight, bias), whole[:m], f"{m} rows")
        assert_same_bits(linear(x[-m:], weight, bias), whole[-m:], f"last {m} rows")


def test_stock_matmuls_fail_the_same_sweep():
    for kind in KINDS:
        x, weight, _ = operands(kind, 4096, 896, 4864, torch.bfloat16)
        whole = torch.mm(x, weight.t())
        assert any(not torch.equal(torch.mm(x[:m], weight.t()), whole[:m]) for m in ROW_COUNTS), kind


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
def test_a_row_has_the_same_bits_at_every_position(dtype):
    x, weight, _ = operands("cancelling", 257, 384, 640, dtype)
    whole = linear(x, weight)
    for seed in range(5):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed)).cuda()
        assert_same_bits(linear(x[order], weight), whole[order], f"permutation {seed}")
    for m in (1, 2, 16, 17, 200):
        assert_same_bits(linear(x[:m], weight), whole[:m], f"{m} rows")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), [(896, 4864), (6144, 4096)])
def test_results_are_near_the_float64_reference(n, k, dtype):
    for m in (1, 37, 300):
        x, weight, bias = operands("random", m, n, k, dtype)
        # A sequence of tensor-core steps truncates: up to K/16 steps of 2**-24 of the running sum each.
        assert_near(linear(x, weight, bias), exact_linear(x, weight, bias), factor=2)


def test_fp64_results_are_exact_to_fp64():
    x, weight, bias = operands("random", 37, 65, 130, torch.float64)
    torch.testing.assert_close(linear(x, weight, bias), exact_linear(x, weight, bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bias_is_added_in_fp32_and_rounded_once(kind, dtype):
    rounded_twice = []
    for (n, k), m in product(((896, 4864), (100, 300)), (1, 300)):
        x, weight, bias = operands(kind, m, n, k, dtype)
        accumulated = triton_gemm.accumulate(x, weight.t())
        assert accumulated.dtype == torch.float32
        expected = (accumulated + bias.float()).to(dtype)
        for use in range(4):  # the last ones by cuBLASLt, where it can
            what = f"{n} x {k}, {m} rows, use {use}"
            assert_same_bits(linear(x, weight), accumulated.to(dtype), what)
            assert_same_bits(linear(x, weight, bias), expected, what)
        rounded_twice.append(torch.equal(accumulated.to(dtype) + bias, expected))
    assert not all(rounded_twice), "these operands would not tell"


def views(x: torch.Tensor, weight: torch.Tensor) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Operands of the same size that are no packed tensors."""

    def misaligned(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")[1:].view_as(tensor).copy_(tensor)

    def among(tensor: torch.Tensor, extra: int) -> torch.Tensor:
        return F.pad(tensor, (0, extra), value=torch.nan)[:, :-extra]

    def every_second(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2]

    return {
        "x among as many other columns": (among(x, x.shape[1]), weight),
        "x among 8 other columns": (among(x, 8), weight),
        "x beside one other column": (among(x, 1), weight),
        "x misaligned": (misaligned(x), weight),
        "x by columns": (turned(x), weight),
        "every second element of x": (every_second(x), weight),
        "weight among 8 other columns": (x, among(weight, 8)),
        "weight misaligned": (x, misaligned(weight)),
        "weight by columns": (x, turned(weight)),
        "every second element of weight": (x, every_second(weight)),
    }


def test_strides_and_alignment_are_only_a_schedule():
    cases = {}
    for dtype, (n, k) in product(DTYPES, ((65, 130), (64, 128))):
        x, weight, bias = operands("cancelling", 40, n, k, dtype)
        for name, form in views(x, weight).items():
            cases[f"{dtype}, {n} x {k}, {name}"] = *form, bias
    at_once(partial(triton_gemm.mm, x, weight.t(), bias) for x, weight, bias in cases.values())
    packed = {
        name: sequential_k(x.contiguous(), weight.contiguous(), bias) for name, (x, weight, bias) in cases.items()
    }
    for use in range(4):  # the last ones by cuBLASLt, where it can
        for name, (x, weight, bias) in cases.items():
            for m in (40, 1):
                assert_same_bits(linear(x[:m], weight, bias), packed[name][:m], f"{name}, {m} rows, use {use}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["one row of x", "one row of weight", "windows of x"])
def test_rows_may_share_memory(form, dtype):
    x, weight, bias = operands("cancelling", 40, 64, 128, dtype)
    if form == "one row of x":
        x = x[:1].expand(40, -1)
    elif form == "one row of weight":
        weight = weight[:1].expand(64, -1)
    else:
        x = x.flatten()[: 39 * 8 + 128].unfold(0, 128, 8)
    expected = sequential_k(x.contiguous(), weight.contiguous(), bias)
    for use in range(4):  # the last ones by cuBLASLt, where it can
        assert_same_bits(linear(x, weight, bias), expected, f"use {use}")


def test_a_bias_may_have_any_stride_and_alignment():
    cases = {}
    for dtype in DTYPES:
        x, weight, bias = operands("random", 40, 64, 128, dtype)
        for name, form in {
            "with a stride": torch.stack([bias, torch.full_like(bias, torch.nan)], 1)[:, 0],
            "misaligned": torch.cat([bias[:1], bias])[1:],
            "of one number": bias[:1].expand(64),
        }.items():
            cases[f"{dtype}, {name}"] = x, weight, form
    at_once(partial(triton_gemm.mm, x, weight.t(), bias) for x, weight, bias in cases.values())
    for use in range(5):  # the last ones by cuBLASLt, where it can
        for name, (x, weight, bias) in cases.items():
            assert_same_bits(linear(x, weight, bias), linear(x, weight, bias.clone()), f"{name}, use {use}")
            assert_same_bits(linear(x, weight, bias), sequential_k(x, weight, bias.clone()), f"{name}, use {use}")


def test_odd_sizes_have_the_bits_of_operands_padded_with_zeros():
    cases = {}
    for (n, k), dtype in product(ODD_SHAPES, DTYPES):
        if k == 1 and dtype == torch.float32:
            continue  # a single multiplication and the bias are one fused step, which zeros behind it would part
        x, weight, bias = operands("random", 300, n, k, dtype)
        more_n, more_k = -n % 64, -k % 128
        padded = (
            F.pad(x, (0, more_k)),
            F.pad(weight, (0, more_k, 0, more_n)),
            F.pad(bias, (0, more_n)),
        )
        cases[f"{n} x {k}, {dtype}"] = (x, weight, bias), padded
    at_once(
        partial(triton_gemm.mm, x[:m], weight.t(), bias)
        for forms in cases.values()
        for x, weight, bias in forms
        for m in (16, 300)
    )
    for name, ((x, weight, bias), padded) in cases.items():
        whole = linear(x, weight, bias)
        assert_near(whole, exact_linear(x, weight, bias), factor=2)
        assert_same_bits(whole, linear(*padded)[:, : len(weight)], name)
        for m in (1, 2, 8, 9, 16, 17, 64, 65, 255):
            assert_same_bits(linear(x[:m], weight, bias), whole[:m], f"{name}, {m} rows")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_empty_results_have_their_shape_and_empty_sums_are_the_bias(dtype):
    ones = torch.ones(16, 24, dtype=dtype, device="cuda")
    assert linear(ones[:0], ones).shape == (0, 16)
    assert linear(ones[:3], ones[:0]).shape == (3, 0)
    assert linear(ones[None, :0], ones, ones[0, :16]).shape == (1, 0, 16)
    assert_same_bits(linear(ones[:3, :0], ones[:, :0], ones[:, 0]), ones[:3, :16])
    assert linear(ones[:3, :0], ones[:, :0]).abs().sum() == 0
    assert bmm(ones[None, :, :0], ones[None, :0]).abs().sum() == 0
    assert bmm(ones[None, :0], ones.t()[None]).shape == (1, 0, 16)


def test_neighbours_of_nan_and_infinity_do_not_reach_a_row():
    x, weight, _ = operands("random", 40, 128, 256, torch.bfloat16)
    clean = linear(x, weight)
    x[1::2] = torch.nan
    x[3] = torch.inf
    for _ in range(4):
        assert_same_bits(linear(x, weight)[::2], clean[::2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_entry_of_a_bmm_has_the_bits_of_mm(dtype):
    a, b = draw(9, 21, 48, dtype=dtype), draw(9, 48, 33, dtype=dtype, seed=1)
    whole = bmm(a, b)
    assert_near(whole, a.double() @ b.double())
    for batch in range(1, 10):
        assert_same_bits(bmm(a[:batch], b[:batch]), whole[:batch])
    assert_same_bits(whole[4], mm(a[4], b[4]))
    assert_same_bits(bmm(a[:, :3], b), whole[:, :3])
    assert_same_bits(bmm(a, b[:1].expand(9, -1, -1))[0], whole[0])


def test_any_number_of_entries_fits_the_grid():
    a, b = draw(70_000, 1, 16), draw(70_000, 16, 3, seed=1)
    torch.testing.assert_close(bmm(a, b), (a.mT * b).sum(1, keepdim=True), rtol=1e-4, atol=1e-5)


def test_an_operand_may_have_more_than_2_to_the_31_elements():
    m = 2**31 // 4096 + 104
    x, weight = torch.zeros(m, 4096, dtype=torch.bfloat16, device="cuda"), draw(48, 4096, dtype=torch.bfloat16)
    x[-50:] = draw(50, 4096, dtype=torch.bfloat16, seed=1)
    expected = sequential_k(x[-50:].clone(), weight)
    assert_same_bits(linear(x, weight)[-50:], expected, "descriptors")
    assert_same_bits(linear(x[1:], weight)[-50:], expected, "descriptors, one row less")
    assert_same_bits(sequential_k(x, weight)[-50:], expected, "pointers")
    assert_same_bits(mm(weight, x.t())[:, -50:], mm(weight, x[-50:].t()))


def test_steps_over_more_than_2_to_the_31_elements():
    stride = 2**24 + 5
    # Room in front of the operand, where a stride in 32 bits would lead.
    room = torch.zeros(2**31 + 192 * stride, dtype=torch.bfloat16, device="cuda")
    x, weight, _ = operands("random", 20, 48, 192, torch.bfloat16)
    far = room[2**31 :].view(192, stride)[:, -20:].t().copy_(x)
    assert_same_bits(linear(far, weight), sequential_k(x, weight))


@pytest.mark.parametrize(("n", "k"), [(896, 4864), (100, 300)])
def test_both_precisions_of_fp32_are_invariant_and_near_float64(n, k, fp32_precision):
    x, weight, bias = operands("random", 1000, n, k, torch.float32)
    found = {}
    for precision, factor in (("ieee", 2), ("tf32", 1000)):
        fp32_precision(precision)
        found[precision] = whole = linear(x, weight, bias)
        assert_near(whole, exact_linear(x, weight, bias), factor)
        for m in ROW_COUNTS:
            assert_same_bits(linear(x[-m:], weight, bias), whole[-m:], f"{precision}, {m} rows")
    assert not torch.equal(found["ieee"], found["tf32"])
    with pytest.raises(AssertionError, match="relative error"):
        assert_near(found["tf32"], exact_linear(x, weight, bias), factor=2)


def test_the_precision_of_fp32_moves_no_bit_of_other_dtypes(fp32_precision):
    x, weight, bias = operands("cancelling", 100, 96, 512, torch.bfloat16)
    expected = linear(x, weight, bias)
    fp32_precision("tf32")
    assert_same_bits(linear(x, weight, bias), expected)
    assert_same_bits(sequential_k(x, weight, bias), expected)
    x, weight, bias = operands("random", 37, 65, 130, torch.float64)
    torch.testing.assert_close(linear(x, weight, bias), exact_linear(x, weight, bias), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(300,), (2, 150)], ids=["m", "batch of rows"])
def test_a_row_of_the_gradient_has_the_same_bits_at_every_batch_size(shape, dtype):
    x, weight, bias = operands("random", 300, 512, 768, dtype)
    target = draw(300, 512, seed=3).to(dtype)
    counts = (1, 2, 7, 8, 64, 129, 300)
    at_once(
        [
            partial(triton_gemm.mm, target.t(), x),
            *(partial(triton_gemm.mm, target[:m], weight) for m in counts),
            *(partial(triton_gemm.mm, x[:m], weight.t(), bias) for m in counts),
        ]
    )

    def gradients(m: int, *shape: int) -> tuple[torch.Tensor, ...]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x[-m:], weight, bias)]
        out = F.linear(leaves[0].view(*(shape or (m,)), 768), *leaves[1:])
        (out.view(m, 512) * target[-m:]).sum().backward()
        return tuple(leaf.grad for leaf in leaves)

    with batch_invariant_mode():
        whole = gradients(300, *shape)
        for _ in range(4):  # the last ones by cuBLASLt, where it can
            for got, expected in zip(gradients(300, *shape), whole, strict=True):
                assert_same_bits(got, expected, "again")
            for m in counts:
                assert_same_bits(gradients(m)[0], whole[0][-m:], f"{m} rows")
    assert_near(whole[0], target.double() @ weight.double(), factor=2)
    assert_near(whole[1], target.double().t() @ x.double(), factor=2)


@pytest.mark.parametrize("stream", ["default", "another"])
def test_a_gemm_runs_on_the_current_stream(stream, untuned):
    x, weight, bias = operands("cancelling", 48, 256, 512, torch.bfloat16)
    expected = sequential_k(x, weight, bias)
    prepare(weight, 64, spec_of(True))
    late = torch.full_like(x, torch.nan)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream() if stream == "another" else torch.cuda.default_stream()):
        for way in (linear, lambda x, weight, bias: triton_gemm.mm(x, weight.t(), bias)):
            late.fill_(torch.nan)
            torch.cuda._sleep(20_000_000)
            late.copy_(x)
            out = way(late, weight, bias)
            torch.cuda.current_stream().synchronize()
            assert_same_bits(out, expected, str(way))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_a_gemm_runs_where_its_operands_are():
    x, weight, bias = operands("cancelling", 48, 256, 512, torch.bfloat16)
    expected = linear(x, weight, bias)
    other = [tensor.to("cuda:1") for tensor in (x, weight, bias)]
    assert torch.cuda.current_device() == 0
    for use in range(5):
        out = linear(*other)
        assert out.device.index == 1
        assert_same_bits(out.to("cuda:0"), expected, f"use {use}")
    with pytest.raises(RuntimeError, match="one device"):
        linear(other[0], weight, bias)


@pytest.fixture
def no_kernel(monkeypatch):
    """Fails when a kernel is launched."""

    class Refused:
        def run(self, *_: object, **__: object) -> None:
            raise AssertionError("a kernel was launched")

    for kernel in ("gemm_ptr_kernel", "gemm_tma_kernel"):
        monkeypatch.setattr(triton_gemm, kernel, Refused())
    monkeypatch.setattr(triton_gemm, "gemm_sm90_swap_ab", lambda *_: pytest.fail("a kernel was launched"))
    if cuda.cublaslt:
        monkeypatch.setattr(cuda.cublaslt.Matmul, "run", lambda *_, **__: pytest.fail("cuBLASLt was called"))


def test_bad_operands_are_refused_before_a_kernel_runs(no_kernel):
    x, weight, bias = (torch.ones(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((3, 32), (16, 32), (16,)))
    with pytest.raises(ValueError, match=r"got \[\[3, 32\], \[16, 24\]\]"):
        linear(x, weight[:, :24])
    with pytest.raises(ValueError, match=r"bias \[N\], got \[\[3, 32\], \[16, 32\], \[8\]\]"):
        linear(x, weight, bias[:8])
    with pytest.raises(ValueError, match=r"bias of \[N\]"):
        mm(x, weight.t(), bias[:1])
    with pytest.raises(ValueError, match="bmm takes"):
        bmm(x[None], weight[None])
    for others in ((weight.float(), bias.float()), (weight, bias.float()), (weight.half(), None)):
        with pytest.raises(ValueError, match="one dtype, got"):
            linear(x, *others)
    for given in ((x.cpu(), weight, bias), (x, weight.cpu(), bias), (x, weight, bias.cpu())):
        with pytest.raises(RuntimeError, match="one device"):
            linear(*given)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.int32], ids=str)
def test_other_dtypes_are_refused_by_name_before_a_kernel_runs(dtype, no_kernel):
    x, weight = (torch.ones(*shape, device="cuda").to(dtype) for shape in ((3, 32), (16, 32)))
    for call in (
        lambda: linear(x, weight),
        lambda: mm(x, weight.t()),
        lambda: bmm(x[None], weight.t()[None]),
        lambda: prepare(weight, 64),
    ):
        with pytest.raises(NotCovered, match=f"a matmul in {dtype}"):
            call()
    with pytest.raises(ValueError, match=f"one dtype, got torch.bfloat16 and {dtype}"):
        linear(x.bfloat16(), weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_old_gpu_is_refused_by_name_before_a_kernel_runs(dtype, monkeypatch, no_kernel):
    class Properties:
        name, major, minor, multi_processor_count = "Tesla V100", 7, 0, 80

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    Gpu.of.cache_clear()
    x, weight = (torch.ones(16, 32, dtype=dtype, device="cuda") for _ in range(2))
    try:
        for call in (lambda: linear(x, weight), lambda: bmm(x[None], weight.t()[None])):
            with pytest.raises(NotCovered, match=r"Tesla V100: .*compute capability 8\.0"):
                call()
    finally:
        Gpu.of.cache_clear()

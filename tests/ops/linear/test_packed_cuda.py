"""Weights of four bits on a Hopper, read as they are stored, have the bits of the matrix that they stand for."""

from functools import partial
from itertools import product

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.linear.cases import at_once, sequential_k
from vllm_batch_invariant.ops.common.cancelling import cancelling, cancelling_gated
from vllm_batch_invariant.ops.formats import Format, integers
from vllm_batch_invariant.ops.linear import LinearReduction, MatmulSpec, matmul, prepare
from vllm_batch_invariant.ops.linear.problem import GemmProblem
from vllm_batch_invariant.ops.linear.schedule import PACKED_TILES, NarrowTile, serves_packed
from vllm_batch_invariant.ops.linear.spec import BIAS, NONE, SWIGLU, Epilogue
from vllm_batch_invariant.ops.silu import silu_and_mul

pytest.importorskip("triton")

from vllm_batch_invariant.ops.linear import triton_gemm

pytestmark = pytest.mark.usefixtures("sm90")
ROWS = (1, 2, 7, 8, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)
MANY_ROWS = (1, 127, 129, 255, 257, 513, 1031, 1290)
"""Of tiles of 128 rows and more: some have more rows than the first whose columns are all computed."""
SYMMETRIC, WITH_ZEROS = integers(4, 128, False, False), integers(4, 32, True, False)
SHAPES = {32: (1, 32), 64: (136, 1088), 128: (65, 896), None: (333, 2112)}
"""(N, K) by group: not whole tiles, not whole steps."""
Stored = list[torch.Tensor]


def draw(b_format: Format, n: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, Stored]:
    """x of as many rows as are compared, and every code, zero point and sign of a scale."""
    generator = torch.Generator("cuda").manual_seed(n + k)
    x = torch.randn(max(MANY_ROWS), k, generator=generator, device="cuda").to(dtype)
    words = torch.randint(-(2**31), 2**31, (n, k // 8), generator=generator, device="cuda").int()
    groups = 1 if "channel" in b_format.name else k // b_format.group
    scales = (torch.randn(n, groups, generator=generator, device="cuda") * 0.02).to(dtype)
    zeros = torch.randint(0, 17, (n, groups), generator=generator, device="cuda").to(torch.uint8)
    return x, [words, scales, *([zeros] if len(b_format.storage) > 2 else [])]


def cancel(b_format: Format, n: int, k: int, dtype: torch.dtype, epilogue: Epilogue) -> tuple[torch.Tensor, Stored]:
    """Operands whose results are what rounding leaves, so that they show the order of a sum."""
    made = cancelling_gated if epilogue.gated else cancelling
    x, weight = made(max(MANY_ROWS), n, k, dtype, "cuda", exponents=b_format.exponents)
    return x, list(b_format.stored(weight))


def matrix(b_format: Format, stored: Stored, dtype: torch.dtype) -> torch.Tensor:
    """[N, K], by the definition."""
    n, k = len(stored[0]), stored[0].shape[1] * b_format.packing
    return b_format.decode(stored, torch.empty(n, k, dtype=dtype, device="cuda"))


def assert_every_tile_gives(expected, x, stored, spec, bias=None) -> None:
    """``expected``: of all rows; a tile writes so many, and nothing behind them."""
    n, k = len(stored[0]), x.shape[1]
    problem = GemmProblem(n, k, x.dtype, spec, 0)
    reduction = LinearReduction.of_device("cuda", n, k, x.dtype, spec.k_slices)
    memory = torch.empty(expected.numel() + 4096, dtype=x.dtype, device="cuda")
    tiles = [tile for tile in PACKED_TILES if serves_packed(tile, problem)]
    tiles = tiles if spec.b_format is SYMMETRIC and spec.epilogue is NONE else tiles[-1 :: -(len(tiles) // 4)]

    def run(tile: NarrowTile, m: int, out: torch.Tensor) -> torch.Tensor:
        return triton_gemm.gemm_sm90_swap_ab(
            x[-m:], stored[0].t(), bias, out, reduction, tile, True, spec, stored[1:]
        )  # fmt: skip

    at_once([partial(run, tile, 1, torch.empty_like(expected[:1])) for tile in tiles])  # compiles
    runs = ((tile, m) for tile in tiles for m in (ROWS if tile.block_m < 128 else MANY_ROWS))
    for tile, m in runs:
        out = run(tile, m, memory.fill_(torch.nan)[: m * expected.shape[1]].view(m, -1))
        what = f"{tile.about}, {m} rows, {spec} of {n} x {k}"
        assert_same_bits(out, expected[-m:], what)
        assert memory[out.numel() :].isnan().all(), what


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("group", SHAPES)
def test_every_tile_has_the_bits_of_sequential_k_with_the_matrix(group, zeros):
    b_format = integers(4, group, zeros, False)
    for x, stored in (
        draw(b_format, *SHAPES[group], torch.bfloat16),
        cancel(b_format, 200, 1152, torch.bfloat16, NONE),
    ):
        expected = sequential_k(x, matrix(b_format, stored, x.dtype))
        assert_every_tile_gives(expected, x, stored, MatmulSpec(NONE, 1, b_format))


@pytest.mark.parametrize("b_format", [SYMMETRIC, WITH_ZEROS], ids=lambda one: one.name)
def test_a_bias_a_gated_layer_and_fp16(b_format):
    for epilogue, dtype in product((BIAS, SWIGLU), (torch.bfloat16, torch.float16)):
        for x, stored in (draw(b_format, 208, 1152, dtype), cancel(b_format, 416, 1280, dtype, epilogue)):
            bias = torch.randn(len(stored[0]), device="cuda").to(dtype) if epilogue.has_bias else None
            expected = sequential_k(x, matrix(b_format, stored, dtype), bias)
            expected = silu_and_mul(expected) if epilogue.gated else expected
            assert_every_tile_gives(expected, x, stored, MatmulSpec(epilogue, 1, b_format), bias)


def test_slices_are_rounded_and_added_as_a_tree():
    x, stored = draw(SYMMETRIC, 264, 4096, torch.bfloat16)
    k_slices = zip(x.chunk(4, 1), matrix(SYMMETRIC, stored, x.dtype).chunk(4, 1), strict=True)
    first, second, third, last = (sequential_k(a, weight) for a, weight in k_slices)
    assert_every_tile_gives((first + second) + (third + last), x, stored, MatmulSpec(NONE, 4, SYMMETRIC))


def test_numbers_that_are_not_finite_are_handed_on():
    x, stored = draw(WITH_ZEROS, 72, 256, torch.bfloat16)
    x[3, 5], x[7, 200] = torch.nan, torch.inf
    stored[1][5, 3], stored[1][6, 4], stored[1][7] = torch.inf, torch.nan, 1e-40
    expected = sequential_k(x, matrix(WITH_ZEROS, stored, x.dtype))
    assert expected[3].isnan().all()
    out = torch.empty_like(expected)
    reduction = LinearReduction.of_device("cuda", 72, 256, x.dtype)
    for tile in PACKED_TILES:
        spec = MatmulSpec(NONE, 1, WITH_ZEROS)
        triton_gemm.gemm_sm90_swap_ab(x, stored[0].t(), None, out, reduction, tile, True, spec, stored[1:])
        assert torch.equal(out.isnan(), expected.isnan())
        assert_same_bits(out.nan_to_num(0), expected.nan_to_num(0), tile.about)


def test_a_planted_fault_shows():
    tile, spec = PACKED_TILES[2], MatmulSpec(NONE, 1, WITH_ZEROS)
    for x, stored in (draw(WITH_ZEROS, 256, 1024, torch.bfloat16), cancel(WITH_ZEROS, 256, 1024, torch.bfloat16, NONE)):
        words, scales, zeros = stored
        expected = sequential_k(x, matrix(WITH_ZEROS, stored, x.dtype))
        reduction = LinearReduction.of_device("cuda", 256, 1024, x.dtype)
        planted = {
            "zero point + 1": (words, scales, zeros + 1),
            "nibbles swapped": ((words & 0x0F0F0F0F) << 4 | (words >> 4) & 0x0F0F0F0F, scales, zeros),
            "scales of the next group": (words, scales.roll(1, 1), zeros),
            "zero points of the next group": (words, scales, zeros.roll(1, 1)),
            "scales one bit off": (words, (scales.view(torch.int16) ^ 1).view(scales.dtype), zeros),
        }
        for name, (codes, *rest) in planted.items():
            out = torch.empty_like(expected)
            triton_gemm.gemm_sm90_swap_ab(x, codes.t(), None, out, reduction, tile, True, spec, rest)
            assert (out != expected).double().mean() > 0.2, name


def test_a_layer_has_the_bits_of_its_matrix_at_every_size_and_when_its_weight_is_replaced():
    n, k, spec = 1024, 2048, MatmulSpec(NONE, 1, SYMMETRIC)
    x, stored = draw(SYMMETRIC, n, k, torch.bfloat16)
    prepare(stored[0], 1100, spec, sizes=(1, 100), dtype=x.dtype)
    for seed in range(3):
        _, new = draw(SYMMETRIC, n, k, torch.bfloat16)
        for tensor, other in zip(stored, new, strict=True):
            tensor.copy_(other.roll(seed, 0))
        whole = sequential_k(x, matrix(SYMMETRIC, stored, x.dtype))
        torch.cuda.synchronize()  # a call may read its weight before the kernel before has ended
        for m in (1, 2, 8, 9, 100, 128, 129, 256, 300, 1031):
            got = matmul(x[:m], stored[0], spec, None, True, stored[1:])
            assert_same_bits(got, whole[:m], f"{m} rows, weight {seed}")


def test_the_kernel_that_decodes_has_the_bits_of_the_definition():
    for group, zeros, dtype in product(SHAPES, (False, True), (torch.bfloat16, torch.float16)):
        b_format = integers(4, group, zeros, False)
        x, stored = draw(b_format, *SHAPES[group], dtype)
        assert_same_bits(
            b_format.matrix(stored[0].t(), stored[1:], x).t(), matrix(b_format, stored, dtype), b_format.name
        )

"""Tiles of GEMMs on a GPU, chosen for GPUs that need not be there."""

from itertools import product
from types import SimpleNamespace

import pytest
import torch

from tests.assertions import DTYPES, ROW_COUNTS
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.common.nvidia_gpus import COMPILED_FOR
from vllm_batch_invariant.ops.formats import integers
from vllm_batch_invariant.ops.linear import LinearReduction, MatmulSpec, schedule
from vllm_batch_invariant.ops.linear.problem import GemmProblem
from vllm_batch_invariant.ops.linear.spec import NONE

RESERVED = 1024
"""Bytes of a multiprocessor's shared memory that a program takes beside its own."""
HOPPER = Gpu("Hopper", 132, 232_448, True, 60 << 20, True)
AMPERE = Gpu("Ampere", 108, 166_912, False, 40 << 20, False)
DESKTOP = Gpu("desktop Blackwell", 170, 101_376, True, 96 << 20, False)
BLACKWELL = Gpu("Blackwell", 148, 232_448, True, 126 << 20, False, True)
SHAPES = ((896, 4864), (6144, 4096), (151_936, 1024), (8, 16), (1, 1), (100, 300))
ROWS = (*ROW_COUNTS, 4096, 8192, 1 << 20, 2**31 - 1)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("gpu", [HOPPER, AMPERE, DESKTOP, BLACKWELL], ids=lambda gpu: gpu.name)
def test_a_ptr_tile_is_one_of_those_that_tests_compare(gpu: Gpu, dtype: torch.dtype) -> None:
    known = {(tile.block_m, tile.block_n, tile.block_k, tile.num_warps): tile for tile in schedule.ptr_tiles(dtype)}
    for m, (n, _) in product(ROWS, SHAPES):
        tile = schedule.ptr_tile(m, n, dtype, gpu)
        listed = known[tile.block_m, tile.block_n, tile.block_k, tile.num_warps]
        assert 2 <= tile.num_stages <= listed.num_stages
        assert tile.num_stages * dtype.itemsize * (tile.block_m + tile.block_n) * tile.block_k <= gpu.shared_memory
        if gpu is HOPPER:
            assert tile == listed


@pytest.mark.parametrize("out_bytes", [2, 4])
@pytest.mark.parametrize("gpu", [HOPPER, DESKTOP], ids=lambda gpu: gpu.name)
def test_a_tma_tile_is_listed_and_fits_in_shared_memory(gpu: Gpu, out_bytes: int) -> None:
    listed = schedule.tma_tiles(out_bytes, gpu)
    assert listed
    for tile in listed:
        step = 2 * (tile.block_m + tile.block_n) * tile.block_k
        assert tile.num_stages >= 2
        assert tile.num_stages * step + tile.block_m * tile.block_n * out_bytes < gpu.shared_memory
        assert (tile.num_stages + 1) * step + tile.block_m * tile.block_n * out_bytes + 1024 > gpu.shared_memory
    for m, (n, k) in product(ROWS, SHAPES):
        assert schedule.tma_tile(m, n, k, out_bytes, gpu) in listed


def test_every_tma_tile_has_its_use() -> None:
    used = {
        schedule.tma_tile(m, n, k, 2, HOPPER)
        for m in (*ROW_COUNTS, 512, 2048, 4096, 8192)
        for n, k in ((896, 4864), (6144, 4096), (2560, 2560), (24_576, 4096), (151_936, 1024))
    }
    assert used == set(schedule.tma_tiles(2, HOPPER))


@pytest.mark.parametrize("gpu", [HOPPER, AMPERE, DESKTOP, BLACKWELL], ids=lambda gpu: gpu.name)
def test_narrow_tiles_are_proposed_for_few_rows_on_a_hopper(gpu: Gpu) -> None:
    for m, n in product((*ROWS, 129), (8, 896, 1280, 2048, 4096, 4224, 4232, 151_936)):
        proposed = schedule.narrow_tiles(m, n, gpu)
        if gpu is not HOPPER or m > 128:
            assert proposed == ()
            continue
        for tile in schedule.NARROW_TILES:
            programs = len(range(0, m, tile.block_m)) * len(range(0, n, tile.block_n))
            has_own = programs <= 132
            is_of_size = tile.block_n == 64 and tile.block_m < 2 * max(m, 9) <= 4 * tile.block_m
            assert (tile in proposed) == (has_own or is_of_size), (m, n, tile)


def test_every_narrow_tile_is_proposed_for_the_gemms_that_it_won() -> None:
    def names(m: int, n: int) -> list[tuple[int, int]]:
        return [(tile.block_m, tile.block_n) for tile in schedule.narrow_tiles(m, n, HOPPER)]

    assert (32, 64) in names(128, 1280)
    assert (128, 64) in names(128, 2048)
    assert (64, 64) in names(64, 25_600)
    assert (16, 16) in names(16, 1280)
    assert (16, 16) in names(1, 896)
    assert (16, 32) in names(1, 2048)
    assert names(8, 24_576) == [(16, 64), (16, 64)]


def test_a_narrow_tile_fills_shared_memory_with_all_of_the_long_side() -> None:
    for tile in schedule.NARROW_TILES:
        step = 2 * (tile.block_m + 64) * tile.block_k
        barriers = 2 * 8 * tile.num_stages
        assert tile.block_n <= 64
        room = (HOPPER.shared_memory + RESERVED) // tile.ctas_per_sm - RESERVED
        assert tile.num_stages * step + barriers < room < (tile.num_stages + 1) * step + barriers


def test_gated_tiles_are_proposed_for_few_rows_on_a_hopper() -> None:
    for m in (m for m in ROWS if m <= 128):
        sides = {tile.block_m for tile in schedule.gated_tiles(m, HOPPER)}
        side = 2 ** max(4, (m - 1).bit_length())
        assert sides == {side, side // 2} - {8}, m
    assert schedule.gated_tiles(129, HOPPER) == schedule.gated_tiles(8, AMPERE) == ()
    assert {tile for m in (1, 32, 64, 128) for tile in schedule.gated_tiles(m, HOPPER)} == set(schedule.GATED_TILES)


def test_a_gated_tile_fits_into_shared_memory_and_has_64_columns_a_warpgroup() -> None:
    for tile in schedule.GATED_TILES:
        step = 2 * (tile.block_m + tile.block_n) * tile.block_k
        room = (HOPPER.shared_memory + RESERVED) // tile.ctas_per_sm - RESERVED
        assert tile.num_stages * step + 2 * 8 * tile.num_stages < room
        assert tile.block_n == 64 * tile.warpgroups


def packed(n: int, k: int, k_slices: int = 1) -> GemmProblem:
    return GemmProblem(n, k, torch.bfloat16, MatmulSpec(NONE, k_slices, integers(4, 128, False, False)), 0)


def test_a_packed_tile_fits_into_shared_memory_with_what_it_writes() -> None:
    for tile in schedule.PACKED_TILES:
        step = (2 * tile.block_m + tile.block_n // 2) * tile.block_k
        written = 2 * 64 * tile.block_n * 2 if tile.writes_blocks else 0
        room = (HOPPER.shared_memory + RESERVED) // tile.ctas_per_sm - RESERVED
        assert tile.num_stages * step + written + 2 * 8 * tile.num_stages < room, tile
        # two chunks behind the one that is multiplied are waited for before the place of the one before it is free
        assert tile.num_stages >= (4 if tile.block_k == 64 else 3)


def test_packed_tiles_are_proposed_for_every_number_of_rows_on_a_hopper() -> None:
    proposed = {m: schedule.sm90_tiles(packed(24_576, 4096), m, HOPPER) for m in (1, 16, 64, 128, 129, 256, 2048, 8192)}
    assert all(proposed.values())
    assert {tile.block_m for tile in proposed[8192]} == {128, 256}
    assert schedule.PACKED_TILES[-1] in proposed[8192]
    assert (128, 128) in {(tile.block_m, tile.block_n) for tile in proposed[256]}
    in_slices = packed(4096, 4096, 2)
    assert schedule.sm90_tiles(in_slices, 64, HOPPER)
    assert schedule.sm90_tiles(in_slices, 129, HOPPER) == schedule.sm90_tiles(packed(4096, 4096), 256, AMPERE) == ()


def test_few_rows_get_a_flat_tile_and_many_a_large_one() -> None:
    assert schedule.tma_tile(1, 6144, 4096, 2, HOPPER).block_m == 16
    assert schedule.tma_tile(8192, 6144, 4096, 2, HOPPER).block_m == 128
    assert schedule.ptr_tile(1, 6144, torch.bfloat16, HOPPER).block_m == 16
    assert schedule.ptr_tile(8192, 6144, torch.bfloat16, HOPPER).block_m == 128


@pytest.mark.parametrize("gpu", [HOPPER, DESKTOP], ids=lambda gpu: gpu.name)
def test_tiles_are_computed_again_only_where_multiprocessors_are_idle(gpu: Gpu) -> None:
    for tiles in range(1, 2 * gpu.num_sms):
        times = schedule.redundancy(tiles, gpu)
        assert times >= 1
        assert times == 1 or times * tiles < gpu.num_sms
    assert schedule.redundancy(20, HOPPER) == 2, "(1280, 8192) at one row"


def properties(major: int, minor: int) -> SimpleNamespace:
    return SimpleNamespace(
        name=f"GPU {major}.{minor}",
        major=major,
        minor=minor,
        multi_processor_count=132,
        shared_memory_per_block_optin=232_448,
        L2_cache_size=60 << 20,
    )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """Gives the machine GPUs of these compute capabilities."""

    def build(*capabilities: tuple[int, int]) -> None:
        Gpu.of.cache_clear()
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties(*capabilities[index]))

    yield build
    Gpu.of.cache_clear()


def test_a_gpu_below_8_0_is_refused_by_name(machine) -> None:
    machine((7, 5))
    with pytest.raises(NotCovered, match=r"GPU 7\.5: .*bf16; use a GPU of compute capability 8\.0 or above"):
        Gpu.of(0)


def test_tma_exists_from_9_0_on(machine) -> None:
    machine((8, 0), (8, 9), (9, 0), (12, 0))
    assert [Gpu.of(index).has_tma for index in range(4)] == [False, False, True, True]
    assert Gpu.of(2) == Gpu("GPU 9.0", 132, 232_448, True, 60 << 20, True, fp8_mma="sm90 wgmma")


@pytest.mark.parametrize("capability", [(8, 7), (8, 8), (10, 1), (11, 0), (12, 1), (13, 0)], ids=str)
def test_a_gpu_that_the_kernels_were_not_compiled_for_is_refused_by_name(capability, machine) -> None:
    machine(capability)
    major, minor = capability
    line = (
        f"batch-invariant mode does not cover GPU {major}.{minor} (compute capability {major}.{minor}): nobody has "
        "compiled and checked the kernels for it; use a GPU of compute capability 8.0, 8.6, 8.9, 9.0, 10.0, 10.3, 12.0."
    )
    with pytest.raises(NotCovered) as refused:
        Gpu.of(0)
    assert str(refused.value) == line


def test_the_gpus_that_the_kernels_were_compiled_for_are_covered(machine) -> None:
    machine(*COMPILED_FOR)
    assert [Gpu.of(index).name for index in range(len(COMPILED_FOR))] == [
        f"GPU {major}.{minor}" for major, minor in COMPILED_FOR
    ]


def test_a_gpu_with_two_kinds_of_tensor_core_instructions_has_tiles_for_one_of_them(machine) -> None:
    machine((9, 0), (10, 0), (10, 3), (12, 0))
    assert [Gpu.of(index).has_tcgen05 for index in range(4)] == [False, True, True, False]
    for dtype, m, (n, _) in product((torch.bfloat16, torch.float16), ROWS, SHAPES):
        assert schedule.ptr_tile(m, n, dtype, BLACKWELL).block_m >= 64
    # A tile of fewer rows is computed transposed.
    assert all(max(tile.block_m, tile.block_n) >= 64 for tile in schedule.tma_tiles(2, BLACKWELL))


def test_only_9_0_has_wgmma(machine) -> None:
    machine((8, 9), (9, 0), (10, 0), (12, 0))
    assert [Gpu.of(index).has_wgmma for index in range(4)] == [False, True, False, False]


def test_only_fp32_follows_the_setting_of_its_precision() -> None:
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    try:
        for setting, expected in (("none", "ieee"), ("ieee", "ieee"), ("tf32", "tf32")):
            settings.fp32_precision = setting
            assert LinearReduction.of_device("cuda", 8, 16, torch.float32).precision == expected
            for dtype in (torch.bfloat16, torch.float16, torch.float64):
                assert LinearReduction.of_device("cuda", 8, 16, dtype).precision == "ieee"
    finally:
        settings.fp32_precision = before


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.complex64], ids=str)
def test_other_dtypes_have_no_reduction(dtype: torch.dtype) -> None:
    with pytest.raises(NotCovered, match=f"a matmul in {dtype}.*use fp32, bf16, fp16 or fp64"):
        LinearReduction.of_device("cuda", 8, 16, dtype)

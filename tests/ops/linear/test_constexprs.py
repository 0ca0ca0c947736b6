"""Everything that the GEMM kernels are compiled for is named by the reduction, by a schedule or by the problem."""

from dataclasses import fields
from typing import Any

import pytest
import torch

from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.formats import Format
from vllm_batch_invariant.ops.linear import LinearReduction, schedule
from vllm_batch_invariant.ops.linear.schedule import NARROW_TILES, NarrowTile, Tile

pytest.importorskip("triton")

from vllm_batch_invariant.ops.common.dependent_launch import LaunchSchedule
from vllm_batch_invariant.ops.linear import sm90_kernel, triton_kernels
from vllm_batch_invariant.ops.linear.problem import GemmProblem
from vllm_batch_invariant.ops.linear.spec import Epilogue

KERNELS = {
    "ptr": (triton_kernels.gemm_ptr_kernel, Tile),
    "tma": (triton_kernels.gemm_tma_kernel, Tile),
    "sm90": (sm90_kernel.gemm_sm90_swap_ab_kernel, NarrowTile),
}
DERIVED = {"even_k"}
"""Whether K is a multiple of the schedule's ``block_k``: a mask less, which hides no element."""
HOPPER = Gpu("Hopper", 132, 232_448, True, 60 << 20, True)


def constexprs(kernel: Any) -> set[str]:
    return {parameter.name.lower() for parameter in kernel.params if parameter.is_constexpr}


def names(*types: type) -> set[str]:
    return {field.name for one in types for field in fields(one)}


@pytest.mark.parametrize("name", KERNELS)
def test_every_constexpr_is_a_field_of_the_reduction_the_schedule_or_the_problem(name: str) -> None:
    kernel, tile = KERNELS[name]
    found = constexprs(kernel)
    assert found - DERIVED <= names(LinearReduction, tile, GemmProblem, Epilogue, Format, LaunchSchedule)
    assert {"block_m", "block_n", "block_k", "accumulate"} <= found


def test_no_schedule_has_a_field_of_the_reductions_on_its_gpu() -> None:
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        reduction = LinearReduction.of_device("cuda", 8, 16, dtype)
        deciding = {field.name for field in fields(reduction) if getattr(reduction, field.name) is not None}
        assert not deciding & names(Tile, NarrowTile)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_tile_holds_whole_steps_of_the_sequential_accumulation(dtype: torch.dtype) -> None:
    step = LinearReduction.of_device("cuda", 8, 16, dtype).k_step
    tiles = [*schedule.ptr_tiles(dtype)]
    if dtype.itemsize == 2:
        tiles += [*NARROW_TILES, *schedule.tma_tiles(2, HOPPER), *schedule.tma_tiles(4, HOPPER)]
    assert all(tile.block_k % step == 0 for tile in tiles)


def test_a_reduction_names_what_is_in_force_on_each_device() -> None:
    def said(device_type: str, dtype: torch.dtype) -> dict[str, Any]:
        reduction = LinearReduction.of_device(device_type, 40, 96, dtype)
        found = {field.name: getattr(reduction, field.name) for field in fields(reduction)}
        assert (found.pop("n"), found.pop("k"), found.pop("dtype"), found.pop("k_slices")) == (40, 96, dtype, 1)
        return {name: value for name, value in found.items() if value is not None}

    fp32 = {"accumulate": torch.float32}
    alone, fused = {"precision": "ieee", "enable_fp_fusion": False}, {"precision": "ieee", "enable_fp_fusion": True}
    assert said("cuda", torch.bfloat16) == fp32 | alone | {"k_step": 16}
    assert said("cuda", torch.float32) == fp32 | fused | {"k_step": 1}
    assert said("cuda", torch.float64) == {"accumulate": torch.float64} | fused
    assert said("cpu", torch.float16) == fp32 | {"k_step": 1, "enable_fp_fusion": True}

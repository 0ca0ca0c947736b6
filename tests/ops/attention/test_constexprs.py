"""Every compile-time constant of the kernels of attention in Triton is in the reduction or a schedule, or is a part of
the problem.
"""

from dataclasses import fields, replace

import pytest
import torch

from vllm_batch_invariant.ops.attention import AttentionReduction

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from vllm_batch_invariant.ops.attention import plan, plan_kernels, triton_kernels
from vllm_batch_invariant.ops.attention.flex import kernels as flex_kernels
from vllm_batch_invariant.ops.attention.flex import plan as flex_plan

REDUCTION = {"SPLIT_SEGMENTS", "KEY_TILE"}
SCHEDULE = {"BLOCK_M", "DECODE_ROWS"}
"""Of ``Schedule``, and of ``Kernels``."""
PROBLEM = {
    "attention_kernel": {
        "NUM_KV_HEADS", "QUERIES_PER_KV", "HEAD_DIM", "PADDED_HEAD_DIM", "PAGE_SIZE", "USE_TMA", "USE_SOFT_CAP",
        "TAIL_DIM", "PADDED_TAIL_DIM",
        "PAGED", "HOLDS_CODES", "CONVERTS_E4M3", "USE_ALIBI", "USE_WINDOW", "USE_SINKS", "CAUSAL", "PREFILL_LIKE",
        "SCALES_OF_TOKENS", "MAY_SHARE", "PARTIAL_ROWS", "PARTIAL_BLOCK",
        "GROUP", "QUANTISE",  # of the codes of the result
    },
    "plan_kernel": {"NUM_KV_HEADS", "PADDED_KV_HEADS", "QUERIES_PER_KV", "WINDOW"},
}  # fmt: skip
"""Shapes, options and layouts of a call, and which of a plan's lists is worked on."""


@pytest.mark.parametrize(
    "kernel", [triton_kernels.attention_kernel, plan_kernels.plan_kernel], ids=lambda one: one.__name__
)
def test_every_constexpr_is_in_the_reduction_a_schedule_or_the_problem(kernel):
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter's functions do not list their parameters")
    constants = {one.name for one in kernel.params if one.is_constexpr}
    assert constants == PROBLEM[kernel.__name__] | REDUCTION | (constants & SCHEDULE)


FLEX_REDUCTION = {"SPLIT_SEGMENTS", "BLOCK_M", "BLOCK_N"}
"""``BLOCK_N`` is the key tile."""
FLEX_SCHEDULE = {"MAX_TILES", "WAVE", "MERGE_M"}
"""Room for a list, which half of a buffer is written, and rows that a program merges: no arithmetic follows them."""
FLEX_PROBLEM = {"NUM_KV_HEADS", "QUERIES_PER_KV", "HEAD_DIM", "PADDED_HEAD_DIM", "WINDOW", "USE_SINKS"}


@pytest.mark.parametrize("name", ["list_blocks", "list_items", "gather_rows", "merge_items"])
def test_every_constexpr_around_flex_attention_is_in_the_reduction_a_schedule_or_the_problem(name):
    kernel = getattr(flex_kernels, name)
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter's functions do not list their parameters")
    constants = {one.name for one in kernel.params if one.is_constexpr}
    assert constants <= FLEX_REDUCTION | FLEX_SCHEDULE | FLEX_PROBLEM
    assert constants & FLEX_REDUCTION


@pytest.mark.parametrize(("dtype", "block_m", "num_warps"), [(torch.bfloat16, 64, 4), (torch.float32, 16, 8)])
def test_the_block_of_flex_attention_is_the_reductions(dtype, block_m, num_warps):
    reduction = AttentionReduction.of_device("cuda", "flex")
    tile = flex_plan.tile_of(plan.AttentionShape(8, 2, 128, dtype, reduction))
    assert (tile.block_m, tile.num_warps) == (block_m, num_warps)
    other = replace(reduction, block_m=2 * reduction.block_m)
    assert flex_plan.tile_of(plan.AttentionShape(8, 2, 128, dtype, other)).block_m == 2 * block_m
    assert flex_plan.tile_of(plan.AttentionShape(8, 2, 128, dtype, AttentionReduction())) == tile


def test_what_is_named_is_a_field():
    of_reduction = {one.name for one in fields(AttentionReduction)} | {"split_segments"}
    of_schedules = {one.name for kind in (plan.Schedule, plan.Kernels) for one in fields(kind)}
    assert {name.lower() for name in REDUCTION} <= of_reduction
    assert {name.lower() for name in SCHEDULE} <= of_schedules


@pytest.mark.parametrize(
    ("itemsize", "head_size", "expected"), [(2, 64, 64), (4, 256, 32), (2, 256, 64), (2, 512, 32), (4, 512, 16)]
)
def test_fp32_and_large_heads_take_half_of_the_key_tile_and_no_tile_exceeds_a_split(itemsize, head_size, expected):
    assert AttentionReduction.of_device("cuda").key_tile_of(itemsize, head_size) == expected
    assert AttentionReduction(16).key_tile_of(itemsize, head_size) == 16
    assert AttentionReduction(key_tile=32).key_tile_of(itemsize, head_size) == max(expected // 2, 16)


@pytest.mark.parametrize("key_tile", [0, 16, 48])
def test_a_key_tile_is_a_power_of_two_of_at_least_32(key_tile):
    with pytest.raises(ValueError, match="key_tile must be a power of two of at least 32"):
        AttentionReduction(key_tile=key_tile)

"""Every compile-time constant of the Hopper kernels is in the reduction or a schedule, or is a part of the problem."""

from dataclasses import fields

import pytest

from vllm_batch_invariant.ops.attention import AttentionReduction

pytest.importorskip("triton")

from triton.runtime.jit import JITFunction

from vllm_batch_invariant.ops.attention.sm90 import DecodeSchedule, DecodeWork, PrefillSchedule, shapes
from vllm_batch_invariant.ops.attention.sm90.decode import decode_kernel
from vllm_batch_invariant.ops.attention.sm90.prefill import prefill_kernel
from vllm_batch_invariant.ops.common.dependent_launch import LaunchSchedule

REDUCTION = {"SPLIT_SEGMENTS"}
PROBLEM = {"NUM_KV_HEADS", "QUERIES_PER_KV", "HEAD_DIM", "PAGE_SIZE", "WINDOW"}
OF_ENCODERS = {"HEAD_SIZE", "CAUSAL"}
OF_CODES = {"GROUP", "QUANTISE"}
"""Of those of the result."""
PLANNED = {"PARTIAL_ROWS", "PARTIAL_BLOCK"}
KERNELS = [
    (prefill_kernel, (PrefillSchedule,), {"NUM_STAGES", "MAX_SPINS", "CONSUMER_MAXNREG"}, set(), OF_ENCODERS),
    (decode_kernel, (DecodeSchedule, LaunchSchedule), {"NUM_STAGES", "OVERLAPS"}, PLANNED, OF_CODES),
]
"""Each with its schedules, the constants that are in them, those that a plan decides, and those of its problem alone.
"""


@pytest.mark.parametrize(("kernel", "schedules", "scheduled", "planned", "own"), KERNELS, ids=["prefill", "decode"])
def test_every_constexpr_is_in_the_reduction_a_schedule_or_the_problem(kernel, schedules, scheduled, planned, own):
    if not isinstance(kernel, JITFunction):
        pytest.skip("the interpreter's functions do not list their parameters")
    constants = {one.name for one in kernel.params if one.is_constexpr}
    assert constants == REDUCTION | PROBLEM | own | scheduled | planned
    assert {name.lower() for name in scheduled} <= {one.name for schedule in schedules for one in fields(schedule)}
    assert {name.lower() for name in planned} - {"partial_block"} <= {one.name for one in fields(DecodeWork)}


def test_a_step_has_the_keys_that_the_reduction_says():
    assert AttentionReduction.of_device("cuda").key_tile == shapes.BLOCK_N

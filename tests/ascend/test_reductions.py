"""What decides the bits on an NPU is named by the reductions, which are found there as on every device."""

from dataclasses import fields

import pytest
import torch

from vllm_batch_invariant.ops.linear import LinearReduction
from vllm_batch_invariant.ops.linear.problem import GemmProblem
from vllm_batch_invariant.ops.norm import NormReduction
from vllm_batch_invariant.ops.reduce import SumReduction
from vllm_batch_invariant.ops.softmax import SoftmaxReduction


def test_every_constexpr_of_a_matmul_is_a_field_of_the_reduction_or_the_problem() -> None:
    pytest.importorskip("triton")
    from vllm_batch_invariant.ascend.ops import linear

    found = {parameter.name.lower() for parameter in linear._gemm_kernel.params if parameter.is_constexpr}
    assert found <= {field.name for one in (LinearReduction, GemmProblem) for field in fields(one)}
    assert {"block_m", "block_n", "k_step", "precision"} <= found


@pytest.mark.parametrize(("n", "block_n"), [(40, 128), (8192, 256)])
def test_the_reduction_of_a_matmul_names_its_tile(n: int, block_n: int) -> None:
    reduction = LinearReduction.of_device("npu", n, 96, torch.bfloat16)
    found = {field.name: getattr(reduction, field.name) for field in fields(reduction)}
    assert {name: value for name, value in found.items() if value is not None} == {
        "n": n,
        "k": 96,
        "dtype": torch.bfloat16,
        "accumulate": torch.float32,
        "k_slices": 1,
        "precision": "ieee",
        "k_step": 128,
        "block_m": 128,
        "block_n": block_n,
    }


@pytest.mark.parametrize(
    ("length", "blocks"), [(100, (128, 128, 128, 128)), (2048, (2048,) * 4), (151_936, (8192, 4096, 8192, 4096))]
)
def test_a_row_has_the_smallest_block_that_holds_it_or_the_largest_that_fits(
    length: int, blocks: tuple[int, ...]
) -> None:
    total = SumReduction.of_device("npu", length, torch.bfloat16)
    softmax = SoftmaxReduction.of_device("npu", length, torch.float32)
    norms = [NormReduction.of_device("npu", length, torch.bfloat16, residual) for residual in (False, True)]
    assert (total.block, softmax.block, *(norm.block for norm in norms)) == blocks
    assert (total.chunk, softmax.chunk, softmax.exp) == (1 << 16, None, "triton.language.exp")

"""Gradients of attention by the GPU's kernels, in Triton's interpreter, on the CPU."""

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.attention_backward.cases import draw, errors
from vllm_batch_invariant.ops.attention_backward import cuda

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3}
"""Relative error in norms. In fp16 weights are rounded before they are multiplied; the interpreter truncates to bf16.
"""
LENGTHS = (64, 1, 130, 7)
SCALE = 0.11


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (2, 2, 80), (2, 1, 256)])
def test_gradients_are_near_the_exact_ones(dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> None:
    tensors, cu_seqlens = draw(LENGTHS, heads, kv_heads, size, dtype)
    found = cuda.attention_backward(*tensors, cu_seqlens, SCALE)
    assert max(errors(found, tensors, cu_seqlens, SCALE)) < TOLERANCE[dtype]


def test_a_sequences_gradients_do_not_depend_on_the_others() -> None:
    tensors, cu_seqlens = draw(LENGTHS, 4, 2, 64, torch.float16)
    together = cuda.attention_backward(*tensors, cu_seqlens, SCALE)
    for number, length in enumerate(LENGTHS):
        rows = slice(cu_seqlens[number], cu_seqlens[number + 1])
        alone = cuda.attention_backward(*(tensor[rows] for tensor in tensors), [0, length], SCALE)
        for one, whole in zip(alone, together, strict=True):
            assert_same_bits(one, whole[rows], f"sequence {number}")


def test_sequences_that_are_not_told_apart_have_other_gradients() -> None:
    tensors, cu_seqlens = draw((64, 64), 4, 2, 64, torch.float16)
    apart = cuda.attention_backward(*tensors, cu_seqlens, SCALE)
    as_one = cuda.attention_backward(*tensors, [0, 128], SCALE)
    assert not any(torch.equal(one, other) for one, other in zip(apart, as_one, strict=True))

"""Gradients of attention on a GPU."""

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.attention_backward.cases import draw, errors
from vllm_batch_invariant.ops.attention_backward import attention_backward

TOLERANCE = {torch.float32: 2e-6, torch.float16: 6e-4, torch.bfloat16: 5e-3}
"""Relative error in norms: weights are rounded before they are multiplied."""
LENGTHS = (64, 1, 130, 7, 1000)
SCALE = 0.11


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (2, 2, 80), (8, 2, 128), (2, 1, 256)])
def test_gradients_are_near_the_exact_ones_and_follow_the_sequence_alone(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> None:
    tensors, cu_seqlens = draw(LENGTHS, heads, kv_heads, size, dtype, "cuda")
    together = attention_backward(*tensors, cu_seqlens, scale=SCALE)
    on_cpu = [tensor.cpu() for tensor in tensors]
    assert max(errors(tuple(one.cpu() for one in together), on_cpu, cu_seqlens, SCALE)) < TOLERANCE[dtype]
    for number, length in enumerate(LENGTHS):
        rows = slice(cu_seqlens[number], cu_seqlens[number + 1])
        alone = attention_backward(*(tensor[rows] for tensor in tensors), [0, length], scale=SCALE)
        for one, whole in zip(alone, together, strict=True):
            assert_same_bits(one, whole[rows], f"sequence {number}")


def test_sequences_that_are_not_told_apart_have_other_gradients() -> None:
    tensors, cu_seqlens = draw((64, 64), 4, 2, 64, torch.float16, "cuda")
    apart = attention_backward(*tensors, cu_seqlens, scale=SCALE)
    as_one = attention_backward(*tensors, [0, 128], scale=SCALE)
    assert not any(torch.equal(one, other) for one, other in zip(apart, as_one, strict=True))

"""Gradients of attention: near those of float64, and those of a sequence independent of the others."""

import pytest
import torch

from tests.assertions import DTYPES, assert_same_bits
from tests.ops.attention_backward.cases import draw, errors
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.ops import attention_backward as operation
from vllm_batch_invariant.ops.attention_backward import attention_backward

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
"""Relative error in norms: one rounding of the result, and sums in fp32."""
LENGTHS = (64, 1, 150, 65, 300, 7)
SCALE = 0.11


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(6, 2, 64), (3, 3, 80), (8, 1, 128)])
def test_gradients_are_near_the_exact_ones(dtype: torch.dtype, heads: int, kv_heads: int, size: int) -> None:
    tensors, cu_seqlens = draw(LENGTHS, heads, kv_heads, size, dtype)
    found = attention_backward(*tensors, cu_seqlens, scale=SCALE)
    assert [one.shape for one in found] == [tensor.shape for tensor in tensors[1:]]
    assert {one.dtype for one in found} == {dtype}
    assert max(errors(found, tensors, cu_seqlens, SCALE)) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(2, 2, 72), (6, 2, 80)])
def test_those_of_keys_of_both_directions_are_near_the_exact_ones(
    dtype: torch.dtype, heads: int, kv_heads: int, size: int
) -> None:
    tensors, cu_seqlens = draw(LENGTHS, heads, kv_heads, size, dtype)
    found = attention_backward(*tensors, cu_seqlens, scale=SCALE, causal=False)
    assert max(errors(found, tensors, cu_seqlens, SCALE, causal=False)) < TOLERANCE[dtype]
    assert min(errors(found, tensors, cu_seqlens, SCALE)) > 0.1, "causal ones are others"
    rows = slice(*cu_seqlens[2:4])
    alone = attention_backward(*(tensor[rows] for tensor in tensors), [0, LENGTHS[2]], scale=SCALE, causal=False)
    for one, whole in zip(alone, found, strict=True):
        assert_same_bits(one, whole[rows])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequences_gradients_do_not_depend_on_the_others(dtype: torch.dtype) -> None:
    tensors, cu_seqlens = draw(LENGTHS, 6, 2, 64, dtype)
    together = attention_backward(*tensors, cu_seqlens, scale=SCALE)
    for number, length in enumerate(LENGTHS):
        rows = slice(cu_seqlens[number], cu_seqlens[number + 1])
        alone = attention_backward(*(tensor[rows] for tensor in tensors), [0, length], scale=SCALE)
        for one, whole in zip(alone, together, strict=True):
            assert_same_bits(one, whole[rows], f"sequence {number}")


def test_sequences_that_are_not_told_apart_have_other_gradients() -> None:
    tensors, cu_seqlens = draw((64, 64), 6, 2, 64, torch.float32)
    apart = attention_backward(*tensors, cu_seqlens, scale=SCALE)
    as_one = attention_backward(*tensors, [0, 128], scale=SCALE)
    assert not any(torch.equal(one, other) for one, other in zip(apart, as_one, strict=True))


def test_the_mode_moves_no_bit() -> None:
    tensors, cu_seqlens = draw((70,), 6, 2, 64, torch.float32)
    outside = attention_backward(*tensors, cu_seqlens, scale=SCALE)
    with batch_invariant_mode():
        inside = attention_backward(*tensors, cu_seqlens, scale=SCALE)
    for one, other in zip(inside, outside, strict=True):
        assert_same_bits(one, other)


def test_no_tensor_holds_the_scores_of_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0

    def noting(scores: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        largest = max(largest, scores.numel())
        return softmax(scores)

    module = operation.implementation("attention_backward", torch.empty(0))
    softmax = module.softmax
    monkeypatch.setattr(module, "softmax", noting)
    tensors, cu_seqlens = draw((500,), 6, 2, 64, torch.float32)
    attention_backward(*tensors, cu_seqlens, scale=SCALE)
    block_m = operation.AttentionBackwardReduction.of_device("cpu", 64, torch.float32).block_m
    assert largest == 6 * block_m * 448 < 6 * 500 * 500


def test_no_sequences_and_empty_ones_have_no_gradients() -> None:
    tensors, _ = draw((3,), 6, 2, 64, torch.float32)
    alone = attention_backward(*tensors, [0, 3], scale=SCALE)
    for one, other in zip(attention_backward(*tensors, [0, 0, 3, 3], scale=SCALE), alone, strict=True):
        assert_same_bits(one, other)
    empty = [tensor[:0] for tensor in tensors]
    assert all(len(one) == 0 for one in attention_backward(*empty, [0], scale=SCALE))


@pytest.mark.parametrize("bounds", [[0, 2], [1, 3], [0, 2, 1, 3], []])
def test_sequences_that_do_not_fit_are_refused(bounds: list[int]) -> None:
    tensors, _ = draw((3,), 6, 2, 64, torch.float32)
    with pytest.raises(ValueError, match="cannot begin at"):
        attention_backward(*tensors, bounds, scale=SCALE)


def test_tensors_that_do_not_fit_are_refused() -> None:
    (grad, query, key, value), bounds = draw((3,), 6, 4, 64, torch.float32)
    for tensors in ((grad, query, key, value), (grad[:, :4], query[:, :4], key.half(), value)):
        with pytest.raises(ValueError, match="that fit, got"):
            attention_backward(*tensors, bounds, scale=SCALE)

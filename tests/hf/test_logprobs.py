"""token_logprobs: the mode's log_softmax at the tokens, with its gradient."""

import pytest
import torch

from tests.bits import DTYPES, assert_near, assert_same_bits
from tests.hf.models import DEVICE
from vllm_batch_invariant.hf import token_logprobs
from vllm_batch_invariant.hf.logprobs import as_in_the_engine
from vllm_batch_invariant.ops import softmax

TOKENS = torch.tensor([[0, 7, 299], [5, 5, 1]], device=DEVICE)


def logits(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(2, 3, 300, generator=generator)).to(DEVICE, dtype)


@pytest.mark.skipif(DEVICE == "cuda", reason="there vLLM's kernel computes them")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_they_are_the_modes_log_softmax(dtype: torch.dtype) -> None:
    whole = softmax.log_softmax(logits(dtype), dtype=torch.float32)
    assert_same_bits(token_logprobs(logits(dtype), TOKENS), whole.gather(-1, TOKENS[..., None])[..., 0])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_value_and_gradient_are_near_to_the_exact_ones(dtype: torch.dtype) -> None:
    ours, exact = logits(dtype).requires_grad_(), logits(dtype).double().requires_grad_()
    weights = torch.arange(1.0, 7.0, device=DEVICE).view(2, 3)
    found = token_logprobs(ours, TOKENS)
    expected = torch.log_softmax(exact, -1).gather(-1, TOKENS[..., None])[..., 0]
    assert_near(found, expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_near(ours.grad, exact.grad)


def test_a_row_does_not_depend_on_the_others() -> None:
    whole = token_logprobs(logits(torch.bfloat16), TOKENS)
    assert_same_bits(token_logprobs(logits(torch.bfloat16)[1:, 2:], TOKENS[1:, 2:]), whole[1:, 2:])


def test_logits_are_given_to_vllms_kernel_with_the_alignment_of_an_engines() -> None:
    held = torch.randn(9, 320).to(DEVICE, torch.bfloat16)[:, :299]
    assert as_in_the_engine(held).data_ptr() == held.data_ptr()
    packed = held.contiguous()
    others = packed, packed[3], packed.view(3, 3, 299)[:, :-1], packed.t().contiguous().t(), held[0].expand(5, -1)
    for logits in others:
        rows = as_in_the_engine(logits)
        assert_same_bits(rows, logits.reshape(-1, 299))
        assert rows.stride(1) == 1
        assert rows.stride(0) % 16 == rows.data_ptr() % 16 == 0


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="takes logits"):
        token_logprobs(logits(torch.float32), TOKENS[0])

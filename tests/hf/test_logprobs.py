"""token_logprobs: the mode's log_softmax at the tokens, with its gradient."""

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from tests.hf.models import DEVICE
from vllm_batch_invariant.hf import token_logprobs
from vllm_batch_invariant.ops import softmax

TOKENS = torch.tensor([[0, 7, 299], [5, 5, 1]], device=DEVICE)


def logits(dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return (3 * torch.randn(2, 3, 300, generator=generator)).to(DEVICE, dtype)


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


def test_how_logits_lie_in_memory_moves_no_bit() -> None:
    held = torch.randn(9, 320, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)[:, :299]
    chosen = torch.arange(9, device=DEVICE)
    alone = token_logprobs(held.contiguous(), chosen)
    for logits in (held, held.t().contiguous().t(), torch.cat((held[:, :1], held), 1)[:, 1:]):
        assert_same_bits(token_logprobs(logits, chosen), alone)


def test_shapes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="takes logits"):
        token_logprobs(logits(torch.float32), TOKENS[0])

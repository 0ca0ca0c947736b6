"""token_logprobs: the mode's log_softmax at the tokens, with its gradient."""

import pytest
import torch

from tests.assertions import DTYPES, assert_near, assert_same_bits
from tests.hf.models import DEVICE
from vllm_batch_invariant.hf import Sampling, token_logprobs
from vllm_batch_invariant.hf.logprobs import MODES
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


SAMPLINGS = (
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.3, top_k=5),
    Sampling(top_p=0.8),
    Sampling(temperature=0.9, min_p=0.1),
    Sampling(temperature=1.1, top_k=20, top_p=0.9, min_p=0.02),
    Sampling(temperature=0.0, top_k=1),
)


def exactly_processed(exact: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """In float64, with the candidates that are kept taken from ours."""
    if sampling.temperature == 0:
        return exact
    every = torch.arange(exact.shape[-1], device=DEVICE).expand(exact.shape)
    wide = exact.detach().float().unsqueeze(-2).expand(*every.shape, -1)
    kept = token_logprobs(wide, every, mode="processed_logits", sampling=sampling)
    return (exact / sampling.temperature).masked_fill(kept.isinf(), -torch.inf)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_processed_ones_and_their_gradients_are_near_to_the_exact_ones(
    dtype: torch.dtype, mode: str, sampling: Sampling
) -> None:
    chosen = logits(dtype).argmax(-1)  # no filter takes it away
    ours, exact = logits(dtype).requires_grad_(), logits(dtype).double().requires_grad_()
    weights = torch.arange(1.0, 7.0, device=DEVICE).view(2, 3)
    found = token_logprobs(ours, chosen, mode=mode, sampling=sampling)
    processed = exactly_processed(exact, sampling)
    scores = processed.log_softmax(-1) if mode == "processed_logprobs" else processed
    expected = scores.gather(-1, chosen[..., None])[..., 0]
    assert_near(found, expected)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert_near(ours.grad, exact.grad)


def test_a_token_that_a_filter_took_away_has_no_chance_and_no_gradient() -> None:
    given = logits(torch.float32).requires_grad_()
    least = given.argmin(-1)
    for mode in ("processed_logprobs", "processed_logits"):
        found = token_logprobs(given, least, mode=mode, sampling=Sampling(top_k=2))
        assert (found == -torch.inf).all()
        [grad] = torch.autograd.grad(found.masked_fill(found.isinf(), 0.0).sum(), given, retain_graph=True)
        assert not grad.any()
        [grad] = torch.autograd.grad(found.sum(), given)
        assert not grad.any()


@pytest.mark.parametrize("mode", MODES)
def test_rows_beside_move_no_bit_under_any_mode(mode: str) -> None:
    sampling = {"sampling": SAMPLINGS[5]} if mode.startswith("processed") else {}
    many = torch.randn(130, 300, generator=torch.Generator().manual_seed(2)).to(DEVICE, torch.bfloat16)
    chosen = many.argmax(-1)
    whole = token_logprobs(many, chosen, mode=mode, **sampling)
    for row in (0, 63, 64, 129):
        assert_same_bits(token_logprobs(many[row], chosen[row], mode=mode, **sampling), whole[row])


def test_raw_logits_are_the_logits_in_fp32() -> None:
    given = logits(torch.bfloat16).requires_grad_()
    found = token_logprobs(given, TOKENS, mode="raw_logits")
    assert_same_bits(found, given.float().gather(-1, TOKENS[..., None])[..., 0])
    found.sum().backward()
    assert_same_bits(given.grad, torch.zeros_like(given).scatter_(-1, TOKENS[..., None], 1.0))


def test_parameters_that_would_be_ignored_or_refused_by_vllm_are_refused() -> None:
    given = logits(torch.float32)
    with pytest.raises(ValueError, match="come before Sampling"):
        token_logprobs(given, TOKENS, sampling=Sampling(temperature=0.5))
    with pytest.raises(ValueError, match="mode must be one of"):
        token_logprobs(given, TOKENS, mode="logprobs")
    for wrong in ({"temperature": -1.0}, {"top_p": 0.0}, {"min_p": 2.0}, {"top_k": -2}, {"temperature": float("nan")}):
        with pytest.raises(ValueError, match="vLLM takes no such parameters"):
            Sampling(**wrong)

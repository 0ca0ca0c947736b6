"""Answers that broke off elsewhere and go on here, with the bits of the unbroken one.

A request brings the tokens that its client already has (:data:`...resume.TOKENS` of ``extra_args``). They are made its
output before it is scheduled, so that it is what a preempted request is when it comes back: penalties, ``min_tokens``,
``max_tokens`` and bad words count them as output, a grammar has accepted them, stop strings are found across the break,
and a seeded request draws what it would have drawn next. Nothing of them is sent again.
"""

import logging
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch

from ...resume import TOKENS
from ..reviews import patch_points
from . import refusals

logger = logging.getLogger("vllm.batch_invariant")

_ROWS = 16
"""That draw at a time: with 150 000 logits each, 10 MB."""


def tokens_of(params: Any) -> list[int]:
    """The tokens that a request's answer has already, of vLLM's ``SamplingParams``; none of most requests."""
    return list((getattr(params, "extra_args", None) or {}).get(TOKENS) or ())


def install() -> None:
    """Hook into servers and engines of this process."""
    processor = patch_points.INPUT_PROCESSOR.get()
    processor.process_inputs = refusals.of_requests(processor.process_inputs, problem)
    request = patch_points.REQUEST.get()
    request.from_engine_core_request = classmethod(with_output(request.from_engine_core_request.__func__))
    state = patch_points.REQUEST_STATE.get()
    state.from_new_request = classmethod(with_text(state.from_new_request.__func__))
    manager = patch_points.STRUCTURED_OUTPUTS.get()
    manager._create_grammar = with_accepted_tokens(manager._create_grammar)


def install_in_worker() -> None:
    """Hook into the first model runner. The second one is told the output of every request that comes, and draws by
    place.
    """
    batch, runner = patch_points.INPUT_BATCH.get(), patch_points.MODEL_RUNNER.get()
    batch.add_request = with_output_in_the_batch(batch.add_request)
    runner._update_states = with_drawn_numbers(runner._update_states)


def problem(request: Any, config: Any) -> str:
    """The line by which a request of vLLM's is refused that cannot go on with the bits of the unbroken answer; empty if
    it can.
    """
    params = request.sampling_params
    is_resumed = TOKENS in (getattr(params, "extra_args", None) or {})
    found = objection(request, params, config) if is_resumed else ""
    return found and f"{TOKENS}: {found}"


def objection(request: Any, params: Any, config: Any) -> str:
    """Why an answer cannot go on; empty if it can.

    Args:
        request: vLLM's ``EngineCoreRequest``.
        params: its ``SamplingParams``.
        config: vLLM's configuration.
    """
    tokens, vocabulary = params.extra_args[TOKENS], config.model_config.get_vocab_size()
    if not isinstance(tokens, Sequence) or not all(type(one) is int and 0 <= one < vocabulary for one in tokens):
        return f"a list of token ids from 0 to {vocabulary - 1} is wanted"
    if request.prompt_token_ids is None or getattr(request, "prompt_embeds", None) is not None:
        return "a prompt of embeddings is not covered; send a prompt of text or of token ids"
    if len(tokens) >= params.max_tokens:
        return f"the answer has {len(tokens)} tokens, and ends at {params.max_tokens} (max_tokens)"
    if len(request.prompt_token_ids) + len(tokens) >= config.model_config.max_model_len:
        return "prompt and answer fill the context; the answer is complete"
    device, settings = config.device_config.device_type, config.structured_outputs_config
    has_grammar, again = params.structured_outputs is not None, "send the whole request again"
    for found, what, remedy in (
        (params.n != 1, f"n={params.n}", "ask for each sample by itself, with seed + i for sample i"),
        (params.output_kind != _deltas(params), "an answer in one piece", "set stream to true"),
        (params.prompt_logprobs is not None, "logprobs of the prompt", "take them from the first server"),
        (params.flat_logprobs, "flat_logprobs", "leave it out"),
        (getattr(params, "thinking_token_budget", None) is not None, "a thinking budget", again),
        (
            has_grammar and settings.reasoning_parser and not settings.enable_in_reasoning,
            "a grammar that begins behind thoughts",
            again,
        ),
        (has_grammar and not _fails_alone(), "a grammar with this vLLM", "use vLLM 0.32 or later"),
        (config.speculative_config is not None, "a server with drafts", again),
        (config.parallel_config.pipeline_parallel_size > 1, "a pipeline", "use a server with one stage"),
        (device not in ("cpu", "cuda"), f"a device of type {device}", "use a server on a CPU or a GPU"),
    ):
        if found:
            return f"{what} is not covered; {remedy}"
    return ""


def _deltas(params: Any) -> Any:
    return type(params.output_kind).DELTA


def _fails_alone() -> bool:
    """Whether a grammar that does not accept the tokens ends its request, and not the engine."""
    return "grammar_compile_error_reqs" in Path(patch_points.SCHEDULER.module().__file__ or "").read_text()


def with_output(from_request: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's constructor of an engine's request, which has the tokens as its output."""

    @wraps(from_request)
    def from_engine_core_request(cls: Any, *args: Any, **named: Any) -> Any:
        request = from_request(cls, *args, **named)
        if tokens := tokens_of(request.sampling_params):
            request.append_output_token_ids(tokens)
            # the prefix cache may have more than the prompt, with which vLLM's count of cached tokens ends the engine
            request.prefill_stats = None
        return request

    return from_engine_core_request


def with_output_in_the_batch(add_request: Callable[..., int]) -> Callable[..., int]:
    """vLLM's method that gives a request a row; the first time, the tokens are the output that it has."""

    @wraps(add_request)
    def add(self: Any, request: Any) -> int:
        if not request.output_token_ids:
            request.output_token_ids.extend(tokens_of(request.sampling_params))
        return add_request(self, request)

    return add


def with_drawn_numbers(update_states: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method that tells the runner of new requests, whose generators have drawn what they had for the tokens."""

    @wraps(update_states)
    def _update_states(self: Any, scheduler_output: Any) -> Any:
        new = [one for one in scheduler_output.scheduled_new_reqs if one.req_id not in self.requests]
        found = update_states(self, scheduler_output)
        for one in new:
            tokens, generator = tokens_of(one.sampling_params), self.requests[one.req_id].generator
            if tokens and generator is not None:
                advance(generator, len(tokens), self.sampler.topk_topp_sampler, self.input_batch.vocab_size)
        return found

    return _update_states


def advance(generator: torch.Generator, tokens: int, sampler: Callable[..., object], vocabulary: int) -> None:
    """Bring a request's generator to where it is after so many tokens, by drawing them: what a draw takes is the
    sampler's own, and there is no jump over it.

    Args:
        generator: as the request begins with it.
        tokens: how many have been sampled.
        sampler: vLLM's module, which draws for one row after the other.
        vocabulary: logits of a row.
    """
    for first in range(0, tokens, _ROWS):
        rows = min(_ROWS, tokens - first)
        logits = torch.zeros(rows, vocabulary, device=generator.device)
        sampler(logits, dict.fromkeys(range(rows), generator), None, None)


def with_text(from_request: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's constructor of what a server keeps of a request, which has the tokens' text: a character may end, and a
    stop string be complete, with the next one.
    """

    @wraps(from_request)
    def from_new_request(cls: Any, *args: Any, **named: Any) -> Any:
        state = from_request(cls, *args, **named)
        request = named["request"] if "request" in named else args[1]
        if tokens := tokens_of(request.sampling_params):
            for token in tokens:  # one at a time, as they came
                state.detokenizer.update([token], False)
                state.detokenizer.get_next_output_text(False, True)
            state.sent_tokens_offset = len(tokens)
            _tell_context(state.logprobs_processor, tokens)
        return state

    return from_new_request


def _tell_context(processor: Any, tokens: list[int]) -> None:
    """Have the last tokens be before the first new one, where the text of a listed token is completed by them."""
    if processor is not None and isinstance(processor.logprobs, list):
        processor.logprobs.extend({token: None} for token in tokens)


def with_accepted_tokens(create: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method that compiles a request's grammar, which has accepted the output that the request comes with.

    It then raises:
        ValueError: the grammar does not accept it.
    """

    @wraps(create)
    def _create_grammar(self: Any, request: Any) -> Any:
        grammar, tokens = create(self, request), tokens_of(request.sampling_params)
        if tokens and not grammar.accept_tokens(request.request_id, tokens):
            raise ValueError(f"{TOKENS}: the grammar of the request does not accept them")
        return grammar

    return _create_grammar

"""The one loop that steps an engine, and what its requests got, as plain data."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ..answers import spelled
from . import pooling


def _none_to_come() -> bool:
    return False


def drive(engine: Any, arrive: Callable[[], bool] = _none_to_come) -> Iterator[list[Any]]:
    """Step an engine until it has no request and none is to come; gives the outputs of each step.

    Args:
        engine: the ``llm_engine`` of a ``vllm.LLM``; it may have requests already.
        arrive: the schedule: called before each step, it adds and aborts requests and returns whether some are to come.
    """
    while arrive() or engine.has_unfinished_requests():
        yield engine.step()


def add_request(engine: Any, name: str, prompt: Any, params: Any, **more: Any) -> None:
    """Add a request, as the engine's ``add_request`` does. One that vLLM's core refuses is taken from its front end,
    too: the engine would have an unfinished request for ever.

    Raises:
        Exception: vLLM refuses it, by any exception.
    """
    try:
        engine.add_request(name, prompt, params, **more)
    except Exception:
        engine.abort_request([name])
        raise


def finished(steps: Iterable[list[Any]]) -> dict[str, Any]:
    """The last output of each request, by its name."""
    return {output.request_id: output for outputs in steps for output in outputs if output.finished}


def is_pooled(output: Any) -> bool:
    """Whether an output of an engine is that of a pooling model."""
    return hasattr(output.outputs, "data")


def bits(entry: dict[int, Any] | None) -> list[tuple[int, str, int]] | None:
    """The logprobs of one position as (token, exact value, rank) in vLLM's order, which begins with the token itself;
    None for the first position of a prompt.
    """
    return None if entry is None else [(token, spelled(item.logprob), item.rank) for token, item in entry.items()]


def described(completion: Any) -> dict[str, Any]:
    """A completion: its tokens and, if they were requested, logprobs; :func:`..answers.answer_of` reads it."""
    logprobs = None if completion.logprobs is None else [bits(entry) for entry in completion.logprobs]
    return {"text": completion.text, "tokens": list(completion.token_ids), "logprobs": logprobs}


def completions_of(output: Any) -> list[dict[str, Any]]:
    """The completions of a request, or the one thing that a pooling model gave."""
    if is_pooled(output):
        return [pooling.described(output.outputs.data)]
    return [*map(described, output.outputs)]


def describe(output: Any) -> dict[str, Any]:
    """The completions of a request, and the logprobs of its prompt if they were requested."""
    completions = completions_of(output)
    if is_pooled(output):
        return {"completions": completions, "cached": output.num_cached_tokens}
    prompt = output.prompt_logprobs
    return {
        "completions": completions,
        "prompt_logprobs": None if prompt is None else [*map(bits, prompt)],
        "cached": output.num_cached_tokens,
    }

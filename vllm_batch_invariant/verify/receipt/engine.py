"""Receipts of an engine in this process, ``vllm.LLM``: made of its outputs, and computed again on it."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from ...provenance import versions
from ..outcome import NoTestError
from ..request import NO_LOGPROBS
from .company import Company
from .comparison import Note, Verdict, notes_on, verdict_on
from .model_files import local_folder, model_at
from .record import Completion, Declared, Environment, Receipt, Sampling, environment_from_json

_SAY_NOTHING = {
    *("detokenize", "flat_logprobs", "include_stop_str_in_output", "output_kind", "output_text_buffer_length"),
    *("prompt_logprobs", "prompt_logprob_start", "prompt_logprob_token_ids", "routed_experts_prompt_start"),
    *("skip_clone", "skip_reading_prefix_cache", "skip_special_tokens", "spaces_between_special_tokens"),
    "stream_interval",
}
"""Fields of vLLM's ``SamplingParams`` that decide no output token and none of its logprobs."""
_numbers = itertools.count()


def make(output: Any, sampling: Any, declared: Declared, *, private: bool = False) -> Receipt:
    """The receipt of one finished completion.

    Args:
        output: vLLM's ``RequestOutput``, of a request with n = 1 and logprobs.
        sampling: vLLM's ``SamplingParams`` of the request.
        declared: what engine it was: of :func:`declared_by`. Where weights do not come from files, as in training,
            with a ``Model`` of your own.
        private: keep the sha256 of the prompt's token ids instead of the ids. The completion itself is kept.

    Raises:
        NoTestError: a request that nobody could repeat (no seed, no logprobs), or one with parameters that a receipt
            does not hold.
    """
    if output.prompt_token_ids is None or not output.finished or len(output.outputs) != 1:
        raise NoTestError("a receipt is of one finished completion of a prompt of tokens")
    token_ids = tuple(map(int, output.prompt_token_ids))
    return Receipt.of(declared, token_ids, sampling_of(sampling), completion_of(output.outputs[0]), private)


def declared_by(llm: Any) -> Declared:
    """What an engine is.

    The sha256 of a model's files takes a while at first (a gigabyte a second or so), and is kept by path, size and time
    of last change. It is of the files: weights that were changed in memory since are not seen.

    Args:
        llm: ``vllm.LLM``.
    """
    from ...integration import endpoint, install, patch_points

    config = llm.llm_engine.model_config
    name = str(Path(config.model).resolve()) if Path(config.model).is_dir() else config.model
    if llm.llm_engine.vllm_config.load_config.load_format == "dummy":
        model = model_at(None, name, "the engine made its weights up (--load-format dummy)")
    else:
        model = model_at(local_folder(config.model, config.revision), name)
    if patch_points.INIT_BATCH_INVARIANCE.get() is not install.install_worker:
        return Declared(model, Environment(mode=False, versions=versions(patch_points.installed_version())))
    return Declared(model, environment_from_json(llm.collective_rpc(endpoint.METHOD)[0]))


def verify(
    receipt: Receipt,
    llm: Any,
    *,
    company: int = 8,
    prompt_token_ids: Sequence[int] | None = None,
    before: Callable[[tuple[Note, ...]], None] = lambda _: None,
) -> Verdict:
    """Compute a receipt's completion again, among other requests, and compare it bit for bit.

    Args:
        llm: ``vllm.LLM`` with nothing to do: its steps are taken here.
        company: how many other requests run beside it. They come and go.
        prompt_token_ids: the prompt of a private receipt.
        before: is told in what the engine differs from the receipt's, before anything is computed.

    Raises:
        NoTestError: the prompt is missing or another one, the engine is busy or refuses the request, or no other
            request ran in a step with it.
    """
    prompt = receipt.prompt.ids(prompt_token_ids)
    notes = notes_on(receipt.declared, declared_by(llm), ("the receipt", "this engine"))
    before(notes)
    guests = Company(receipt, prompt, llm.llm_engine.model_config.max_model_len, company)
    got, beside = complete(llm, prompt, receipt.sampling, guests)
    guests.require(beside)
    return verdict_on(receipt, got, notes, beside)


def sampling_of(params: Any) -> Sampling:
    """vLLM's ``SamplingParams`` as a receipt has them.

    Raises:
        NoTestError: a parameter in use that a receipt does not hold.
    """
    if isinstance(params, Sampling):
        return params
    held = {field.name for field in fields(Sampling)}
    usual = type(params)()
    for name in type(params).__struct_fields__:
        if name in held or name in _SAY_NOTHING or name.startswith("_"):
            continue
        if getattr(params, name) != getattr(usual, name):
            raise NoTestError(f"a receipt does not hold the sampling parameter {name}={getattr(params, name)!r}")
    if params.logprobs is None or params.logprobs < 0:
        raise NoTestError("a receipt needs logprobs: sample with logprobs=5 or another number from 0 on")
    if params.max_tokens is None:
        raise NoTestError("a receipt needs max_tokens: without, the completion's length follows the engine's settings")
    values = {name: getattr(params, name) for name in held}
    values |= {
        "top_k": max(params.top_k, 0),
        "stop": tuple(params.stop),
        "stop_token_ids": tuple(params.stop_token_ids),
    }
    return Sampling(**values)


def completion_of(generated: Any) -> Completion:
    """vLLM's ``CompletionOutput`` as a receipt has it."""
    if not generated.logprobs:
        raise NoTestError(NO_LOGPROBS)
    positions = (
        (int(token), listed[token].logprob, [(int(other), item.logprob) for other, item in listed.items()])
        for token, listed in zip(generated.token_ids, generated.logprobs, strict=True)
    )
    return Completion.of(positions, str(generated.finish_reason))


def _vllm_sampling(sampling: Sampling) -> Any:
    from vllm import SamplingParams

    lists = {"stop": list(sampling.stop), "stop_token_ids": list(sampling.stop_token_ids)}
    return SamplingParams(**asdict(sampling) | lists, detokenize=bool(sampling.stop))


def complete(
    llm: Any, prompt: tuple[int, ...], sampling: Sampling, company: Company | None = None
) -> tuple[Completion, int]:
    """Take the engine's steps until a prompt is completed.

    Returns:
        The completion, and how many other requests got a token in a step in which it got one.

    Raises:
        NoTestError: the engine is busy, or refuses a request.
    """
    install = llm.llm_engine
    if install.has_unfinished_requests():
        raise NoTestError("the engine is busy: use one that has nothing to do")
    guests: set[str] = set()
    beside: set[str] = set()
    ours = ""

    def add(token_ids: Sequence[int], sampling: Sampling) -> str:
        name = f"receipt-{next(_numbers)}"
        try:
            install.add_request(name, {"prompt_token_ids": list(token_ids)}, _vllm_sampling(sampling))
        except ValueError as error:
            raise NoTestError(f"the engine refuses the request: {' '.join(str(error).split())}") from error
        return name

    try:
        outputs: dict[str, Any] = {}
        while True:
            while company and len(guests) < company.size:
                guest = company.guest()
                guests.add(add(guest.token_ids, guest.sampling))
            if not ours and (outputs or not guests):
                ours = add(prompt, sampling)
            outputs = {output.request_id: output for output in install.step()}
            if ours in outputs:
                beside |= outputs.keys() - {ours}
                if outputs[ours].finished:
                    return completion_of(outputs[ours].outputs[0]), len(beside)
            guests -= {name for name, output in outputs.items() if output.finished}
    finally:
        install.abort_request([name for name in (*guests, ours) if name])

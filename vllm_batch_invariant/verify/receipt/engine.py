"""Receipts on an engine in this process (``vllm.LLM``): made of its outputs, and computed again."""

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from ...provenance import versions
from ...seeds import SAMPLE_ID, sample_seed
from ..answers import NO_LOGPROBS
from ..harness import images
from ..harness.drive import add_request, drive
from ..outcome import NoTestError
from ..printing import one_line
from . import items
from .comparison import Note, Verdict, extent, notes_on, verdict_on
from .model_files import local_folder, model_at
from .record import (
    Adapter,
    Completion,
    EngineInfo,
    Environment,
    Item,
    Receipt,
    Sampling,
    TracedStep,
    environment_from_json,
)

_LONGEST = 400
"""Most tokens in the prompt of a concurrent request: prefill must overlap the completion without delaying it much."""


@dataclass(frozen=True)
class ConcurrentRequest:
    """A request that runs while the completion is computed again."""

    token_ids: tuple[int, ...]
    sampling: Sampling
    items: tuple[images.Item, ...] = ()


class Concurrent:
    """Requests of many lengths, made of parts of the receipt's own request, which every engine that serves it knows.

    Attributes:
        size: how many run at a time.
    """

    def __init__(self, seed: str, context: int, size: int) -> None:
        self.size, self._random, self._room = size, random.Random(seed), context - 1

    def _length(self) -> int:
        return self._random.randint(1, max(1, min(_LONGEST, self._room // 2)))

    def require(self, ran: int) -> None:
        """Refuse a run that was no test.

        Args:
            ran: how many of these requests ran at the same time as the target.

        Raises:
            NoTestError: requests were sent, and none ran at the same time.
        """
        if self.size and not ran:
            raise NoTestError(
                f"not a test: none of the {self.size} concurrent requests ran at the same time; does the engine run "
                "one request at a time? --concurrent 0 computes the target alone"
            )


class ConcurrentRequests(Concurrent):
    """Those beside a completion; every second one of a receipt with items has some, too."""

    def __init__(
        self,
        receipt: Receipt,
        prompt: tuple[int, ...],
        context: int,
        size: int,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Of an engine that takes so many tokens and items as :func:`.images.about` says."""
        super().__init__(receipt.sha256, context, size)
        of_items = {place for item in receipt.items for place in range(item.at, item.at + item.tokens)}
        text = [token for place, token in enumerate(prompt) if place not in of_items]
        written = {prompt[place] for place in of_items}
        answered = [token for token in receipt.completion.token_ids if token not in written]
        self._tokens = (*text, *answered) or (0,)
        self._about, self._count = about or {}, 0
        self._output = len(receipt.completion.token_ids)

    def next(self) -> ConcurrentRequest:
        """The next request."""
        length = self._length()
        output = self._random.randint(2, max(2, min(self._output + 16, self._room - length)))
        sampling = Sampling(max_tokens=output, ignore_eos=True, logprobs=0)
        tokens, self._count = tuple(self._random.choices(self._tokens, k=length)), self._count + 1
        if not self._about or self._count % 2:
            return ConcurrentRequest(tokens, sampling)
        drawn = images.draw(self._random, self._about, length, self._room - length - output)
        return ConcurrentRequest(tokens, sampling, tuple(drawn))


_NOT_RECORDED = {
    *("detokenize", "flat_logprobs", "include_stop_str_in_output", "output_kind", "output_text_buffer_length"),
    *("prompt_logprobs", "prompt_logprob_start", "prompt_logprob_token_ids", "routed_experts_prompt_start"),
    *("skip_clone", "skip_reading_prefix_cache", "skip_special_tokens", "spaces_between_special_tokens"),
    "stream_interval",
}
"""Fields of vLLM's ``SamplingParams`` that decide no output token and no logprob of one."""
WITH_ITEMS = (
    "the prompt has tokens of images, videos or sounds: a receipt needs what they were made into, "
    "items=receipt.items_of(llm, prompt, output)"
)
_OF_ITEMS = ("image_token_id", "image_token_index", "video_token_id", "audio_token_id", "audio_token_index")
"""What configurations call the tokens that stand for images, videos and sounds in a prompt."""
_AUDIO_ALONE = "a receipt is of a prompt of tokens, and this model answers about audio alone"
NUMBERS = itertools.count()
"""Of the requests of receipts in this process."""


def make(
    output: Any, sampling: Any, info: EngineInfo, *, private: bool = False, items: tuple[Item, ...] = ()
) -> Receipt:
    """The receipt of one finished completion.

    Args:
        output: vLLM's ``RequestOutput``, of a request with n = 1 and logprobs.
        sampling: vLLM's ``SamplingParams`` of the request.
        info: :func:`engine_info` of the engine. If its weights do not come from files, as in training, with a ``Model``
            of your own.
        private: keep the sha256 of the prompt's token ids instead of the ids. The completion itself is kept.
        items: :func:`.items.items_of` of a request with images, videos or sounds.

    Raises:
        NoTestError: the request cannot be repeated (no seed, no logprobs), or has parameters that a receipt does not
            hold; the files of its adapter are not there.
    """
    if output.prompt_token_ids is None or not output.finished or len(output.outputs) != 1:
        raise NoTestError("a receipt is of one finished completion of a prompt of tokens")
    token_ids = tuple(map(int, output.prompt_token_ids))
    if info.of_items & {*token_ids} and not items:
        raise NoTestError(WITH_ITEMS)
    info = replace(info, adapter=adapter_of(output.lora_request))
    return Receipt.of(info, token_ids, sampling_of(sampling), completion_of(output.outputs[0]), private, items=items)


def adapter_of(lora_request: Any) -> Adapter | None:
    """vLLM's ``LoRARequest`` as a receipt has it, of the files that are there now; None of none.

    Raises:
        NoTestError: they are not there.
    """
    if lora_request is None:
        return None
    from ...integration.engine.adapters import digest_of

    try:
        return Adapter(lora_request.lora_name, digest_of(lora_request.lora_path))
    except ValueError as error:
        raise NoTestError(one_line(error)) from error


def engine_info(llm: Any) -> EngineInfo:
    """Model and environment of an engine.

    The sha256 of a model's files takes a while at first, about a second a gigabyte. It is cached by path, size and time
    of last change. It is of the files: changes of weights in memory are not seen.

    Args:
        llm: ``vllm.LLM``.

    Raises:
        NoTestError: its prompts are no tokens (Whisper).
    """
    from ...integration.engine import endpoint, install
    from ...integration.reviews import patch_points

    config = llm.llm_engine.model_config
    if config.is_encoder_decoder:
        raise NoTestError(_AUDIO_ALONE)
    name = str(Path(config.model).resolve()) if Path(config.model).is_dir() else config.model
    if llm.llm_engine.vllm_config.load_config.load_format == "dummy":
        model = model_at(None, name, "the engine made its weights up (--load-format dummy)")
    else:
        model = model_at(local_folder(config.model, config.revision), name)
    asked = (getattr(config.hf_config, name, None) for name in _OF_ITEMS)
    of_items = frozenset(token for token in asked if isinstance(token, int))
    if patch_points.INIT_BATCH_INVARIANCE.get() is not install.install_worker:
        environment = Environment(mode=False, versions=versions(patch_points.installed_version()))
        return EngineInfo(model, environment, of_items)
    environment = environment_from_json(endpoint.of_workers(llm.collective_rpc(endpoint.METHOD)))
    return EngineInfo(model, environment, of_items)


def verify(
    receipt: Receipt,
    llm: Any,
    *,
    concurrent: int = 8,
    prompt_token_ids: Sequence[int] | None = None,
    before: Callable[[tuple[Note, ...]], None] = lambda _: None,
    lora_request: Any = None,
    multi_modal_data: Mapping[str, Any] | None = None,
) -> Verdict:
    """Compute a receipt's completion again with concurrent requests, and compare it bit for bit.

    Args:
        llm: an idle ``vllm.LLM``, which is stepped here.
        concurrent: number of concurrent requests. They come and go.
        prompt_token_ids: the prompt of a private receipt.
        before: is called first, with the differences between this engine and the receipt's.
        lora_request: vLLM's, of the adapter, where the receipt has one. Every second concurrent request has it, too.
        multi_modal_data: vLLM's, of a receipt with items: by kind one or several, in the order of the prompt. Where
            one is made into another tensor than the receipt's, nothing is computed.

    Raises:
        NoTestError: the prompt is missing or another one, the receipt has an adapter or items and none are given or
            the other way round, the engine is busy or refuses the request, or no concurrent request ran in the same
            step.
    """
    require_adapter(receipt, lora_request is not None)
    data = {kind: one if isinstance(one, list) else [one] for kind, one in (multi_modal_data or {}).items()}
    items.require(receipt, [kind for kind, those in data.items() for _ in those])
    if not data:
        receipt.prompt.ids(prompt_token_ids)
    info = engine_info(llm).asked_for(adapter_of(lora_request))
    notes = notes_on(receipt.info, info, ("the receipt", "this engine"))
    before(notes)
    drawn = images.about(llm) if data and concurrent else {}
    asked: dict[str, Any] = {}
    if data:
        asked, difference = items.prompt_of(llm, receipt, prompt_token_ids, data)
        if difference is not None:
            return Verdict(notes, difference, extent(receipt))
    prompt = receipt.prompt.ids(prompt_token_ids)
    asked = asked or {"prompt_token_ids": list(prompt)}
    others = ConcurrentRequests(receipt, prompt, llm.llm_engine.model_config.max_model_len, concurrent, drawn)
    got, ran = complete(llm, asked, receipt.sampling, others, lora_request)
    others.require(ran)
    return verdict_on(receipt, got, notes, ran, concurrent)


def require_adapter(receipt: Receipt, is_given: bool) -> None:
    """Refuse to compute a receipt again with an adapter where it has none, or without where it has one.

    Raises:
        NoTestError: it is so.
    """
    if receipt.adapter is not None and not is_given:
        name, digest = receipt.adapter.name, receipt.adapter.digest[:12]
        raise NoTestError(f"the completion has the LoRA adapter {name} (sha256 {digest}): give its folder, --adapter")
    if receipt.adapter is None and is_given:
        raise NoTestError("the receipt's completion has no LoRA adapter: leave --adapter out")


def sampling_of(params: Any) -> Sampling:
    """vLLM's ``SamplingParams`` as a receipt has them: with the seed that a sample had, instead of its id.

    Raises:
        NoTestError: a parameter in use that a receipt does not hold.
    """
    if isinstance(params, Sampling):
        return params
    if SAMPLE_ID in (params.extra_args or {}):
        params, others = copy(params), dict(params.extra_args)
        sample_id = others.pop(SAMPLE_ID)
        params.extra_args = others or None
        if params.seed is not None and params.temperature > 0:
            params.seed = sample_seed(params.seed, sample_id)
    held = {field.name for field in fields(Sampling)}
    usual = type(params)()
    for name in type(params).__struct_fields__:
        if name in held or name in _NOT_RECORDED or name.startswith("_"):
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


def traced(
    llm: Any, prompt: Sequence[int] | Mapping[str, Any], sampling: Sampling, lora_request: Any = None
) -> tuple[Completion, tuple[TracedStep, ...]]:
    """A completion alone, and what every layer made of it. The engine has the worker extension of ``bisect``.

    Raises:
        NoTestError: as for :func:`complete`, or several workers share the model.
    """
    from ..bisect.recording import MODULE_OUTPUT, RecordedStep

    llm.collective_rpc("bisect_begin", args=("receipt", False, None))
    completion, _ = complete(llm, prompt, sampling, lora_request=lora_request)
    workers = llm.collective_rpc("bisect_end")
    problem = next((worker["problem"] for worker in workers if worker["problem"]), None)
    if problem or len(workers) > 1:
        raise NoTestError(problem or "a trace is of one worker, and several share this model")
    steps = map(RecordedStep.from_plain, workers[0]["steps"])
    return completion, tuple(
        TracedStep(
            step.position,
            step.rows,
            {
                record.key.module: record.slices[0].digest.hex()[:16]
                for record in step.records
                if record.key.operation == MODULE_OUTPUT and not record.key.output + record.key.call and record.slices
            },
        )
        for step in steps
    )


def complete(
    llm: Any,
    prompt: Sequence[int] | Mapping[str, Any],
    sampling: Sampling,
    others: ConcurrentRequests | None = None,
    lora_request: Any = None,
) -> tuple[Completion, int]:
    """Step the engine until a prompt is completed, with an adapter if one is given.

    Args:
        prompt: tokens, or what vLLM takes.

    Returns:
        The completion, and how many concurrent requests got a token in a step in which it got one.

    Raises:
        NoTestError: the engine is busy, or refuses a request.
    """
    engine = llm.llm_engine
    if engine.has_unfinished_requests():
        raise NoTestError("the engine is busy: use an idle one")
    running: set[str] = set()
    concurrent: set[str] = set()
    seen: dict[str, Any] = {}
    target = ""

    def add(prompt: Sequence[int] | Mapping[str, Any], sampling: Sampling, lora_request: Any) -> str:
        name = f"receipt-{next(NUMBERS)}"
        given = prompt if isinstance(prompt, Mapping) else {"prompt_token_ids": list(prompt)}
        try:
            add_request(engine, name, given, _vllm_sampling(sampling), lora_request=lora_request)
        except Exception as error:  # vLLM refuses a request by any exception
            raise NoTestError(f"the engine refuses the request: {one_line(error)}") from error
        return name

    def arrive() -> bool:
        nonlocal target
        while others and len(running) < others.size:
            one = others.next()
            beside = images.prompt_of(llm, one.token_ids, one.items)
            running.add(add(beside, one.sampling, lora_request if len(running) % 2 else None))
        if not target and (seen or not running):
            target = add(prompt, sampling, lora_request)
        return True

    try:
        for outputs in drive(engine, arrive):
            seen = {output.request_id: output for output in outputs}
            if target in seen:
                concurrent |= seen.keys() - {target}
                if seen[target].finished:
                    break
            running -= {name for name, output in seen.items() if output.finished}
        return completion_of(seen[target].outputs[0]), len(concurrent)
    finally:
        engine.abort_request([name for name in (*running, target) if name])

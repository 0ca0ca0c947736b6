"""Runs a target request alone and with concurrent requests through an engine that records, and finds the divergence."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...envs import FLAG, UNTRIED
from ..answers import Answer, answer_of, first_difference
from ..harness import images
from ..harness.drive import completions_of, drive, finished
from ..harness.engine import lora_request_of, request_params
from ..harness.mode import of_engine
from ..outcome import NoTestError, Status
from .recording import Coverage, OutputDivergence, RecordedStep, Slice, first_divergence

if TYPE_CHECKING:
    import torch

    from ...compare import Comparison

REQUEST = "bisect"
WORKER_EXTENSION = "vllm_batch_invariant.verify.bisect.recorder.WorkerExtension"
ENGINE_ARGUMENTS = ("--enforce-eager", "--no-enable-prefix-caching", "--worker-extension-cls", WORKER_EXTENSION)
"""Arguments of the engine: hooks do not see inside compiled graphs and CUDA graphs, and every run must compute the
prompt.
"""


@dataclass(frozen=True)
class Case:
    """A target request and the concurrent requests, in token ids of their texts."""

    prompt: tuple[int, ...]
    concurrent: tuple[tuple[int, ...], ...]
    place: int
    """Concurrent requests that come before it."""
    max_tokens: int
    logprobs: int = 5
    adapter: str = ""
    """Folder of the LoRA adapter that the target request has; empty for none."""
    adapters: tuple[str, ...] = ()
    """Those of the concurrent requests, empty for none, or for one without."""
    items: tuple[Mapping[str, Any], ...] = ()
    """Images and sounds of the target request."""
    others_items: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """Those of the concurrent requests, empty for none."""
    pooling: Mapping[str, Any] = field(default_factory=dict)
    """What all requests ask of a model that pools, arguments of vLLM's ``PoolingParams``; empty for one that generates.
    Such a case generates one token in the place of the vector.
    """


@dataclass(frozen=True)
class Found:
    """The first output whose bits differ, compared element by element."""

    divergence: OutputDivergence
    rank: int
    """Of the worker: the lowest of those whose output differs there, in the first stage of a pipeline that has one."""
    workers: int
    """How many the engine has."""
    position: int
    """Of the request's first token in that step."""
    rows: int
    """Tokens of the request in that step."""
    output_token: int | None
    """The token that the step computes; None in a part of a prefill that computes none."""
    comparison: "Comparison"
    """Of the run with concurrent requests with the run alone, which is the expected one."""
    operands_differ: tuple[str, ...] | None
    """Operands whose bits differ already; None if they are unknown, as for the output of a module."""
    repeats: bool
    """Whether both runs gave the same bits a second time."""


@dataclass(frozen=True)
class BisectResult:
    """The result of a bisection."""

    found: Found | None
    coverage: Coverage
    requests: tuple[int, ...]
    """How many requests each step had in the run with concurrent requests."""
    first_token: int | None
    """First output position at which the answers' tokens differ."""
    first_logprob: int | None
    """The same of tokens or logprobs; of a model that pools of its values."""
    answers_recorded: bool
    """Whether both answers had the same bits with recording as without."""
    unrecorded_differ: bool
    """Whether the answers differ without recording."""

    @property
    def status(self) -> Status:
        """The exit status."""
        differ = self.found is not None or self.first_logprob is not None or self.unrecorded_differ
        return Status.DIVERGED if differ else Status.REPRODUCIBLE


@dataclass(frozen=True)
class Setting:
    """The engine."""

    model: str
    vllm: str
    device: str
    dtype: str
    flag: str
    mode: str
    """Which mode served, see :mod:`..harness.mode`."""


def setting_of(llm: Any, model: str) -> Setting:
    """The setting of an engine."""
    import vllm

    config = llm.llm_engine.vllm_config
    dtype = str(config.model_config.dtype).removeprefix("torch.")
    return Setting(
        model, vllm.__version__, config.device_config.device_type, dtype, os.environ.get(FLAG, "0"), of_engine()
    )


def bisect(llm: Any, case: Case) -> BisectResult:
    """Find the first operation whose bits differ for the case's request.

    Args:
        llm: a ``vllm.LLM`` started with :data:`ENGINE_ARGUMENTS`.

    Raises:
        NoTestError: the runs cannot be compared.
    """
    _require_eager(llm)
    _require_tried(llm, case)
    _require_room(llm, case)
    plain = generate(llm, case, False), generate(llm, case, True)
    length = _length(llm, case)
    concurrent_answer, concurrent = _recorded(llm, case, True)
    alone_answer, alone = _recorded(llm, case, False)
    first_token = first_difference(alone_answer.tokens, concurrent_answer.tokens)
    divergences, coverages = [], []
    for rank, (left, right) in enumerate(zip(alone, concurrent, strict=True)):
        steps = (
            [RecordedStep.from_plain(step) for step in left["steps"]],
            [RecordedStep.from_plain(step) for step in right["steps"]],
        )
        last = _last_step(steps[0], case, length, first_token)
        divergence, coverage = first_divergence(*steps, last)
        coverages.append(coverage)
        requests = tuple(step.requests for step in steps[1][: last + 1])
        if divergence is not None:
            stage = rank // llm.llm_engine.vllm_config.parallel_config.tensor_parallel_size
            divergences.append((divergence.step, stage, divergence.index, rank, divergence, steps))
    found = None
    if divergences:
        *_, rank, divergence, steps = min(divergences, key=lambda item: item[:4])
        found = _fetch(llm, case, length, rank, len(alone), divergence, *steps)
    return BisectResult(
        found=found,
        coverage=Coverage.of_workers(coverages),
        requests=requests,
        first_token=first_token,
        first_logprob=first_difference(alone_answer.bits, concurrent_answer.bits),
        answers_recorded=plain == (alone_answer, concurrent_answer),
        unrecorded_differ=plain[0] != plain[1],
    )


def generate(llm: Any, case: Case, with_concurrent: bool) -> Answer:
    """Run the case once, greedily, with all requests added before the first step; returns the target's answer."""
    engine = llm.llm_engine
    nothing = ("",) * len(case.concurrent), ((),) * len(case.concurrent)
    of_others = zip(case.concurrent, case.adapters or nothing[0], case.others_items or nothing[1], strict=True)
    others = list(of_others) if with_concurrent else []
    if case.items or any(case.others_items):  # else what one run has encoded would serve the next
        images.forget(llm)
    place = min(case.place, len(others))
    length = {"temperature": 0.0, "max_tokens": case.max_tokens, "ignore_eos": True, "detokenize": False}
    numbers = {folder: number for number, folder in enumerate(sorted({case.adapter, *case.adapters} - {""}), 1)}
    target = case.prompt, case.adapter, case.items
    for number, (prompt, folder, items) in enumerate((*others[:place], target, *others[place:])):
        is_target = number == place
        asked = case.pooling or length | {"logprobs": case.logprobs if is_target else None}
        name = REQUEST if is_target else f"concurrent-{number}"
        adapter = {"lora_request": lora_request_of(folder, numbers[folder])} if folder else {}
        engine.add_request(name, images.prompt_of(llm, list(prompt), items), request_params(asked), **adapter)
    output = finished(drive(engine)).get(REQUEST)
    if output is None:
        raise NoTestError("the engine finished without an answer")
    return answer_of(completions_of(output)[0])


def _recorded(
    llm: Any, case: Case, with_concurrent: bool, target: tuple[int, Sequence[Any]] | None = None
) -> tuple[Answer, list[dict[str, Any]]]:
    llm.collective_rpc("bisect_begin", args=(REQUEST, not with_concurrent, target and [target[0], list(target[1])]))
    answer = generate(llm, case, with_concurrent)
    recorded = llm.collective_rpc("bisect_end")
    problem = next((worker["problem"] for worker in recorded if worker["problem"]), None)
    if problem:
        raise NoTestError(problem)
    return answer, recorded


def _length(llm: Any, case: Case) -> int:
    """Tokens of the target's prompt, those of its items among them."""
    if not case.items:
        return len(case.prompt)
    prompt, engine = images.prompt_of(llm, case.prompt, case.items), llm.llm_engine
    made = engine.input_processor.process_inputs("length", prompt, llm.get_default_sampling_params(), ("generate",))
    images.forget(llm)
    return len(made.prompt_token_ids)


def _last_step(steps: Sequence[RecordedStep], case: Case, length: int, first_token: int | None) -> int:
    """The step that computes the first token that differs: later steps read other tokens."""
    last = case.max_tokens - 1 if first_token is None else first_token
    for number, step in enumerate(steps):
        if step.position + step.rows - length == last:
            return number
    return len(steps) - 1


def _fetch(
    llm: Any,
    case: Case,
    length: int,
    rank: int,
    workers: int,
    divergence: OutputDivergence,
    alone: Sequence[RecordedStep],
    concurrent: Sequence[RecordedStep],
) -> Found:
    """Run both again to fetch the whole output, which digests do not show."""
    import torch

    from ...compare import bitwise_comparison

    target = (divergence.step, divergence.key)
    right = _recorded(llm, case, True, target)[1][rank]["fetched"]
    left = _recorded(llm, case, False, target)[1][rank]["fetched"]
    if left is None or right is None:
        raise NoTestError(
            f"{divergence.key.module}: {divergence.key.operation} differed and was not seen when it ran again"
        )
    tensors = []
    for fetched in (right, left):
        data = next(data for shape, data in fetched["parts"] if tuple(shape) == divergence.shape)
        dtype = getattr(torch, fetched["dtype"])
        tensors.append(torch.frombuffer(bytearray(data), dtype=dtype).reshape(divergence.shape))
    step = alone[divergence.step]
    token = step.position + step.rows - length
    return Found(
        divergence=divergence,
        rank=rank,
        workers=workers,
        position=step.position,
        rows=step.rows,
        output_token=token if token >= 0 else None,
        comparison=bitwise_comparison(*tensors),
        operands_differ=_operands_that_differ(left["operands"], right["operands"]),
        repeats=_repeats(divergence, alone, tensors[1]) and _repeats(divergence, concurrent, tensors[0]),
    )


def _operands_that_differ(alone: list[Any] | None, concurrent: list[Any] | None) -> tuple[str, ...] | None:
    if alone is None or concurrent is None:
        return None
    others = dict(concurrent)
    return tuple(
        name
        for name, parts in alone
        if any(shape == other and digest != second for shape, digest in parts for other, second in others.get(name, ()))
    )


def _repeats(divergence: OutputDivergence, steps: Sequence[RecordedStep], tensor: "torch.Tensor") -> bool:
    from .recorder import digest

    record = next(record for record in steps[divergence.step].records if record.key == divergence.key)
    return Slice(divergence.shape, digest(tensor)) in record.slices


def _require_eager(llm: Any) -> None:
    compilation = llm.llm_engine.vllm_config.compilation_config
    if compilation.mode.name != "NONE" or compilation.cudagraph_mode.name != "NONE":
        raise NoTestError(
            f"the engine runs compiled layers ({compilation.mode.name}) or CUDA graphs "
            f"({compilation.cudagraph_mode.name}) although --enforce-eager was given, and hooks do not see inside them"
        )


def _require_tried(llm: Any, case: Case) -> None:
    if not case.pooling or UNTRIED.read() == "1":
        return
    if (device_type := llm.llm_engine.vllm_config.device_config.device_type) != "cpu":
        raise NoTestError(
            f"a model that pools has been bisected on a CPU alone, and this is {device_type}; {UNTRIED.name}=1 tries it"
        )


def _require_room(llm: Any, case: Case) -> None:
    config = llm.llm_engine.vllm_config
    longest = max(len(prompt) for prompt in (case.prompt, *case.concurrent))
    context, most = config.model_config.max_model_len, config.scheduler_config.max_num_seqs
    if longest + case.max_tokens > context:
        whose = "the prompt" if len(case.prompt) == longest else "a prompt of a concurrent request"
        raise NoTestError(
            f"{whose} has {longest} tokens, and with --max-tokens {case.max_tokens} that is more than the model's "
            f"context of {context}; shorten one of them"
        )
    if len(case.concurrent) + 1 > most:
        raise NoTestError(
            f"{len(case.concurrent)} concurrent requests and the target are more than the engine runs at once, {most}; "
            f"pass --serve-args '--max-num-seqs {len(case.concurrent) + 1}'"
        )
    if config.speculative_config is not None:
        raise NoTestError("with speculative decoding the rows of a step depend on the drafts; leave it out")

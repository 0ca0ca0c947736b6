"""Runs one request alone and in company through an engine that records, and finds where the two runs part."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...compare import Comparison, bitwise_comparison
from ..divergence import Answer, first_difference
from ..harness.engine import answer_of
from ..outcome import NoTestError, Status
from .recording import Coverage, Parting, Slice, Step, first_parting

REQUEST = "bisect"
WORKER_EXTENSION = "vllm_batch_invariant.verify.bisect.recorder.WorkerExtension"
ENGINE_ARGUMENTS = ("--enforce-eager", "--no-enable-prefix-caching", "--worker-extension-cls", WORKER_EXTENSION)
"""What the engine must be started with: hooks do not see inside compiled graphs or CUDA graphs, and a prompt must be
computed in every run.
"""


@dataclass(frozen=True)
class Case:
    """One request and its company, in token ids."""

    prompt: tuple[int, ...]
    company: tuple[tuple[int, ...], ...]
    place: int
    """Requests of the company that come before it."""
    max_tokens: int
    logprobs: int = 5


@dataclass(frozen=True)
class Found:
    """The first output whose bits differ, whole."""

    parting: Parting
    rank: int
    """Of the worker."""
    position: int
    """Of the request's first token in that step."""
    rows: int
    """Tokens of the request in that step."""
    output_token: int | None
    """The token that the step computes; None in a part of a prefill that computes none."""
    comparison: Comparison
    """Of the run in company with the run alone, which is the expected one."""
    operands_differ: tuple[str, ...] | None
    """Operands whose bits differ already; None where they are not known, for a module's output."""
    repeats: bool
    """Whether both runs gave the same bits again when they were run a second time."""


@dataclass(frozen=True)
class Result:
    """What the runs showed."""

    found: Found | None
    coverage: Coverage
    requests: tuple[int, ...]
    """How many requests each step had in company."""
    first_token: int | None
    """First output position at which the answers' tokens differ."""
    first_logprob: int | None
    """The same for tokens or logprobs."""
    answers_recorded: bool
    """Whether both answers had the same bits with recording as without."""
    unrecorded_differ: bool
    """Whether the answers differ without recording."""

    @property
    def status(self) -> Status:
        """The exit status."""
        differ = self.found is not None or self.first_logprob is not None or self.unrecorded_differ
        return Status.DIVERGED if differ else Status.REPRODUCIBLE


def bisect(llm: Any, case: Case) -> Result:
    """Find the first operation whose bits differ for the case's request.

    Args:
        llm: a ``vllm.LLM`` started with :data:`ENGINE_ARGUMENTS`.

    Raises:
        NoTestError: the runs cannot be compared.
    """
    _require_eager(llm)
    _require_room(llm, case)
    plain = generate(llm, case, False), generate(llm, case, True)
    company_answer, company = _recorded(llm, case, True)
    alone_answer, alone = _recorded(llm, case, False)
    first_token = first_difference(alone_answer.tokens, company_answer.tokens)
    partings, coverages = [], []
    for rank, (left, right) in enumerate(zip(alone, company, strict=True)):
        steps = [Step.from_plain(step) for step in left["steps"]], [Step.from_plain(step) for step in right["steps"]]
        last = _last_step(steps[0], case, first_token)
        parting, coverage = first_parting(*steps, last)
        coverages.append((coverage, tuple(step.requests for step in steps[1][: last + 1])))
        if parting is not None:
            partings.append((parting.step, parting.index, rank, parting, steps))
    coverage, requests = coverages[0]
    found = None
    if partings:
        *_, rank, parting, steps = min(partings, key=lambda item: item[:3])
        found = _fetch(llm, case, rank, parting, *steps)
        coverage = coverages[rank][0]
    return Result(
        found=found,
        coverage=coverage,
        requests=requests,
        first_token=first_token,
        first_logprob=first_difference(alone_answer.bits, company_answer.bits),
        answers_recorded=plain == (alone_answer, company_answer),
        unrecorded_differ=plain[0] != plain[1],
    )


def generate(llm: Any, case: Case, in_company: bool) -> Answer:
    """Run the case once, greedily, all its requests added before the engine's first step; returns its answer."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    others = list(case.company) if in_company else []
    place = min(case.place, len(others))
    length = {"temperature": 0.0, "max_tokens": case.max_tokens, "ignore_eos": True, "detokenize": False}
    for number, prompt in enumerate((*others[:place], case.prompt, *others[place:])):
        mine = number == place
        sampling = SamplingParams(**length, logprobs=case.logprobs if mine else None)
        name = REQUEST if mine else f"company-{number}"
        engine.add_request(name, {"prompt_token_ids": list(prompt)}, sampling)
    answer = None
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.request_id == REQUEST and output.finished:
                answer = answer_of(output.outputs[0])
    if answer is None:
        raise NoTestError("the engine finished without an answer")
    return answer


def _recorded(
    llm: Any, case: Case, in_company: bool, target: tuple[int, Sequence] | None = None
) -> tuple[Answer, list[dict[str, Any]]]:
    llm.collective_rpc("bisect_begin", args=(REQUEST, not in_company, target and [target[0], list(target[1])]))
    answer = generate(llm, case, in_company)
    recorded = llm.collective_rpc("bisect_end")
    problem = next((worker["problem"] for worker in recorded if worker["problem"]), None)
    if problem:
        raise NoTestError(problem)
    return answer, recorded


def _last_step(steps: Sequence[Step], case: Case, first_token: int | None) -> int:
    """The step that computes the first token to differ: later ones read other tokens."""
    last = case.max_tokens - 1 if first_token is None else first_token
    for number, step in enumerate(steps):
        if step.position + step.rows - len(case.prompt) == last:
            return number
    return len(steps) - 1


def _fetch(llm: Any, case: Case, rank: int, parting: Parting, alone: Sequence[Step], company: Sequence[Step]) -> Found:
    """Run both again for the whole output, which digests alone cannot show."""
    target = (parting.step, parting.key)
    right = _recorded(llm, case, True, target)[1][rank]["fetched"]
    left = _recorded(llm, case, False, target)[1][rank]["fetched"]
    if left is None or right is None:
        raise NoTestError(f"{parting.key.module}: {parting.key.operation} differed and was not seen when it ran again")
    tensors = []
    for fetched in (right, left):
        data = next(data for shape, data in fetched["parts"] if tuple(shape) == parting.shape)
        dtype = getattr(torch, fetched["dtype"])
        tensors.append(torch.frombuffer(bytearray(data), dtype=dtype).reshape(parting.shape))
    step = alone[parting.step]
    token = step.position + step.rows - len(case.prompt)
    return Found(
        parting=parting,
        rank=rank,
        position=step.position,
        rows=step.rows,
        output_token=token if token >= 0 else None,
        comparison=bitwise_comparison(*tensors),
        operands_differ=_operands_that_differ(left["operands"], right["operands"]),
        repeats=_repeats(parting, alone, tensors[1]) and _repeats(parting, company, tensors[0]),
    )


def _operands_that_differ(alone: list | None, company: list | None) -> tuple[str, ...] | None:
    if alone is None or company is None:
        return None
    others = dict(company)
    return tuple(
        name
        for name, parts in alone
        if any(shape == other and digest != second for shape, digest in parts for other, second in others.get(name, ()))
    )


def _repeats(parting: Parting, steps: Sequence[Step], tensor: torch.Tensor) -> bool:
    from .recorder import digest

    record = next(record for record in steps[parting.step].records if record.key == parting.key)
    return Slice(parting.shape, digest(tensor)) in record.slices


def _require_eager(llm: Any) -> None:
    compilation = llm.llm_engine.vllm_config.compilation_config
    if compilation.mode.name != "NONE" or compilation.cudagraph_mode.name != "NONE":
        raise NoTestError(
            f"the engine runs compiled layers ({compilation.mode.name}) or CUDA graphs "
            f"({compilation.cudagraph_mode.name}) although --enforce-eager was given, and hooks do not see inside them"
        )


def _require_room(llm: Any, case: Case) -> None:
    config = llm.llm_engine.vllm_config
    longest = max(len(prompt) for prompt in (case.prompt, *case.company))
    context, most = config.model_config.max_model_len, config.scheduler_config.max_num_seqs
    if longest + case.max_tokens > context:
        whose = "the prompt" if len(case.prompt) == longest else "a prompt of the company"
        raise NoTestError(
            f"{whose} has {longest} tokens, and with --max-tokens {case.max_tokens} that is more than the model's "
            f"context of {context}; shorten one of them"
        )
    if len(case.company) + 1 > most:
        raise NoTestError(
            f"{len(case.company)} others and the request are more than the engine runs together, {most}; "
            f"pass --serve-args '--max-num-seqs {len(case.company) + 1}'"
        )
    if config.speculative_config is not None:
        raise NoTestError("with speculative decoding a step's rows follow the drafts; leave it out")

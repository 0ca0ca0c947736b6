"""The same run through `vllm.LLM`, without a server: the plan's arrivals go straight into the engine's steps."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from prometheus_client import REGISTRY

from ..divergence import Answer, GeneratedToken
from ..outcome import NoTestError
from ..request import RequestSpec
from ..request_parameters import sampling_params, varied
from .load import Run, one_line
from .metrics import BatchLog, Reading
from .plan import Arrival, Kind


def start_engine(model: str, arguments: Sequence[str]) -> Any:
    """A `vllm.LLM` that keeps statistics, with the same arguments that `vllm serve` takes for its engine.

    Raises:
        NoTestError: there is no vLLM, an argument is not one of its, or the engine does not start.
    """
    try:
        from vllm import LLM
        from vllm.engine.arg_utils import EngineArgs
        from vllm.utils.argparse_utils import FlexibleArgumentParser
    except ImportError as error:
        raise NoTestError(f"an engine needs vLLM in this Python: {one_line(error)}") from error

    class Parser(FlexibleArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise NoTestError(f"--serve-args: {message}")

    parser = EngineArgs.add_cli_args(Parser(add_help=False))
    try:
        chosen = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *arguments]))
        chosen.disable_log_stats = False
        return LLM.from_engine_args(chosen)
    except NoTestError:
        raise
    except Exception as error:  # what a file that is cut short or a model's own code raises may be anything
        raise NoTestError(f"the engine did not start: {one_line(error)}") from error


def run_offline(
    llm: Any, spec: RequestSpec, plan: Sequence[Arrival], log: BatchLog, on_sample: Callable[[], None] = lambda: None
) -> Run:
    """Run the plan through the engine; the arrivals' pauses are left out, since engine steps are the clock."""
    return _OfflineLoad(llm, spec, log, on_sample).run(plan)


class _OfflineLoad:
    def __init__(self, llm: Any, spec: RequestSpec, log: BatchLog, on_sample: Callable[[], None]) -> None:
        self._llm, self._engine, self._spec, self._log, self._on_sample = llm, llm.llm_engine, spec, log, on_sample
        self._answers: list[Answer] = []
        self._flying: dict[str, Arrival | None] = {}
        self._ids = iter(range(10**9))
        self._others = self._left = self._failed = 0
        self._failure = ""

    def run(self, plan: Sequence[Arrival]) -> Run:
        begin = time.perf_counter()
        self._read_metrics()
        self._add(None)
        while self._flying:
            self._step()
        for arrival in plan:
            while len(self._flying) >= arrival.concurrency:
                self._step()
            self._add(arrival)
        while self._flying:
            self._step()
        self._read_metrics()
        concurrency = varied(arrival.params for arrival in plan if arrival.kind is not Kind.SAMPLE)
        took = time.perf_counter() - begin
        return Run(tuple(self._answers), took, self._others, self._left, self._failed, self._failure, concurrency)

    def _add(self, arrival: Arrival | None) -> None:
        name = f"reproduce-{next(self._ids)}"
        spec = self._spec
        if arrival is None or arrival.kind is Kind.SAMPLE:
            params = {"temperature": spec.temperature, "seed": spec.seed, "max_tokens": spec.max_tokens}
            params |= {"logprobs": spec.logprobs, "ignore_eos": spec.ignore_eos}
            self._engine.add_request(name, self._prompt(spec.prompt), sampling_params(params))
        else:
            self._others += 1
            try:
                self._engine.add_request(name, self._prompt(arrival.prompt), sampling_params(arrival.params))
            except Exception as error:  # whatever vLLM raises for what it does not take
                self._failed += 1
                self._failure = self._failure or one_line(error)
                return
        self._flying[name] = arrival

    def _prompt(self, text: str) -> str:
        if not self._spec.chat:
            return text
        messages = [{"role": "user", "content": text}]
        return self._llm.get_tokenizer().apply_chat_template(messages, tokenize=False, add_generation_prompt=True)

    def _step(self) -> None:
        outputs = self._engine.step()
        if outputs:
            self._read_metrics()
        for output in outputs:
            arrival = self._flying.get(output.request_id)
            generated = output.outputs[0]
            if output.finished:
                self._flying.pop(output.request_id, None)
                if arrival is None or arrival.kind is Kind.SAMPLE:
                    self._answers.append(answer_of(generated))
                    self._on_sample()
            elif (
                arrival is not None
                and arrival.kind is Kind.ABORTED
                and len(generated.token_ids) >= arrival.abort_after
                and self._flying.pop(output.request_id, None)
            ):
                self._engine.abort_request([output.request_id])
                self._left += 1

    def _read_metrics(self) -> None:
        reading = Reading.of(REGISTRY.collect())
        if reading is not None:
            self._log.add(reading)


def answer_of(generated: Any) -> Answer:
    """The tokens and logprobs of one completion of vLLM's."""
    if not generated.logprobs:
        raise NoTestError(
            "the engine returned no logprobs, so bits cannot be compared; use a model that gives logprobs"
        )
    steps = [
        GeneratedToken(
            str(token),
            listed[token].logprob,
            tuple((str(other), item.logprob) for other, item in listed.items()),
            tuple(item.rank or 0 for item in listed.values()),
        )
        for token, listed in zip(generated.token_ids, generated.logprobs, strict=True)
    ]
    return Answer.of(generated.text, steps)

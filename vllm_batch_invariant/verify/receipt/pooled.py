"""Receipts of what models pool, on an engine in this process (``vllm.LLM``): made of its outputs, computed again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from ..answers import answer_of
from ..harness import pooling as harness
from ..harness.drive import add_request
from ..harness.engine import request_params
from ..outcome import NoTestError
from ..printing import one_line
from .comparison import Note, Verdict, first_difference_of, notes_on, verdict_on
from .engine import NUMBERS, Concurrent, engine_info
from .record import EngineInfo, Pooled, PooledReceipt, Pooling

TIMES = 8
"""How often a text is computed again beside others, each time beside other ones: it takes a step or a few."""


class PooledRequests(Concurrent):
    """Requests beside one that pools."""

    def __init__(self, receipt: PooledReceipt, parts: Sequence[Any], context: int, size: int) -> None:
        """Of parts of the receipt's own text: token ids, or words of texts that are scored."""
        super().__init__(receipt.sha256, context, size)
        self._parts = parts or (0,)

    def next(self, about: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Parts of a prompt, and arguments of vLLM's ``PoolingParams``.

        Args:
            about: the engine, see :func:`..harness.pooling.about`.
        """
        return self.drawn(), harness.draw_of_engine(self._random, about)

    def drawn(self) -> list[Any]:
        """Parts of a prompt, most often few: a long one is answered steps after it shared one with the target."""
        most = self._random.choice((4, 4, 16, 64, self._room))
        return self._random.choices(self._parts, k=min(most, self._length()))

    def some(self, least: int, most: int) -> list[list[Any]]:
        """Several prompts."""
        return [self.drawn() for _ in range(self._random.randint(least, most))]

    def chosen(self, *values: Any) -> Any:
        """One of these."""
        return self._random.choice(values)


def make_pooled(
    output: Any,
    pooling: Pooling,
    info: EngineInfo,
    *,
    private: bool = False,
    pair: tuple[str, str] | None = None,
) -> PooledReceipt:
    """The receipt of what a model pooled.

    Args:
        output: vLLM's, of ``LLM.embed``, ``classify``, ``encode`` or ``score``.
        pooling: what was asked for.
        info: :func:`.engine.engine_info` of the engine.
        private: keep a sha256 of the prompt's token ids, or of the pair, in their place.
        pair: of a score the query and the text.

    Raises:
        NoTestError: of a score no pair is given, or the output has several rows or values that fp32 has not.
    """
    if (pair is None) == (pooling.task == "score"):
        raise NoTestError("a score is of a pair, query and text, and an embedding and classes are of the prompt alone")
    about = tuple(map(int, output.prompt_token_ids)) if pair is None else pair
    return PooledReceipt.of(info, about, pooling, pooled_of(output), private)


def pooled_of(output: Any) -> Pooled:
    """What vLLM's output gives as a receipt has it.

    Raises:
        NoTestError: it has several rows, or values that fp32 has not.
    """
    given = output.outputs
    for name in ("embedding", "probs"):
        if (values := getattr(given, name, None)) is not None:
            return Pooled.of(values)
    if (score := getattr(given, "score", None)) is not None:
        return Pooled.of([score])
    answer = answer_of(harness.described(given.data))
    if answer.unit == "row":
        raise NoTestError("a receipt is of one vector, and this has a row for each token")
    return Pooled.of(value for place in range(len(answer.bits)) for value in answer.values(place))


def verify_pooled(
    receipt: PooledReceipt,
    llm: Any,
    *,
    concurrent: int = 8,
    prompt_token_ids: Sequence[int] | None = None,
    pair: tuple[str, str] | None = None,
    before: Callable[[tuple[Note, ...]], None] = lambda _: None,
) -> Verdict:
    """Compute again what a receipt holds, some times with concurrent requests that come and go, and compare it bit for
    bit.

    Args:
        llm: an idle ``vllm.LLM`` that pools, which is stepped here.
        concurrent: number of concurrent requests. With none it is computed once.
        prompt_token_ids, pair: of a private receipt.
        before: is called first, with the differences between this engine and the receipt's.

    Raises:
        NoTestError: the text is missing or another one, the engine is busy or refuses the request, or no concurrent
            request ran in the same step.
    """
    about = about_of(receipt, prompt_token_ids, pair)
    notes = notes_on(receipt.info, engine_info(llm).asked_for(None), ("the receipt", "this engine"))
    before(notes)
    tokens = [token for text in about for token in llm.get_tokenizer().encode(text)] if receipt.pair else [*about]
    others = PooledRequests(receipt, tokens, llm.llm_engine.model_config.max_model_len, concurrent)
    ran = 0
    for _ in range(times := TIMES if concurrent else 1):
        got, beside = compute(llm, about, receipt.pooling, others)
        ran += beside
        if first_difference_of(receipt.pooled, got):
            break
    else:
        others.require(ran)
    return verdict_on(receipt, got, notes, ran, concurrent, times)


def about_of(
    receipt: PooledReceipt, token_ids: Sequence[int] | None, pair: tuple[str, str] | None
) -> tuple[int, ...] | tuple[str, str]:
    """What a receipt is of: token ids of a prompt, or a pair of texts.

    Raises:
        NoTestError: it is missing, or another is given.
    """
    return receipt.pair.both(pair) if receipt.pair else receipt.prompt.ids(token_ids)  # type: ignore[union-attr]


def compute(
    llm: Any, about: tuple[Any, ...], pooling: Pooling, others: PooledRequests | None = None
) -> tuple[Pooled, int]:
    """What an engine gives for a prompt of tokens, or for a pair of texts that are scored, from a cold prefix cache.

    Returns:
        It, and how many concurrent requests were answered in a step in which it was.

    Raises:
        NoTestError: the engine is busy, generates, or refuses the request.
    """
    engine, task = llm.llm_engine, harness.TASKS[pooling.task].engine
    if engine.has_unfinished_requests():
        raise NoTestError("the engine is busy: use an idle one")
    asked = {harness.DIMENSIONS: pooling.dimensions, harness.ACTIVATION: pooling.activation}
    params = request_params(asked | {"task": task or None})
    llm.reset_prefix_cache()
    with _beside(llm, others) as ran:
        try:
            if task:
                [output] = llm.encode({"prompt_token_ids": [*about]}, params, pooling_task=task, use_tqdm=False)
            else:
                [output] = llm.score(*about, pooling_params=params, use_tqdm=False)
        except Exception as error:  # vLLM refuses a request by any exception
            raise NoTestError(f"the engine refuses the request: {one_line(error)}") from error
    return pooled_of(output), len(ran)


@contextmanager
def _beside(llm: Any, others: PooledRequests | None) -> Iterator[set[str]]:
    """Keep concurrent requests in an engine while a method of ``LLM`` steps it, which does not see them; gives the
    names of those that were answered together with its own.
    """
    engine, running, together = llm.llm_engine, set[str](), set[str]()
    if others is None or not others.size:
        yield together
        return
    about, step = harness.about(llm), engine.step

    def fill(count: int) -> None:
        while len(running) < count:
            tokens, params = others.next(about)
            name = f"receipt-{next(NUMBERS)}"
            add_request(engine, name, {"prompt_token_ids": tokens}, request_params(params))
            running.add(name)

    def with_others() -> list[Any]:
        fill(others.size)
        outputs = step()
        own = [output for output in outputs if output.request_id not in running]
        done = {output.request_id for output in outputs} & running
        if own:
            together.update(done)
        running.difference_update(done)
        return own

    fill(others.chosen(*range(others.size + 1)))  # in front of the target
    engine.step = with_others
    engine.has_unfinished_requests = lambda: engine.get_num_unfinished_requests() > len(running)
    try:
        yield together
    finally:
        del engine.step, engine.has_unfinished_requests
        engine.abort_request([*running])

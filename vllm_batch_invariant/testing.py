"""Assertions for tests of your own: an engine, a server or a function gives the same bits in every batch.

They need no test runner in particular. :func:`assert_batch_invariant` needs the extra [verify], and
:func:`assert_rows_invariant` PyTorch alone.
"""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from vllm import LLM

    from .verify.answers import RequestSpec
    from .verify.reproduce.report import ReproduceResult

__all__ = ["assert_batch_invariant", "assert_rows_invariant"]
_READ_EVERY = 0.05
"""Seconds between two readings of a server's metrics: a test may take no longer than a second."""


def assert_batch_invariant(
    target: "LLM | str",
    prompt: str | None = None,
    *,
    task: str = "generate",
    chat: bool = False,
    max_tokens: int = 32,
    temperature: float = 0.0,
    seed: int = 0,
    logprobs: int = 5,
    samples: int = 64,
    concurrency: int = 16,
    model: str | None = None,
    api_key: str | None = None,
    timeout: float = 600,
) -> "ReproduceResult":
    """Assert that one request has the same tokens and logprobs, or values of a pooling model, bit for bit, under a load
    that varies the batch.

    It is sent alone, then again and again while other requests come, go and are aborted, as by ``vllm-batch-invariant
    reproduce``.

    Args:
        target: a ``vllm.LLM``, or the address of a server that runs vLLM, such as http://127.0.0.1:8000.
        prompt: the prompt; None for one of 120 words.
        task: "generate"; of a model that pools "embed" or "classify", or "score" of a server of one.
        chat: whether it is sent as a chat message.
        max_tokens: tokens to generate at most.
        temperature: 0 is greedy.
        seed: of the request and of the load.
        logprobs: candidates compared at each token, at least 1.
        samples: how often the request is sent, at least 2.
        concurrency: most requests in flight, at least 2.
        model: the name of the server's model; None for its first.
        api_key: of the server; None for none.
        timeout: seconds after which a server is given up.

    Returns:
        What was found: the answers, their comparison, the sizes of the batches.

    Raises:
        AssertionError: bits differ; it says where first.
        verify.outcome.NoTestError: the batch never varied, so equal answers would prove nothing; there are no logprobs;
            or the server does not answer.
        TypeError: the target is neither.
        ValueError: there is no such task.
    """
    __tracebackhide__ = True  # pytest shows the caller's line
    from .verify.answers import GENERATE, PROMPT, RequestSpec
    from .verify.harness.pooling import TASKS

    tasks = (GENERATE, *(name for name, one in TASKS.items() if isinstance(target, str) or one.engine))
    if task not in tasks:
        raise ValueError(f"there is no task {task!r} of such a target; there are {', '.join(tasks)}")
    spec = RequestSpec(PROMPT if prompt is None else prompt, chat, max_tokens, temperature, seed, logprobs, task=task)
    if isinstance(target, str):
        from .verify.reproduce import online

        run = online.run(target, api_key, model, spec, samples, concurrency, timeout, every=_READ_EVERY)
        found = _result_of(run)
    elif hasattr(target, "llm_engine"):
        found = _of_engine(target, spec, samples, concurrency)
    else:
        raise TypeError(f"a target is a vllm.LLM or the address of a server, not a {type(target).__name__}")
    if not found.comparison.identical:
        from .verify.reproduce.report import rows_of

        rows = rows_of(found)
        units = ("token", "logprob", "value", "row")
        names = (*(f"first {unit} that differs" for unit in units), "requests in the batch", "mode")
        asked = f" --task {task}" * spec.pools
        hint = f"vllm-batch-invariant bisect MODEL{asked} names the first operation whose bits differ"
        is_bisected = not spec.pools or bool(TASKS[task].engine)
        lines = [f"{name}: {rows[name]}" for name in names if name in rows] + [hint] * is_bisected
        raise AssertionError("\n".join((found.verdict, *lines)))
    return found


def _result_of(run: "Coroutine[Any, Any, ReproduceResult]") -> "ReproduceResult":
    """Run it to its end, in a thread of its own where this one's event loop runs an asynchronous test."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(run)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run).result()


def _of_engine(llm: "LLM", spec: "RequestSpec", samples: int, concurrency: int) -> "ReproduceResult":
    from .verify.harness.engine import run_offline
    from .verify.harness.load import plan_of
    from .verify.harness.metrics import BatchLog
    from .verify.harness.mode import of_engine
    from .verify.reproduce.report import ReproduceResult

    context, log = llm.llm_engine.model_config.max_model_len, BatchLog()
    plan = plan_of(spec, samples, concurrency, context)
    return ReproduceResult.of("engine", run_offline(llm, spec, plan, log), log, {"mode": of_engine()})


def assert_rows_invariant(
    function: "Callable[[torch.Tensor], torch.Tensor]", rows: "torch.Tensor", sizes: Sequence[int] | None = None
) -> None:
    """Assert that a function gives each row the same bits in batches of every size.

    Args:
        function: of [B, ...], for any number of rows B; returns [B, ...].
        rows: [N, ...], at least two; any dtype and device.
        sizes: of the batches that the rows are split into, compared with all N together; by default 1, 2, 3, 5 and so
            on, to N - 1.

    Raises:
        compare.Mismatch: an ``AssertionError``: bits differ; it says in which rows and batches, and where first.
        ValueError: fewer than two rows, or a result without a row for each.
    """
    __tracebackhide__ = True
    from .compare import assert_same_bits

    count = len(rows)
    if count < 2:
        raise ValueError(f"{count} rows make no two batches")
    together = function(rows)
    for size in sizes or _sizes(count):
        for first in range(0, count, size):
            part = rows[first : first + size]
            what = f"rows {first} to {first + len(part) - 1} in a batch of {len(part)} and in one of {count}"
            assert_same_bits(function(part), together[first : first + size], what)


def _sizes(count: int) -> list[int]:
    """Fibonacci numbers below ``count``: odd and even, close together where kernels change most."""
    sizes = [1, 2]
    while sizes[-1] < count:
        sizes.append(sizes[-1] + sizes[-2])
    return [size for size in sizes if size < count]

"""A load against a server."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import httpx

from ..answers import Counts, RequestSpec, Tally
from ..harness import mode
from ..harness.client import connect
from ..harness.http_load import Load
from ..harness.load import plan_of
from ..harness.metrics import BatchLog, watch
from ..outcome import NoTestError
from ..printing import one_line
from .report import ReproduceResult


@contextmanager
def untold(_log: BatchLog) -> Iterator[Callable[[Counts], None]]:
    """Progress that nobody is told."""
    yield lambda _: None


async def run(
    base_url: str,
    api_key: str | None,
    model: str | None,
    spec: RequestSpec,
    samples: int,
    concurrency: int,
    timeout: float,
    label: str = "server",
    started: str | None = None,
    progress: Callable[[BatchLog], AbstractContextManager[Callable[[Counts], None]]] = untold,
    every: float = 0.25,
) -> ReproduceResult:
    """Send the request ``samples`` times while the load changes.

    Args:
        base_url: the server's address.
        api_key: its key; None for none.
        model: the name of the served model to ask; None for the first.
        spec: the request; its seed is also that of the load.
        samples: at least 2.
        concurrency: most requests in flight, samples and others.
        timeout: seconds after which the run is given up.
        label: of the result.
        started: the mode of a server that was started here; a server that already ran reports its mode.
        progress: a context whose value is called with the counts so far, after every sample.
        every: seconds between two readings of the server's metrics.

    Raises:
        NoTestError: the server does not answer, returns no logprobs or no metrics, or its batch never varied.
    """
    log = BatchLog(between_readings=True)
    async with connect(base_url, api_key) as server:
        served = await server.served_model(model)
        plan = plan_of(spec, samples, concurrency, served.context)
        tally = Tally()
        with progress(log) as tell:
            try:
                async with asyncio.timeout(timeout), watch(server.http, server.metrics, log, every):
                    load = Load(server, served.name, spec, lambda answer: tell(tally.add(answer)))
                    done = await load.run(plan)
            except TimeoutError:
                raise NoTestError(f"the run was not done within --timeout {timeout:.0f} s") from None
            except httpx.HTTPError as error:
                raise NoTestError(f"{server}/metrics does not answer: {one_line(error)}") from error
        info = {"server": str(server), "model": served.name, "context": served.context}
        info |= {"versions": await server.versions(), "mode": started or await mode.of_server(server)}
    return ReproduceResult.of(label, done, log, info)

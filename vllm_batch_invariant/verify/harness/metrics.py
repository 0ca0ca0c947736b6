"""Batch sizes during a run, read from vLLM's Prometheus metrics, and latencies."""

import asyncio
import math
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from ..outcome import NoTestError

if TYPE_CHECKING:
    import httpx
    from prometheus_client.metrics_core import Metric

RUNNING, STEP_TOKENS = "vllm:num_requests_running", "vllm:iteration_tokens_total"
GENERATED, ACCEPTED = "vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"
ANSWERED = "vllm:request_success_total"


@dataclass(frozen=True)
class Reading:
    """The metrics at one moment: running requests, and engine steps so far by their most tokens."""

    running: int
    steps: dict[float, int]
    tokens: int = 0
    """Tokens generated so far without accepted drafts, so that a step gives a request one at most."""
    when: float = field(default_factory=time.monotonic, compare=False)
    """Seconds of a monotonic clock."""
    answered: int = 0
    """Requests that have ended by themselves so far."""

    @classmethod
    def of(cls, families: "Iterable[Metric]") -> "Reading | None":
        """The sum over engines; None if the metrics are not vLLM's."""
        running, tokens, answered = None, 0, 0
        cumulative: dict[float, int] = {}
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == RUNNING:
                running = (running or 0) + int(sample.value)
            elif sample.name == STEP_TOKENS + "_bucket":
                bound = float(sample.labels["le"])
                cumulative[bound] = cumulative.get(bound, 0) + int(sample.value)
            elif sample.name == GENERATED:
                tokens += int(sample.value)
            elif sample.name == ACCEPTED:
                tokens -= int(sample.value)
            elif sample.name == ANSWERED and sample.labels.get("finished_reason") != "abort":
                answered += int(sample.value)
        if running is None:
            return None
        below, steps = 0, {}
        for bound, count in sorted(cumulative.items()):
            steps[bound], below = count - below, count
        return cls(running, steps, tokens, answered=answered)

    def together_since(self, before: "Reading") -> int:
        """A lower bound of the largest batch since an earlier reading: tokens a step, or answers, rounded up."""
        steps = sum(self.steps.values()) - sum(before.steps.values())
        given = max(self.tokens - before.tokens, self.answered - before.answered)
        return math.ceil(given / steps) if steps > 0 else 0


@dataclass(frozen=True)
class BatchSizes:
    """Observed batch sizes: ``running`` has one entry a reading, ``steps`` has (most tokens in a step, steps)."""

    running: tuple[int, ...]
    steps: tuple[tuple[float, int], ...]

    @property
    def largest(self) -> int:
        """The most requests seen running together."""
        return max(self.running, default=0)

    def require_variation(self) -> None:
        """Raise ``NoTestError`` unless requests ran concurrently, in numbers that changed."""
        if self.largest < 2:
            raise NoTestError(
                "not a test: the engine never ran more than 1 request at a time; "
                "raise --concurrency, --samples or --max-tokens, or the server's --max-num-seqs"
            )
        if len(set(self.running)) < 2:
            raise NoTestError(f"not a test: the engine ran {self.largest} requests at every reading; raise --samples")


@dataclass(frozen=True)
class Trace:
    """The batches of one engine over time."""

    engine: str
    seconds: tuple[float, ...]
    sizes: tuple[int, ...]
    """Requests in the batch at each of these moments."""


@dataclass
class BatchLog:
    """Collects readings during a run."""

    readings: list[Reading] = field(default_factory=list)
    on_reading: Callable[[Reading], None] = lambda _: None
    """Is called with each."""
    between_readings: bool = False
    """Whether batches between two readings count, by the tokens or the answers of a step: a pooling model has answered
    a request when its metrics tell who runs, and so has a small one that is fast.
    """
    _last: Reading | None = None

    def add(self, reading: Reading) -> None:
        """Keep a reading."""
        if self.between_readings:
            before, self._last = self._last or reading, reading
            reading = replace(reading, running=max(reading.running, reading.together_since(before)))
        self.readings.append(reading)
        self.on_reading(reading)

    @property
    def largest(self) -> int:
        """The most requests seen running together."""
        return max((reading.running for reading in self.readings), default=0)

    @property
    def running_now(self) -> int:
        """Requests running at the last reading."""
        return self.readings[-1].running if self.readings else 0

    def largest_since(self, first: int) -> int:
        """The largest batch from a reading on: the most running requests of a reading, or the bound from counted tokens
        if that is more, because a batch may come and go between two readings.
        """
        readings = self.readings[first:]
        counted = readings[-1].together_since(readings[0])
        return max(counted, *(reading.running for reading in readings))

    def over_time(self, name: str) -> Trace:
        """Running requests at every reading, with seconds since the first."""
        begin = self.readings[0].when if self.readings else 0.0
        seconds = tuple(reading.when - begin for reading in self.readings)
        return Trace(name, seconds, tuple(reading.running for reading in self.readings))

    def batches(self) -> BatchSizes:
        """Batch sizes between the first and the last reading."""
        if not self.readings:
            return BatchSizes((), ())
        first, last = self.readings[0].steps, self.readings[-1].steps
        steps = tuple((bound, count - first.get(bound, 0)) for bound, count in sorted(last.items()))
        running = tuple(reading.running for reading in self.readings if reading.running)
        return BatchSizes(running, tuple((bound, count) for bound, count in steps if count))


def parse_metrics(page: str, *names: str) -> "Iterable[Metric]":
    """The metrics of a page whose names begin so; parsing the hundreds of others would only cost time."""
    from prometheus_client.parser import text_string_to_metric_families

    lines = [line for line in page.splitlines() if line.startswith(names)]
    return text_string_to_metric_families("\n".join(lines) + "\n")


async def read_metrics(client: "httpx.AsyncClient", url: str) -> Reading:
    """Read a server's metrics page."""
    response = await client.get(url)
    reading = Reading.of(parse_metrics(response.text, RUNNING, STEP_TOKENS, GENERATED, ACCEPTED, ANSWERED))
    if response.status_code != 200 or reading is None:
        raise NoTestError(
            f"{url} lacks {RUNNING}, so batch sizes are unknown; serve with vLLM and without --disable-log-stats"
        )
    return reading


@asynccontextmanager
async def watch(client: "httpx.AsyncClient", url: str, log: BatchLog, every: float = 0.25) -> AsyncIterator[None]:
    """Add a reading to ``log`` at the start, every ``every`` seconds, and at the end."""
    import httpx

    async def poll() -> None:
        while True:
            await asyncio.sleep(every)
            # under load a page may be late, which only leaves a gap
            with suppress(httpx.HTTPError, NoTestError):
                log.add(await read_metrics(client, url))

    log.add(await read_metrics(client, url))
    task = asyncio.create_task(poll())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    with suppress(httpx.HTTPError, NoTestError):
        log.add(await read_metrics(client, url))


@dataclass(frozen=True)
class Latency:
    """Latencies of the requests of one load."""

    requests: int
    tokens: int
    seconds: float
    first_token: tuple[float, ...]
    """Seconds to the first token of each request."""
    between_tokens: tuple[float, ...]
    """Seconds between two tokens, of all requests."""

    @classmethod
    def of(cls, token_seconds: Sequence[Sequence[float]]) -> "Latency":
        """From the times of each request's tokens, in seconds."""
        return cls(
            requests=len(token_seconds),
            tokens=sum(map(len, token_seconds)),
            seconds=max(times[-1] for times in token_seconds),
            first_token=tuple(times[0] for times in token_seconds),
            between_tokens=tuple(after - before for times in token_seconds for before, after in pairwise(times)),
        )

    @property
    def figures(self) -> dict[str, float]:
        """Medians and a percentile in milliseconds, and tokens a second; of a model that pools, answers a second."""
        if not self.between_tokens:
            return {
                "answer, median (ms)": 1e3 * statistics.median(self.first_token),
                "answer, 99 of 100 (ms)": 1e3 * _p99(self.first_token),
                "answers a second": self.requests / self.seconds,
            }
        return {
            "first token, median (ms)": 1e3 * statistics.median(self.first_token),
            "between tokens, median (ms)": 1e3 * statistics.median(self.between_tokens),
            "between tokens, 99 of 100 (ms)": 1e3 * _p99(self.between_tokens),
            "tokens a second": self.tokens / self.seconds,
        }


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98] if len(values) > 1 else values[0]

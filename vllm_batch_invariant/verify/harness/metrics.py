"""What the engine's batches were during a run, from vLLM's Prometheus metrics."""

import asyncio
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from ..outcome import NoTestError

RUNNING, STEP_TOKENS = "vllm:num_requests_running", "vllm:iteration_tokens_total"
GENERATED, ACCEPTED = "vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"


@dataclass(frozen=True)
class Reading:
    """The metrics at one moment: requests running, and engine steps so far by the most tokens they held."""

    running: int
    steps: dict[float, int]
    tokens: int = 0
    """Tokens generated so far, without drafts that were accepted: a step gives a request one at most."""
    when: float = field(default_factory=time.monotonic, compare=False)
    """Seconds, of a clock that starts anywhere."""

    @classmethod
    def of(cls, families: Iterable[Metric]) -> "Reading | None":
        """Sum over engines; None where the metrics are not those of vLLM."""
        running, tokens, cumulative = None, 0, {}
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
        if running is None:
            return None
        below, steps = 0, {}
        for bound, count in sorted(cumulative.items()):
            steps[bound], below = count - below, count
        return cls(running, steps, tokens)

    def together_since(self, before: "Reading") -> int:
        """Requests that some engine step since an earlier reading gave a token at least: tokens a step, rounded up."""
        steps = sum(self.steps.values()) - sum(before.steps.values())
        return math.ceil((self.tokens - before.tokens) / steps) if steps > 0 else 0


@dataclass(frozen=True)
class BatchSizes:
    """The batch sizes that were seen: `running` as often as observed, `steps` as (most tokens in a step, steps)."""

    running: tuple[int, ...]
    steps: tuple[tuple[float, int], ...]

    @property
    def largest(self) -> int:
        """The most requests seen running together."""
        return max(self.running, default=0)

    def require_variation(self) -> None:
        """Raise unless requests really ran beside each other, in numbers that changed."""
        if self.largest < 2:
            raise NoTestError(
                f"not a test: the engine never ran more than {self.largest} request at a time; "
                "raise --concurrency, --samples or --max-tokens, or the server's --max-num-seqs"
            )
        if len(set(self.running)) < 2:
            raise NoTestError(
                f"not a test: the engine ran {self.largest} requests whenever it was looked at; raise --samples"
            )


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

    def add(self, reading: Reading) -> None:
        """Keep a reading."""
        self.readings.append(reading)

    @property
    def running_now(self) -> int:
        """Requests running at the last reading."""
        return self.readings[-1].running if self.readings else 0

    def largest_since(self, first: int) -> int:
        """Requests in the largest batch from a reading on: the most seen running, or what was counted if that is more,
        because a batch may be gone before anybody looks.
        """
        readings = self.readings[first:]
        counted = readings[-1].together_since(readings[0])
        return max(counted, *(reading.running for reading in readings))

    def over_time(self, name: str) -> Trace:
        """Requests running at every look, in seconds from the first."""
        begin = self.readings[0].when if self.readings else 0.0
        seconds = tuple(reading.when - begin for reading in self.readings)
        return Trace(name, seconds, tuple(reading.running for reading in self.readings))

    def batches(self) -> BatchSizes:
        """What was seen between the first and the last reading."""
        if not self.readings:
            return BatchSizes((), ())
        first, last = self.readings[0].steps, self.readings[-1].steps
        steps = tuple((bound, count - first.get(bound, 0)) for bound, count in sorted(last.items()))
        running = tuple(reading.running for reading in self.readings if reading.running)
        return BatchSizes(running, tuple((bound, count) for bound, count in steps if count))


def parse_metrics(page: str, *names: str) -> Iterable[Metric]:
    """What a metrics page says of the metrics whose names begin so: it has hundreds of others, which would only cost
    time to parse.
    """
    lines = [line for line in page.splitlines() if line.startswith(names)]
    return text_string_to_metric_families("\n".join(lines) + "\n")


async def read_metrics(client: httpx.AsyncClient, url: str) -> Reading:
    """Read a server's metrics page."""
    response = await client.get(url)
    reading = Reading.of(parse_metrics(response.text, RUNNING, STEP_TOKENS, GENERATED, ACCEPTED))
    if response.status_code != 200 or reading is None:
        raise NoTestError(
            f"{url} does not have {RUNNING}, without which nobody knows what was tested; "
            "serve with vLLM and without --disable-log-stats"
        )
    return reading


@asynccontextmanager
async def watch(client: httpx.AsyncClient, url: str, log: BatchLog, every: float = 0.25) -> AsyncIterator[None]:
    """Add a reading to `log` at the start, every so many seconds, and at the end."""

    async def poll() -> None:
        while True:
            await asyncio.sleep(every)
            # a page that is late under load only leaves a gap
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

"""What a server computes of requests that are always the same: its witness, by which two servers are compared whose
fingerprints differ, and the canary, which computes them again among the requests of others.
"""

import asyncio
import hashlib
import itertools
import logging
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from ... import envs
from ..reviews import patch_points
from . import metrics

logger = logging.getLogger("vllm.batch_invariant")

RUNS, DIFFERENCES = "vllm:batch_invariant_canary_runs", "vllm:batch_invariant_canary_differences"
"""Counters of a server with a canary."""
VERSION = 1
"""Of :data:`CANARIES`: a witness begins with it, so that other requests do not look like other bits."""
LOGPROBS = 5
"""Candidates that are listed at each position."""
_CONTEXT = 320
"""Tokens of the longest one."""


@dataclass(frozen=True)
class Canary:
    """A request that is always the same.

    Attributes:
        name: of it, in messages.
        prompt: its number of tokens.
        sampling: of vLLM's ``SamplingParams``.
    """

    name: str
    prompt: int
    sampling: Mapping[str, Any]

    def token_ids(self, vocabulary: int) -> list[int]:
        """The prompt: tokens of the middle half of the vocabulary, since special ones are at its ends."""
        words = (hashlib.sha256(f"{self.name} {place}".encode()).digest() for place in range(self.prompt))
        return [vocabulary // 4 + int.from_bytes(word[:8], "little") % (vocabulary // 2) for word in words]


CANARIES = (
    Canary("greedy", 40, {"temperature": 0.0, "max_tokens": 64}),
    Canary("one token", 1, {"temperature": 1.0, "seed": 1, "max_tokens": 16}),
    Canary("long", 300, {"temperature": 0.8, "seed": 2, "top_p": 0.95, "top_k": 50, "max_tokens": 16}),
    Canary(
        "penalties",
        20,
        {
            "temperature": 0.9,
            "seed": 3,
            "repetition_penalty": 1.1,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.5,
            "max_tokens": 16,
        },
    ),
)
"""Prefill of one token, of some and of many; decode; ways to sample that a server with drafts takes, too."""

Position = tuple[int, tuple[tuple[int, str], ...]]
"""A token, and ids and fp32 bits of it and of the listed candidates, by ascending id."""


@dataclass(frozen=True)
class Answers:
    """What an engine computed of all canaries: the positions of each, by its name."""

    positions: Mapping[str, tuple[Position, ...]]

    def __str__(self) -> str:
        """The witness."""
        digest = hashlib.sha256(repr(sorted(self.positions.items())).encode())
        return f"{VERSION}-{digest.hexdigest()[:16]}"

    def difference(self, other: "Answers") -> str:
        """Where another engine, or this one later, has other bits; empty if nowhere."""
        for name, mine in self.positions.items():
            theirs = other.positions[name]
            for place, (wanted, found) in enumerate(itertools.zip_longest(mine, theirs)):
                if wanted != found:
                    return f"canary {name!r} at token {place}: {_differing(wanted, found)}"
        return ""


def _differing(wanted: Position | None, found: Position | None) -> str:
    if wanted is None or found is None or wanted[0] != found[0]:
        return f"{found and found[0]} instead of {wanted and wanted[0]}"
    of_wanted, of_found = dict(wanted[1]), dict(found[1])
    token = min(one for one in of_wanted.keys() | of_found.keys() if of_wanted.get(one) != of_found.get(one))
    return f"the logprob of {token} is 0x{of_found.get(token)} instead of 0x{of_wanted.get(token)}"


def positions_of(generated: Any) -> tuple[Position, ...]:
    """Of vLLM's ``CompletionOutput``."""
    return tuple(
        (int(token), tuple(sorted((int(one), _bits(item.logprob)) for one, item in listed.items())))
        for token, listed in zip(generated.token_ids, generated.logprobs, strict=True)
    )


def _bits(logprob: float) -> str:
    return struct.pack(">f", logprob).hex()


class Witness:
    """A server's witness, which follows its weights.

    It is made before the server answers anybody, since who reads it wants to know before the first request; that is
    time for 64 tokens of an idle engine.

    Args:
        engine: vLLM's client of it.
        fingerprint: the server's, which tells when the weights are others.
        show: is called with the fingerprint and the witness, or with "" while there is none.
    """

    def __init__(self, engine: Any, fingerprint: Callable[[], str], show: Callable[[str, str], None]) -> None:
        self._engine, self._fingerprint, self._show = engine, fingerprint, show
        self._answers: Answers | None = None
        self._changed = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._numbers = itertools.count()
        self._task: asyncio.Task[None] | None = None

    def __str__(self) -> str:
        """Empty while there is none."""
        return "" if self._answers is None else str(self._answers)

    def follow(self, fingerprint: str) -> None:
        """The weights are others, of which nothing is known yet. In any thread."""
        self._answers = None
        self._show(fingerprint, "")
        self._loop.call_soon_threadsafe(self._changed.set)

    async def make(self) -> None:
        """Compute the canaries, again if weights are replaced meanwhile. Where they cannot be, the log says why."""
        if why := self._missing():
            self._changed.clear()  # else who follows the weights would be here again at once
            logger.warning("No witness: %s.", why)
            return
        while True:
            self._changed.clear()
            before = self._fingerprint()
            try:
                found = await self._computed()
            except Exception as error:  # a server without a witness serves as well
                logger.warning("No witness: the engine does not compute the canaries: %s", " ".join(str(error).split()))
                return
            if self._fingerprint() == before:
                break
        [first, *others] = found
        if problem := next(filter(None, map(first.difference, others)), ""):
            logger.error("No witness: the engines of this server differ: %s.", problem)
            return
        self._answers = first
        self._show(before, str(first))
        logger.info("witness: %s", first)

    def keep(self, minutes: float | None) -> None:
        """Follow the weights from now on, and compute the canaries again and again.

        Args:
            minutes: between two times; None: never.
        """
        self._task = asyncio.create_task(self._kept(minutes))

    async def _kept(self, minutes: float | None) -> None:
        seconds = None if minutes is None else 60 * minutes
        if minutes is not None:
            _counters(self._name)
        while True:
            try:
                await asyncio.wait_for(self._changed.wait(), seconds)
            except TimeoutError:
                await self.check()
            else:
                await self.make()

    async def check(self) -> None:
        """Compute the canaries once more, and count the engines that have other bits than before."""
        before, wanted = self._fingerprint(), self._answers
        if wanted is None or await self._rests():
            return
        try:
            found = await self._computed()
        except Exception as error:
            logger.warning("The engine does not compute the canary: %s", " ".join(str(error).split()))
            return
        if self._fingerprint() != before or self._answers is not wanted:
            return  # weights were replaced meanwhile
        runs, differences = _counters(self._name)
        runs.inc(len(found))
        for problem in filter(None, map(wanted.difference, found)):
            differences.inc()
            logger.error(
                "The canary has other bits than at the start: %s. The same weights gave both: take this server out of "
                "service, and look at its memory and its processor.",
                problem,
            )

    @property
    def _name(self) -> str:
        return str(self._engine.model_config.served_model_name)

    def _missing(self) -> str:
        """Why the engine cannot compute them; empty if it can."""
        model = self._engine.model_config
        if model.runner_type != "generate":
            return "the model generates nothing"
        if getattr(model, "is_encoder_decoder", False):
            return "the model answers about audio, and the canaries have none"
        if model.max_model_len < _CONTEXT:
            return f"the canaries need a context of {_CONTEXT} tokens, and --max-model-len is {model.max_model_len}"
        if 0 <= model.max_logprobs < LOGPROBS:
            return f"the canaries list {LOGPROBS} logprobs, and --max-logprobs is {model.max_logprobs}"
        return ""

    async def _rests(self) -> bool:
        """Whether the engine sleeps or was told to pause: then it computes for nobody."""
        return bool(await self._engine.is_sleeping()) or bool(await self._engine.is_paused())

    async def _computed(self) -> list[Answers]:
        """What each engine of the server computes of all canaries, which run beside each other and whatever else."""
        ranks = list(_ranks(self._engine.vllm_config.parallel_config))
        asked = [self._answer(canary, rank) for rank in ranks for canary in CANARIES]
        found = iter(await asyncio.gather(*asked))
        return [Answers({canary.name: next(found) for canary in CANARIES}) for _ in ranks]

    async def _answer(self, canary: Canary, rank: int | None) -> tuple[Position, ...]:
        prompt = {"type": "token", "prompt_token_ids": canary.token_ids(self._engine.model_config.get_vocab_size())}
        name = f"batch-invariant-canary-{next(self._numbers)}"
        outputs = self._engine.generate(prompt, _sampling(canary), name, data_parallel_rank=rank)
        generated = [output async for output in outputs][-1].outputs[0]
        return positions_of(generated)


def _ranks(parallel: Any) -> Iterator[int | None]:
    """Of the engines to which a server's client can send; one engine has none."""
    is_local = getattr(parallel, "local_engines_only", False)
    engines = parallel.data_parallel_size_local if is_local else parallel.data_parallel_size
    yield from range(engines) if engines > 1 else [None]


def _sampling(canary: Canary) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        **canary.sampling,
        logprobs=LOGPROBS,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=True,  # computed, and not remembered
    )


def minutes() -> float | None:
    """Between two runs of the canary, of :data:`.envs.CANARY`; None for no canary."""
    chosen = envs.CANARY.read()
    return None if chosen == envs.CANARY.values[0] else float(chosen)


@cache
def _made() -> tuple[Any, Any]:
    runs = patch_points.COUNTER.get()(RUNS, "Times that an engine computed the canary.", ("model_name",))
    differing = "Times that it had other bits than at the start, from the same weights."
    return runs, patch_points.COUNTER.get()(DIFFERENCES, differing, ("model_name",))


def _counters(model: str) -> tuple[Any, Any]:
    """The counters of runs and of differences, which are there from then on."""
    runs, differences = (metrics.registered(counter).labels(model_name=model) for counter in _made())
    return runs, differences

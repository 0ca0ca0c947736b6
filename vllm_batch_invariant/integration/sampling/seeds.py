"""Seeds of requests in vLLM's front end: one made of the request where it samples without, and one for each sample
where it names which of several it is. And a line in the log where a group of requests is bound to get one answer.
"""

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from copy import copy
from typing import Any

import numpy as np
import torch

from ... import envs
from ...seeds import SAMPLE_ID, sample_seed, seed_from
from ..reviews import patch_points

logger = logging.getLogger("vllm.batch_invariant")

DECIDING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
"""Sampling parameters that enter the seed. What only stops, formats or reports a sample does not: with more logprobs,
more tokens or another ``n`` it begins with the same tokens.
"""


def install() -> None:
    """Seed what vLLM's front end hands to the engine, of a server and of ``LLM`` alike, and look for equal requests."""
    setting = envs.SEED.read()
    chosen = None if setting == envs.SEED.values[0] else int(setting)
    processor = patch_points.INPUT_PROCESSOR.get()
    process_inputs, equal = processor.process_inputs, EqualRequests()

    def process_and_seed(self: Any, *args: Any, **named: Any) -> Any:
        request = seeded(process_inputs(self, *args, **named), chosen)
        equal.meet(request)
        return request

    processor.process_inputs = process_and_seed


def seeded(request: Any, chosen: int | None) -> Any:
    """The request; if it samples, with the seed that it is to have, in sampling parameters of its own.

    vLLM gives sample i of several (``n``) the seed plus i.

    Args:
        request: vLLM's ``EngineCoreRequest``.
        chosen: of :data:`.envs.SEED`; None if requests without a seed stay so.

    Raises:
        VLLMValidationError: vLLM's, if it names a sample and has no seed, or names none that there can be.
    """
    params = request.sampling_params
    if params is None or not params.temperature > 0:
        return request
    seed, others = params.seed, dict(params.extra_args or {})
    sample_id = others.pop(SAMPLE_ID, None)
    if seed is None and chosen is not None:
        seed = seed_of(request, chosen)
    if sample_id is not None:
        seed = _of_sample(seed, sample_id)
    if seed != params.seed:
        params = request.sampling_params = copy(params)
        params.__dict__.pop("sampling_type", None)  # is kept once it is read, and follows from the seed
        params.seed = seed
        params.extra_args = others or None  # so that nobody derives a seed twice
    return request


def _of_sample(seed: int | None, sample_id: Any) -> int:
    refused = patch_points.VALIDATION_ERROR.get()
    if seed is None:
        raise refused(
            f"{SAMPLE_ID}={sample_id!r} tells apart samples that have a seed, and this request has none; give it one, "
            f"or start the engine with {envs.SEED.name}=0"
        )
    try:
        return sample_seed(seed, sample_id)
    except ValueError as error:
        raise refused(str(error)) from error


def seed_of(request: Any, chosen: int) -> int:
    """A number from 0 to 2**62 - 1 made of the prompt, what decides how it is sampled, and ``chosen``."""
    values = [float(getattr(request.sampling_params, name)).hex() for name in DECIDING]
    digest = hashlib.sha256(f"{chosen} {' '.join(values)} ".encode())
    if request.prompt_token_ids is not None:
        digest.update(np.asarray(request.prompt_token_ids, dtype="<i8").tobytes())
    if request.prompt_embeds is not None:
        digest.update(_bytes_of(request.prompt_embeds))
    return seed_from(digest.digest())


def _bytes_of(embeds: torch.Tensor) -> bytes:
    return embeds.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


class EqualRequests:
    """Finds requests that come together and are bound to get one answer: the same prompt, parameters and seed.

    A trainer that asks so for a group of samples (GRPO) learns nothing of it, since the rewards are equal, too.
    Somebody who repeats a request on purpose finds a line in the log. Greedy requests and those without a seed are not
    looked at.

    Args:
        clock: seconds.
    """

    GROUP = 4
    """Equal requests that are a group."""
    SECONDS = 60.0
    """In which they come."""
    KEPT = 4096
    """Different requests that are remembered, the latest ones."""

    def __init__(self, clock: Any = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # vLLM's server makes requests in several threads
        self._seen: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self._told = False

    def meet(self, request: Any) -> None:
        """Count a request, and tell of the first group."""
        params = request.sampling_params
        if self._told or params is None or params.seed is None or not params.temperature > 0:
            return
        key = hash((_content(request), params.seed, repr(params)))
        now = self._clock()
        with self._lock:
            count, first = self._seen.pop(key, (0, now))
            count, first = (count + 1, first) if now - first <= self.SECONDS else (1, now)
            self._seen[key] = count, first
            if len(self._seen) > self.KEPT:
                self._seen.popitem(last=False)
            if count < self.GROUP or self._told:
                return
            self._told = True
            self._seen.clear()
        logger.warning(
            "%d requests within %d s have the same prompt, sampling parameters and seed (%d), so they get the same "
            "answer, bit for bit. If they are to be different samples, as for GRPO, ask for them by n, or give each a "
            "seed of its own or a %s in extra_args (vllm_xargs over HTTP): docs/contract.md, Several samples of one "
            "prompt. This is said once.",
            *(self.GROUP, self.SECONDS, params.seed, SAMPLE_ID),
        )


def _content(request: Any) -> int:
    ids, embeds = request.prompt_token_ids, request.prompt_embeds
    items = tuple(item.identifier for item in request.mm_features or ())
    adapter = getattr(getattr(request, "lora_request", None), "lora_name", None)
    return hash((tuple(ids or ()), items, adapter, None if embeds is None else _bytes_of(embeds)))

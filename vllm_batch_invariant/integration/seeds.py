"""Seeds for requests that sample without one, so that the same request gets the same sample when it is sent again."""

import hashlib
from copy import copy
from typing import Any

import numpy as np
import torch

from .. import envs
from . import patch_points

DECIDING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip
"""Sampling parameters that enter the seed. What only stops, formats or reports a sample does not: with more logprobs,
more tokens or another ``n`` it begins with the same tokens.
"""
_BITS = 62
"""Of a seed: vLLM adds a sample's index to it and keeps it as int64."""


def install() -> None:
    """Seed what vLLM's front end hands to the engine, if :data:`.envs.SEED` is set."""
    chosen = envs.SEED.read()
    if chosen == envs.SEED.values[0]:
        return
    processor = patch_points.INPUT_PROCESSOR.get()
    process_inputs = processor.process_inputs

    def process_and_seed(self: Any, *args: Any, **named: Any) -> Any:
        return seeded(process_inputs(self, *args, **named), int(chosen))

    processor.process_inputs = process_and_seed


def seeded(request: Any, chosen: int) -> Any:
    """The request, with sampling parameters of its own if it samples and has no seed.

    vLLM gives sample i of several the seed plus i.
    """
    params = request.sampling_params
    if params is not None and params.seed is None and params.temperature > 0:
        params = request.sampling_params = copy(params)
        params.__dict__.pop("sampling_type", None)  # is kept once it is read, and follows from the seed
        params.seed = seed_of(request, chosen)
    return request


def seed_of(request: Any, chosen: int) -> int:
    """A number from 0 to 2**62 - 1 made of the prompt, what decides how it is sampled, and ``chosen``."""
    values = [float(getattr(request.sampling_params, name)).hex() for name in DECIDING]
    digest = hashlib.sha256(f"{chosen} {' '.join(values)} ".encode())
    if request.prompt_token_ids is not None:
        digest.update(np.asarray(request.prompt_token_ids, dtype="<i8").tobytes())
    if request.prompt_embeds is not None:
        digest.update(request.prompt_embeds.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return int.from_bytes(digest.digest()[:8], "little") >> (64 - _BITS)

"""Which mode served a request: this project's, vLLM's own with the same flag, or none.

Without this plugin, which ``VLLM_PLUGINS`` may leave out or nobody installed, ``VLLM_BATCH_INVARIANT=1`` switches
vLLM's own mode on: a report of that mode must not pass for one of this project's.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from ...envs import FLAG
from ...integration.engine.endpoint import METRIC, NAME, PATH, PLUGINS

if TYPE_CHECKING:
    from .client import Connection

OURS = "vllm-batch-invariant"
THEIRS = f"vLLM's own invariant mode: vllm-batch-invariant is not installed beside it, or {PLUGINS} leaves it out"
NONE = f"none: {FLAG} is not 1"
UNKNOWN = f"unknown: a server with the mode on describes itself at {PATH}, and this one does not"


def of_engine() -> str:
    """The mode of the engine that runs in this process or was started by it."""
    if os.environ.get(FLAG) != "1":
        return NONE
    from ...integration.engine import install
    from ...integration.reviews import patch_points

    return OURS if patch_points.INIT_BATCH_INVARIANCE.get() is install.install_worker else THEIRS


def of_started(environment: Mapping[str, str]) -> str:
    """The mode of a server that this Python starts with an environment."""
    if environment.get(FLAG) != "1":
        return NONE
    listed = environment.get(PLUGINS)
    found = {point.name for point in entry_points(group="vllm.general_plugins")}
    return OURS if NAME in (found if listed is None else found & set(listed.split(","))) else THEIRS


async def of_server(server: "Connection") -> str:
    """The mode that a running server reports, in its own page or else in its metrics."""
    import httpx
    import openai

    from .metrics import parse_metrics

    with suppress(openai.OpenAIError):
        reported = await server.api.get(PATH.removeprefix("/v1"), cast_to=object)
        if isinstance(reported, dict) and reported.get("mode") is True:
            return OURS
    with suppress(httpx.HTTPError, ValueError):
        page = (await server.http.get(server.metrics)).text
        samples = (sample for family in parse_metrics(page, METRIC) for sample in family.samples)
        if any(sample.name == METRIC and sample.value == 1 for sample in samples):
            return OURS
    return UNKNOWN

"""Which mode answered: ours, vLLM's own of the same flag, or none.

``VLLM_BATCH_INVARIANT=1`` switches vLLM's own mode on where this plugin is not loaded, which ``VLLM_PLUGINS`` decides:
a report of that mode must not pass for one of ours.
"""

import os
from collections.abc import Mapping
from importlib.metadata import entry_points

import openai

from ..envs import FLAG
from ..integration.endpoint import PATH, PLUGINS, Endpoint
from .harness.client import Connection

OURS = "vllm-batch-invariant"
THEIRS = f"vLLM's own invariant mode: {PLUGINS} leaves vllm-batch-invariant out"
NONE = f"none: {FLAG} is not 1"
NOT_SAID = f"not said: a server declares itself if it is started with {PLUGINS}={Endpoint.name}"


def of_engine() -> str:
    """Of the engine that this process holds; of one that was started by it."""
    if os.environ.get(FLAG) != "1":
        return NONE
    from ..integration import install, patch_points

    return OURS if patch_points.INIT_BATCH_INVARIANCE.get() is install.install_worker else THEIRS


def of_started(environment: Mapping[str, str]) -> str:
    """Of a server that this Python starts with an environment."""
    if environment.get(FLAG) != "1":
        return NONE
    listed = environment.get(PLUGINS)
    found = {point.name for point in entry_points(group="vllm.general_plugins")}
    return OURS if Endpoint.name in (found if listed is None else found & set(listed.split(","))) else THEIRS


async def of_server(server: Connection) -> str:
    """Of a server that runs: what it declares."""
    try:
        declared = await server.api.get(PATH.removeprefix("/v1"), cast_to=object)
    except openai.OpenAIError:
        return NOT_SAID
    return OURS if isinstance(declared, dict) and declared.get("mode") is True else NOT_SAID

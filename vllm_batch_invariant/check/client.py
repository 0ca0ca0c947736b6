"""A connection to a server with vLLM's OpenAI API."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import openai

from vllm_batch_invariant.check.load import one_line
from vllm_batch_invariant.check.outcome import NoTestError


@dataclass(frozen=True)
class Served:
    """A model that a server offers."""

    name: str
    context: int
    """Most tokens of a prompt and its completion together."""


@dataclass(frozen=True)
class Connection:
    """An open connection. As text it is the server's address without the password that an URL may hold."""

    api: openai.AsyncOpenAI
    http: httpx.AsyncClient
    """For pages that are not of OpenAI's API. It is not the client's own, which is of another library from 3.0 on."""
    root: str
    """The server's address without ``/v1``."""

    @property
    def metrics(self) -> str:
        """Where vLLM's metrics page is."""
        return self.root + "/metrics"

    async def served_model(self, wanted: str | None) -> Served:
        """The model of that name, or the first.

        Raises:
            NoTestError: no server answers, or it has no such model.
        """
        try:
            served = (await self.api.models.list()).data
        except openai.OpenAIError as error:
            raise NoTestError(f"no OpenAI-compatible server answers at {self}: {one_line(error)}") from error
        for model in served:
            if wanted in (None, model.id):
                context = getattr(model, "max_model_len", None) or 2048
                return Served(model.id, context)
        names = ", ".join(model.id for model in served) or "nothing"
        raise NoTestError(f"{self} does not serve the model {wanted!r}; it serves {names}")

    def __str__(self) -> str:
        url = urlsplit(self.root)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


@asynccontextmanager
async def connect(base_url: str) -> AsyncIterator[Connection]:
    """Connect to a server, whether its address ends in ``/v1`` or not; its API key comes from ``OPENAI_API_KEY``."""
    url = urlsplit(base_url)
    root = f"{url.scheme}://{url.netloc}{url.path.rstrip('/').removesuffix('/v1')}"
    # no proxy from the environment between this machine and itself, and no certificates to load
    elsewhere = not _is_here(root)
    # shorter than the server's five seconds: a connection it is about to close must not be used again
    limits = {"max_connections": None, "keepalive_expiry": 2}
    transport = openai.DefaultAsyncHttpxClient(
        trust_env=elsewhere, verify=elsewhere, limits=type(openai.DEFAULT_CONNECTION_LIMITS)(**limits)
    )
    key = os.environ.get("OPENAI_API_KEY") or "none"
    async with (
        httpx.AsyncClient(trust_env=elsewhere, verify=elsewhere, limits=httpx.Limits(**limits), timeout=30) as http,
        openai.AsyncOpenAI(
            base_url=root + "/v1", api_key=key, max_retries=2, timeout=600, http_client=transport
        ) as api,
    ):
        yield Connection(api, http, root)


def _is_here(url: str) -> bool:
    return urlsplit(url).hostname in ("127.0.0.1", "localhost", "::1")

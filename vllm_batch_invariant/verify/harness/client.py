"""A connection to a server with vLLM's OpenAI API."""

import json
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

import httpx
import openai

from ..addresses import is_here
from ..outcome import NoTestError
from ..printing import one_line


@dataclass(frozen=True)
class Served:
    """A model that a server serves."""

    name: str
    context: int
    """Most tokens of a prompt and its completion together."""
    parent: str = ""
    """The model that it is an adapter of, if it is one."""


@dataclass(frozen=True)
class Connection:
    """An open connection. Its text is the server's address without the password that a URL may hold."""

    api: openai.AsyncOpenAI
    http: httpx.AsyncClient
    """For pages outside OpenAI's API. From openai 3.0 on, its client is of another library than httpx."""
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
            raw = await self.api.models.with_raw_response.list()
            listed = json.loads(raw.http_response.content)["data"]
            served = [
                Served(str(model["id"]), model.get("max_model_len") or 2048, str(model.get("parent") or ""))
                for model in listed
            ]
        except openai.AuthenticationError as error:
            how = "name the environment variable with its key: --api-key-env NAME"
            raise NoTestError(f"{self} refuses the API key or needs one; {how}") from error
        except openai.APIConnectionError as error:
            raise NoTestError(f"no OpenAI-compatible server answers at {self}: {_cause(error)}") from error
        except openai.OpenAIError as error:
            raise NoTestError(f"no OpenAI-compatible server answers at {self}: {one_line(error)}") from error
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            what = "its answer at /v1/models is no list of models in JSON; is it a web page or a proxy?"
            raise NoTestError(f"no OpenAI-compatible server answers at {self}: {what}") from error
        for one in served:
            if wanted in (None, one.name):
                return one
        names = ", ".join(one.name for one in served) or "nothing"
        raise NoTestError(f"{self} does not serve the model {wanted!r}; it serves {names}")

    async def versions(self) -> dict[str, str]:
        """The version of the server's vLLM; empty if it does not say."""
        try:
            return {"vllm": str((await self.http.get(self.root + "/version")).json()["version"])}
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return {}

    def __str__(self) -> str:
        url = urlsplit(self.root)
        return f"{url.scheme}://{url.netloc.rpartition('@')[2]}{url.path}"


def _cause(error: BaseException) -> str:
    """Why there is no connection: what the innermost error says, which knows a refusal from an unknown name."""
    while cause := error.__cause__ or error.__context__:
        error = cause
    if isinstance(error, socket.gaierror):
        return f"the name of the host is not known ({one_line(error)})"
    if isinstance(error, ConnectionRefusedError):
        return "nobody listens at this port (connection refused)"
    return one_line(error)


@asynccontextmanager
async def connect(base_url: str, api_key: str | None) -> AsyncIterator[Connection]:
    """Connect to a server, whether its address ends in ``/v1`` or not. It gets this API key, and nothing that the
    environment holds for OpenAI.
    """
    url = urlsplit(base_url)
    root = f"{url.scheme}://{url.netloc}{url.path.rstrip('/').removesuffix('/v1')}"
    # on this machine: no proxy of the environment, and no certificates to load
    elsewhere = not is_here(root)
    # shorter than the server's five seconds: a connection that it is about to close must not be reused
    limits = {"max_connections": None, "keepalive_expiry": 2}
    transport = openai.DefaultAsyncHttpxClient(
        trust_env=elsewhere, verify=elsewhere, limits=type(openai.DEFAULT_CONNECTION_LIMITS)(**limits)
    )
    with _nothing_for_openai():
        client = openai.AsyncOpenAI(
            base_url=root + "/v1", api_key=api_key or "none", max_retries=2, timeout=600, http_client=transport
        )
    async with (
        httpx.AsyncClient(trust_env=elsewhere, verify=elsewhere, limits=httpx.Limits(**limits), timeout=30) as http,
        client as api,
    ):
        yield Connection(api, http, root)


@contextmanager
def _nothing_for_openai() -> Iterator[None]:
    """Hide the variables from which OpenAI's client adds organisation, project, headers and other keys to requests."""
    hidden = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("OPENAI_")}
    try:
        yield
    finally:
        os.environ.update(hidden)

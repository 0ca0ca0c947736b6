"""What runs in a replica beside Ray Serve LLM and vLLM: its name in every answer, and on a CPU a core of its own."""

import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ray import serve
from ray.serve.llm import LLMServer

from vllm_batch_invariant.ray_serve import LoadPlugins

from .replicas import PROCESS, REPLICA

Message = MutableMapping[str, Any]


class Named:
    """An ASGI application whose answers have headers of the replica."""

    def __init__(self, app: Any, headers: list[tuple[bytes, bytes]]) -> None:
        self._app, self._headers = app, headers

    async def __call__(self, scope: Message, receive: Any, send: Callable[[Message], Awaitable[None]]) -> None:
        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), *self._headers]
            await send(message)

        await self._app(scope, receive, named)


class NamedServer(LLMServer):
    """Ray's server of a replica, with headers."""

    async def __serve_build_asgi_app__(self) -> Any:
        app = await super().__serve_build_asgi_app__()
        values = {REPLICA: serve.get_replica_context().replica_id.unique_id, PROCESS: str(os.getpid())}
        app.middleware_stack = None  # which is built again, with one more
        app.add_middleware(Named, headers=[(name.encode(), value.encode()) for name, value in values.items()])
        return app


class Offline(LoadPlugins):
    """Nothing is downloaded."""

    async def on_before_node_init(self) -> None:
        """Called by Ray before the engine starts."""
        await super().on_before_node_init()
        self.ctx.run_init_node = False


class OneCore(Offline):
    """The number of threads decides bits, so each replica has one, on a core by its rank."""

    async def on_before_node_init(self) -> None:
        """Called by Ray before the engine starts."""
        await super().on_before_node_init()
        cores, rank = sorted(os.sched_getaffinity(0)), serve.get_replica_context().rank
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = str(cores[getattr(rank, "rank", rank) % len(cores)])

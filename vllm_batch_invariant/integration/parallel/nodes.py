"""Workers of several machines: somebody starts each by itself, so the engine looks whether they are of one kind."""

from functools import wraps
from typing import Any

from ...errors import NotCovered
from ...provenance import EXACT, OF_EXPERTS
from ..engine.endpoint import METHOD
from ..reviews import patch_points

_ALIKE = ("mode", "versions", "engine")
"""Fields of what a worker says of itself; its device may be another one, which the fingerprint tells."""


def _reductions(said: dict[str, Any], known: set[str]) -> dict[str, Any]:
    """What a worker says of them, of those known: layers of other stages may have others, and experts' are numbered."""
    return {name: of for name, of in said["reductions"].items() if name in known and not name.startswith(OF_EXPERTS)}


def install() -> None:
    """Have an engine with workers on other machines ask all of them before its first step."""
    core = patch_points.ENGINE_CORE.get()
    original = core._initialize_kv_caches

    @wraps(original)
    def _initialize_kv_caches(self: Any, *args: Any, **named: Any) -> Any:
        if getattr(self.vllm_config.parallel_config, "nnodes", 1) > 1:
            check(self.model_executor)
        return original(self, *args, **named)

    core._initialize_kv_caches = _initialize_kv_caches


def check(executor: Any) -> None:
    """Refuse workers of other versions or settings than the first one's, and those whose mode is off.

    Raises:
        NotCovered: there are some.
    """
    try:
        first, *others = executor.collective_rpc(METHOD)
    except Exception as error:  # plain vLLM has no such method
        raise NotCovered(
            "workers of several nodes that do not all say that the mode is on",
            "plain vLLM's add and multiply as they like",
            "set VLLM_BATCH_INVARIANT=1 on every node, with the same packages",
        ) from error
    for other in others:
        unlike = [name for name in _ALIKE if other[name] != first[name]]
        shared = {*first["reductions"]} & {*other["reductions"]}
        same = _reductions(first, shared) == _reductions(other, shared)
        if not same or (EXACT in first["reductions"]) != (EXACT in other["reductions"]):
            unlike.append("reductions")
        if unlike:
            raise NotCovered(
                f"workers of several nodes with unlike {' and '.join(unlike)}",
                "which of them computes a part would decide bits that no fingerprint tells",
                "start the same packages with the same arguments on every node",
            )

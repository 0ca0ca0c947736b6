"""What an engine gives beside tokens, and what its router and sampler computed: runs in the engine's process."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import torch

from tests.engine.pooled import sent_together
from vllm_batch_invariant.integration.layers import experts
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.drive import bits

PREEMPTED_AFTER = 6
"""Steps."""
MOST_ROWS = 20
"""Up to which what is planted is right."""


def answers(llm: Any, requests: Sequence[dict[str, Any]], reset: str = "", whole: bool = False) -> dict[str, Any]:
    """Send requests together, and wait for all of them.

    Args:
        requests: each a ``prompt``, and in ``params`` arguments of ``SamplingParams``.
        reset: "cache" lets go of the prefix cache first, "running" also of what runs after some steps.
        whole: give experts as lists, and not as a digest.

    Returns:
        ``given``: of each request tokens, logprobs, experts [tokens - 1, layers, top_k] and masks; ``cached`` tokens of
        each; ``preemptions``; ``largest`` batch.
    """
    from vllm import SamplingParams

    asked = [(number, request, SamplingParams(**request["params"])) for number, request in enumerate(requests)]
    # the last first: the others, which answer for longer, are there when the targets come
    given, counts = sent_together(llm, asked[::-1], reset, PREEMPTED_AFTER)
    return {"given": [described(output, whole) for output in given]} | counts


def described(output: Any, whole: bool) -> dict[str, Any]:
    [completion] = output.outputs
    routed, mask = completion.routed_experts, completion.sampling_mask
    given = None if routed is None else routed.tolist() if whole else sha256(routed.tobytes()).hexdigest()
    return {
        "tokens": list(completion.token_ids),
        "logprobs": [bits(entry) for entry in completion.logprobs],
        "experts": given,
        "shape": None if routed is None else list(routed.shape),
        "masks": None if mask is None else [[int(token) for token in kept] for kept in mask.token_ids],
    }


def routers(llm: Any) -> list[experts.Router]:
    """Of the model, whose worker is in this process."""
    found: list[list[experts.Router]] = llm.apply_model(_routers)
    return found[0]


def _routers(model: torch.nn.Module) -> list[experts.Router]:
    return [module for module in model.modules() if isinstance(module, experts.Router)]


def seen(llm: Any, request: dict[str, Any]) -> dict[str, Any]:
    """A request alone, with what a forward hook saw each router choose: [layers][tokens][top_k]. Eager layers only."""
    layers = routers(llm)
    chosen: list[list[torch.Tensor]] = [[] for _ in layers]
    hooks = [
        layer.register_forward_hook(lambda module, given, out, at=at: chosen[at].append(out[1].cpu()))
        for at, layer in enumerate(layers)
    ]
    try:
        told = answers(llm, [request], "cache", whole=True)["given"][0]
    finally:
        for hook in hooks:
            hook.remove()
    return told | {"seen": [torch.cat(steps).tolist() for steps in chosen]}


@contextmanager
def _planted(llm: Any) -> Iterator[None]:
    """Experts in another order, and one candidate more, in batches of many rows. Eager layers only."""
    layers, points = routers(llm), (patch_points.TOP_K_TOP_P_OF_STATES, patch_points.TOP_K_TOP_P_OF_SAMPLER)
    captures, filters = [layer.capture for layer in layers], [point.get() for point in points]

    def turned(capture: Any) -> Any:
        return lambda ids: capture(ids if len(ids) <= MOST_ROWS else ids.flip(-1))

    def wider(filter_: Any) -> Any:
        def of(logits: torch.Tensor, k: torch.Tensor | None, p: torch.Tensor | None, **named: Any) -> torch.Tensor:
            return filter_(logits, k if k is None or len(logits) <= MOST_ROWS else k + 1, p, **named)

        return of

    for layer, capture in zip(layers, captures, strict=True):
        layer.capture = turned(capture)
    for point, filter_ in zip(points, filters, strict=True):
        point.put(wider(filter_))
    try:
        yield
    finally:
        for layer, capture in zip(layers, captures, strict=True):
            layer.capture = capture
        for point, filter_ in zip(points, filters, strict=True):
            point.put(filter_)


def with_faults(llm: Any, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """:func:`answers` with what follows the batch."""
    with _planted(llm):
        return answers(llm, requests, "cache")

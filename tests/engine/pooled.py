"""What pooling models give: runs in the engine's process."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch

from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops.dispatch import module_for
from vllm_batch_invariant.verify.harness.drive import drive, finished
from vllm_batch_invariant.verify.harness.worker_main import preemptions

PREEMPTED_AFTER = 3
"""Steps."""


def pooled(llm: Any, requests: Sequence[dict[str, Any]], reset: str = "") -> dict[str, Any]:
    """Send requests together, and wait for all of them.

    Args:
        requests: each a ``prompt``, and in ``params`` arguments of ``PoolingParams``.
        reset: "cache" lets go of the prefix cache first, "running" also of what runs after some steps.

    Returns:
        ``given``: of each request dtype, shape and bits of what it got; ``cached``: how many tokens each had in the
        cache; ``largest``: the most requests that were done in a step; ``preemptions``.
    """
    from vllm import PoolingParams

    asked = [(number, request, PoolingParams(**request["params"])) for number, request in enumerate(requests)]
    given, counts = sent_together(llm, asked, reset, PREEMPTED_AFTER)
    return {"given": [bits(output.outputs.data) for output in given]} | counts


def sent_together(
    llm: Any,
    asked: Sequence[tuple[int, dict[str, Any], Any]],
    reset: str,
    preempted_after: int,
    adapters: Mapping[int, Any] = MappingProxyType({}),
) -> tuple[list[Any], dict[str, Any]]:
    """The outputs of requests (number, request, vLLM's parameters) by their numbers, some with ``adapters``; and
    ``cached`` tokens of each, the ``largest`` step, and ``preemptions``, of which some are made after so many steps if
    ``reset`` is "running".
    """
    engine, before = llm.llm_engine, preemptions(llm)
    if reset:
        llm.reset_prefix_cache()
    for number, request, params in asked:
        prompt = {"prompt_token_ids": request["prompt"]} if "prompt" in request else request
        engine.add_request(str(number), prompt, params, lora_request=adapters.get(number))
    steps: list[list[Any]] = []
    for outputs in drive(engine):
        steps.append(outputs)
        if reset == "running" and len(steps) == preempted_after:
            engine.reset_prefix_cache(reset_running_requests=True)
    done = finished(steps)
    given = [done[str(number)] for number in range(len(asked))]
    counts = {"cached": [output.num_cached_tokens for output in given], "largest": max(map(len, steps))}
    return given, counts | {"preemptions": preemptions(llm) - before}


def products(llm: Any, request: dict[str, Any]) -> list[list[int]]:
    """K and N of the matmuls of a request that the mode's linear layers compute in fp32, and whose rows are its own."""
    found, served = list[list[int]](), module_for("linear", llm.llm_engine.vllm_config.device_config.device_type)
    mm = served.mm

    def told(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if a.dtype == torch.float32 and len(a) == 1:
            found.append([*b.shape])
        return mm(a, b, bias)

    served.mm = told
    try:
        pooled(llm, [request], "cache")
    finally:
        served.mm = mm
    return found


def as_vllm_resumes(llm: Any, requests: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """:func:`pooled` with preemptions, by vLLM's own method of the first model runner."""
    runner = patch_points.MODEL_RUNNER.get()
    ours = runner._update_states
    runner._update_states = ours.__wrapped__
    try:
        return pooled(llm, requests, "running")
    finally:
        runner._update_states = ours


def by_methods(llm: Any, method: str, prompts: Sequence[list[int]]) -> list[dict[str, Any]]:
    """What the offline interface gives: ``LLM.embed``, ``classify``, ``reward`` or ``encode``."""
    function, _, task = method.partition(" ")
    options = {"pooling_task": task} if task else {}
    outputs = getattr(llm, function)([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False, **options)
    return [bits(_data(output.outputs)) for output in outputs]


def _data(given: Any) -> torch.Tensor:
    for name in ("data", "embedding", "probs"):
        if (value := getattr(given, name, None)) is not None:
            return torch.as_tensor(value, dtype=torch.float32)
    raise TypeError(type(given))


def bits(data: torch.Tensor) -> dict[str, Any]:
    """Of a tensor."""
    raw = data.detach().cpu().contiguous()
    return {"dtype": str(raw.dtype), "shape": list(raw.shape), "bits": _hex(raw), "fp32": _hex(raw.to(torch.float32))}


def _hex(data: torch.Tensor) -> str:
    return data.reshape(-1).view(torch.uint8).numpy().tobytes().hex()

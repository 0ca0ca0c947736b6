"""vLLM's poolers: what they do by operations of the mode, and what must be seen of them.

Most of a pooler copies rows: the last token's, the first's, all of them, or those behind a mark. Classifiers and
projectors are linear layers, activations a softmax or a function of each element. Left are a mean over tokens, which
vLLM adds up by atomic additions on a GPU, and the norm of an embedding.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from inspect import signature
from types import FunctionType
from typing import Any

import torch

from .. import reviews
from ..reviews import patch_points

CALLED = ("pooling", "head", "pooler", "projector", "classifier", "activation")
"""What poolers and their heads call, each a layer or None."""


def install() -> None:
    """Replace the mean and the norm, and let go of what a preempted request has collected."""
    if patch_points.MEAN_POOL.is_there():
        patch_points.MEAN_POOL.get().forward = mean
    if patch_points.POOLER_NORMALIZE.is_there():
        patch_points.POOLER_NORMALIZE.get().forward_chunk = normalise
    if patch_points.ENCODER_STATE.is_there():
        state = patch_points.ENCODER_STATE.get()
        state.prepare_inputs = with_token_types(state.prepare_inputs)
    runner = patch_points.MODEL_RUNNER.get()
    runner._update_states = starts_again(runner._update_states)


def mean(self: Any, hidden_states: torch.Tensor, pooling_metadata: Any) -> torch.Tensor:
    """vLLM's method ``MeanPool.forward``: [requests, hidden] fp32, of each request the mean of its tokens, whose sum is
    that of the mode over as many rows as the prompt has.

    Args:
        hidden_states: [tokens, hidden], those of one request after those of another.
        pooling_metadata: vLLM's, with a cursor.

    Raises:
        RuntimeError: a prompt is not there as a whole.
    """
    cursor = pooling_metadata.get_pooling_cursor()
    if cursor.is_partial_prefill():
        raise RuntimeError("a mean over a part of a prompt")
    lengths = cursor.prompt_lens_cpu.tolist()
    prompts = hidden_states[: sum(lengths)].split(lengths)
    means = [prompt.to(torch.float32).mean(0) for prompt in prompts]
    return torch.stack(means) if means else hidden_states.new_empty(0, hidden_states.shape[1], dtype=torch.float32)


def with_token_types(prepare_inputs: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """The second model runner's method for encoders, with the types of tokens (the second text of a pair, in BERT) in
    the ids of a step, where the model's embedding reads them. vLLM puts them there in the model's forward, which a
    replayed CUDA graph does not run.
    """

    @wraps(prepare_inputs)
    def prepare(self: Any, input_batch: Any, *others: Any) -> dict[str, Any]:
        inputs = prepare_inputs(self, input_batch, *others)
        types = inputs.get("token_type_ids")
        if types is not None and "token_type_ids" in signature(self.model.forward).parameters:
            import_module("vllm.model_executor.models.bert")._encode_token_type_ids(input_batch.input_ids, types)
            del inputs["token_type_ids"]
        return inputs

    return prepare


def normalise(self: Any, pooled_data: torch.Tensor) -> torch.Tensor:
    """vLLM's method ``PoolerNormalize.forward_chunk``: rows [..., size] divided by the square root of the sum of their
    squares, in fp32 (fp64 for fp64), with one rounding.
    """
    wide = pooled_data if pooled_data.dtype == torch.float64 else pooled_data.to(torch.float32)
    norm = wide.square().sum(-1, keepdim=True).sqrt()
    return (wide / norm.clamp_min(1e-12)).to(pooled_data.dtype)


def starts_again(update: Any) -> Any:
    """The first model runner's method ``_update_states``, which keeps the rows that a request has collected chunk by
    chunk when the request is preempted, and would put them in front of those that are computed again.
    """

    @wraps(update)
    def update_states(self: Any, scheduler_output: Any) -> Any:
        for request in getattr(scheduler_output.scheduled_cached_reqs, "resumed_req_ids", ()):
            states = getattr(self.requests.get(request), "pooling_states", None)
            if states is not None:
                states.clean()
        return update(self, scheduler_output)

    return update_states


def parts(pooler: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The poolers that one of vLLM's chooses among by what a request wants, which PyTorch does not know of, because
    they are in a dictionary: each with its task.
    """
    tasks = getattr(pooler, "poolers_by_task", None)
    yield from tasks.items() if isinstance(tasks, dict) else ()


def problem_of(pooler: Any) -> str | None:
    """Why a pooler, or a head of one, is refused; None if all that it calls are layers, which are looked at, or
    functions of a known layer, which call others of its layers.
    """
    called = {name: getattr(pooler, name, None) for name in CALLED}
    strange = [name for name, value in called.items() if value is not None and not _is_looked_at(value)]
    return f"its {strange[0]} is a function" if strange else None


def _is_looked_at(called: Any) -> bool:
    if isinstance(called, FunctionType):
        return reviews.is_known(reviews.layers().known, called.__module__, called.__qualname__.partition(".")[0])
    return isinstance(called, torch.nn.Module)

"""Attention over a paged KV cache: a token has the same bits by prefill, by a chunk of any size and by decode."""

from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ...errors import NotCovered
from ..devices import DEVICES
from .params import PagedAttention
from .reduction import AttentionReduction

__all__ = ["IMPLEMENTATIONS", "AttentionReduction", "paged_attention"]

IMPLEMENTATIONS = ("numba", "triton", "flex", "reference", "exact")
_MODULES = {
    "numba": ".cpu",
    "triton": ".cuda",
    "flex": ".flex.{device}",
    "reference": ".reference",
    "exact": "..exact.{device}",
}


@torch.no_grad()
def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    *,
    scale: float,
    reduction: AttentionReduction,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    implementation: str = "auto",
    out: torch.Tensor | None = None,
    plan: Any = None,
) -> torch.Tensor:
    """Causal attention of each request's newest tokens over its paged keys and values, which are already written.

    A query row's bits depend on its own request's query, keys and values up to its position, and on ``reduction``: not
    on the other requests, the page size, the pages, how the request was cut into chunks, or the number of threads.
    Unwritten slots and pages may hold anything. Bits of two implementations are not comparable. No gradient is
    recorded.

    Args:
        query: [tokens, query_heads, head_size] fp32, bf16 or fp16; head_size a multiple of 16. Requests lie one after
            the other.
        key_cache: [pages, kv_heads, page_size, head_size] of the same dtype, any strides.
        value_cache: as ``key_cache``.
        block_table: [requests, max_pages] int32 or int64, the physical pages of each request.
        seq_lens: [requests] int32 or int64, keys of each request, its new tokens included.
        query_start_loc: [requests + 1] int32 or int64, ascending from 0: the rows of each request, its last positions.
            Empty ones are skipped.
        scale: factor of the scores.
        reduction: what decides the bits.
        sliding_window: a query at position p sees p - sliding_window + 1 to p; pages before that are never read.
        logits_soft_cap: scores become ``cap * tanh(score / cap)``.
        alibi_slopes: [query_heads], ``slope * (key position - query position)`` is added to the capped score.
        sinks: [query_heads], a score for each row's softmax that has no value: it is added to the row's sum of weights
            once, after all splits. Neither scaled nor capped.
        implementation: "auto" picks one by device; or one of :data:`IMPLEMENTATIONS`.
        out: [tokens, query_heads, head_size] of query's dtype, any strides; rows beyond ``query_start_loc[-1]`` are
            left alone.
        plan: on a GPU, a step's plan by ``attention.plan.Planner`` or ``attention.flex.plan.Planner``, for this
            ``seq_lens`` and ``query_start_loc``. With one nothing is read back to the host, so lengths and pages are
            not checked: the caller guarantees them.

    Returns:
        ``out``, or a new tensor whose rows beyond ``query_start_loc[-1]`` are 0.

    Raises:
        ValueError: arguments that do not fit, or a page outside the cache among those needed.
        NotCovered: no implementation for the device, or its package is missing.
    """
    params = PagedAttention(
        query, key_cache, value_cache, block_table, seq_lens, query_start_loc,
        float(scale), reduction, sliding_window, logits_soft_cap, alibi_slopes, sinks,
    )  # fmt: skip
    params.check(values=plan is None)
    if out is None:
        out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    elif out.shape != query.shape or out.dtype != query.dtype:
        raise ValueError(f"out must be {list(query.shape)} {query.dtype}, got {list(out.shape)} {out.dtype}")
    module = _implementation(implementation, query.device.type)
    if plan is not None:
        module.paged_attention(params, out, plan)
    elif params.tokens:
        module.paged_attention(params, out)
    return out


def _implementation(name: str, device: str) -> ModuleType:
    if name not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    own = DEVICES[device].attention if device in DEVICES else None
    chosen = own if name == "auto" else name
    if chosen is None or (chosen != own and chosen in {other.attention for other in DEVICES.values()}):
        raise NotCovered(
            f"attention on device '{device}' by '{name}'",
            "there is no implementation for it",
            "use a CPU or CUDA device, or leave the mode off",
        )
    try:
        return import_module(_MODULES[chosen].format(device=device), __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("numba", "llvmlite", "triton"):
            raise
        raise NotCovered(
            f"attention on device '{device}'", f"the package '{error.name}' is not installed", f"pip install {chosen}"
        ) from error

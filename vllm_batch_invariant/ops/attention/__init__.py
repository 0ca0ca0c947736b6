"""Attention over a paged KV cache: a token has the same bits by prefill, by a chunk of any size and by decode."""

from importlib import import_module
from types import ModuleType
from typing import Any

import torch

from ...errors import NotCovered
from ..devices import known
from .params import NO_RANGE, AttentionSpec, PackedKeys, PagedAttention, PagedCache
from .reduction import AttentionReduction

__all__ = [
    "IMPLEMENTATIONS",
    "NO_RANGE",
    "AttentionReduction",
    "AttentionSpec",
    "PackedKeys",
    "PagedAttention",
    "PagedCache",
    "attend",
    "paged_attention",
]

IMPLEMENTATIONS = ("numba", "triton", "flex", "reference", "exact")
_MODULES = {
    "numba": ".cpu",
    "triton": ".cuda",
    "flex": ".flex.{device}",
    "reference": ".reference",
    "exact": "..exact.{device}",
}


@torch.no_grad()
def attend(
    call: PagedAttention, implementation: str = "auto", out: torch.Tensor | None = None, plan: Any = None
) -> torch.Tensor:
    """Attention of each request's newest tokens over its paged keys and values, which are already written, or of all of
    its tokens over their own.

    A query row's bits depend on its own query, the keys and values that it sees, and the reduction: not on the other
    requests, the page size, the pages, how the request was cut into chunks, or the number of threads.
    Unwritten slots and pages may hold anything. Bits of two implementations are not comparable. No gradient is
    recorded.

    Args:
        call: the batch and the layer.
        implementation: "auto" picks one by device; or one of :data:`IMPLEMENTATIONS`.
        out: [tokens, query_heads, head_size of the values] of query's dtype, any strides; rows beyond
            ``query_start_loc[-1]`` are left alone.
        plan: on a GPU, a step's plan by ``attention.plan.Planner`` or ``attention.flex.plan.Planner``, for this
            ``seq_lens`` and ``query_start_loc``. With one nothing is read back to the host, so lengths and pages are
            not checked: the caller guarantees them.

    Returns:
        ``out``, or a new tensor whose rows beyond ``query_start_loc[-1]`` are 0.

    Raises:
        ValueError: arguments that do not fit, or a page outside the cache among those needed.
        NotCovered: no implementation for the device, or its package is missing; or it lacks what a layer asks.
    """
    call.check(values=plan is None)
    query = call.query
    if out is None:
        out = query.new_zeros(call.out_shape)
    elif out.shape != call.out_shape or out.dtype != query.dtype:
        raise ValueError(f"out must be {list(call.out_shape)} {query.dtype}, got {list(out.shape)} {out.dtype}")
    module = _implementation(implementation, query.device.type, call)
    if plan is not None:
        module.paged_attention(call, out, plan)
    elif call.tokens:
        module.paged_attention(call, out)
    return out


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_start_loc: torch.Tensor,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
    ranges: torch.Tensor | None = None,
    *,
    reduction: AttentionReduction,
    implementation: str = "auto",
    out: torch.Tensor | None = None,
    plan: Any = None,
    **spec: Any,
) -> torch.Tensor:
    """:func:`attend` with the fields of :class:`PagedAttention` and :class:`PagedCache` as arguments, and in ``spec``
    those of :class:`AttentionSpec`.
    """
    cache = PagedCache(key_cache, value_cache, block_table, None, k_scale, v_scale)
    call = PagedAttention(query, cache, seq_lens, query_start_loc, AttentionSpec(**spec), reduction, ranges)
    return attend(call, implementation, out, plan)


def _implementation(name: str, device: str, call: PagedAttention) -> ModuleType:
    if name not in ("auto", *IMPLEMENTATIONS):
        raise ValueError(f"implementation must be 'auto' or one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    devices = known()
    own = devices[device].attention if device in devices else None
    chosen = own if name == "auto" else name
    if chosen is None or (chosen != own and chosen in {other.attention for other in devices.values()}):
        raise NotCovered(
            f"attention on device '{device}' by '{name}'",
            "there is no implementation for it",
            "use a CPU or CUDA device, or leave the mode off",
        )
    try:
        module = import_module(_MODULES[chosen].format(device=device), __package__)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] not in ("numba", "llvmlite", "triton"):
            raise
        raise NotCovered(
            f"attention on device '{device}'", f"the package '{error.name}' is not installed", f"pip install {chosen}"
        ) from error
    if call.spec.added:
        call.spec.check(module.SERVES, chosen)
    if call.cache.holds_codes and not getattr(module, "READS_E4M3", False):
        raise NotCovered(
            f"a KV cache in fp8 by '{chosen}'",
            "that implementation does not read it",
            "leave --kv-cache-dtype out, or choose another implementation",
        )
    if call.cache.tail and not getattr(module, "READS_LATENT", False):
        raise NotCovered(
            f"multi-head latent attention by '{chosen}'",
            "that implementation has no values that are a part of the keys",
            "serve another model, or choose another implementation",
        )
    if call.ranges is not None and not getattr(module, "SEES_RANGES", False):
        raise NotCovered(
            f"ranges of keys after a token by '{chosen}'",
            "that implementation sees no keys after a token",
            "serve a model without them, or choose another implementation",
        )
    if isinstance(call.cache, PackedKeys) and not getattr(module, "READS_PACKED", False):
        raise NotCovered(
            f"keys without pages by '{chosen}'",
            "that implementation does not read them",
            "serve a decoder-only model, or choose another implementation",
        )
    return module

"""Attention over requests whose keys and values are known, by any implementation and in float64."""

import math
from copy import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.attention import (
    AttentionReduction,
    AttentionSpec,
    PackedKeys,
    PagedAttention,
    PagedCache,
    paged_attention,
)
from vllm_batch_invariant.ops.attention import attend as attend_call
from vllm_batch_invariant.ops.attention.params import causal_options
from vllm_batch_invariant.ops.attention.reference import paged_attention as reference_attention
from vllm_batch_invariant.ops.common.kv_cache import LARGEST
from vllm_batch_invariant.verify.check.operations import Chunk, Heads, Request, paged

__all__ = [
    "Chunk",
    "Heads",
    "Request",
    "attend",
    "by_tokens",
    "call_of",
    "exact",
    "features",
    "in_chunks",
    "packed",
    "paged",
    "with_powers_of_two",
]

FEATURES = {
    "plain": {},
    "sliding window": {"sliding_window": 37},
    "soft-cap": {"logits_soft_cap": 1.5},
    "ALiBi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.125, 0.0625])},
    "sinks": {"sinks": torch.tensor([-1.0, 0.5, 3.0, 6.0])},
    "all": {
        "sliding_window": 100,
        "logits_soft_cap": 2.0,
        "alibi_slopes": torch.tensor([0.5, 0.0, 0.125, -0.25]),
        "sinks": torch.tensor([-0.5, 0.0, 2.0, 4.0]),
    },
}
"""Options of layers with four query heads."""
FEATURES |= {name: {name: value} for name, value in causal_options(4).items() if name not in FEATURES["all"]}
features = pytest.mark.parametrize("options", FEATURES.values(), ids=FEATURES.keys())


def attend(
    chunks: list[Chunk],
    implementation: str = "numba",
    split_size: int = 256,
    page_size: int = 16,
    placement: int = 0,
    filler: float = 7.0,
    **features: object,
) -> list[torch.Tensor]:
    """The output rows of each chunk, computed together; skips the test of a feature that only others compute."""
    tensors = paged(chunks, page_size, placement, filler)
    scale = 1 / math.sqrt(chunks[0].request.heads.size)
    reduction = AttentionReduction(split_size)
    try:
        out = paged_attention(*tensors, scale=scale, reduction=reduction, implementation=implementation, **features)
    except NotCovered as refusal:
        assert not features.keys() <= FEATURES["all"].keys(), "which all compute"
        pytest.skip(str(refusal))
    return list(out.split([chunk.stop - chunk.start for chunk in chunks]))


def call_of(tensors: tuple[torch.Tensor, ...], reduction: AttentionReduction, **spec: Any) -> PagedAttention:
    """What an implementation is given, of the tensors of :func:`paged`."""
    query, keys, values, table, lengths, starts = tensors
    return PagedAttention(query, PagedCache(keys, values, table), lengths, starts, AttentionSpec(**spec), reduction)


def by_tokens(cache: PagedCache) -> PagedCache:
    """Codes with a scale of each token and head, of which those that no chunk has written are NaN."""
    coded = cache.coded_by_tokens()
    for scale, numbers in ((coded.k_scale, cache.keys), (coded.v_scale, cache.values)):
        scale[numbers.isnan().all(-1)] = math.nan
    return coded


def with_powers_of_two(chunks: list[Chunk]) -> list[Chunk]:
    """The same chunks, with keys and values whose scales of tokens are powers of two, of each head others."""
    made = []
    for chunk in chunks:
        request = copy(chunk.request)
        for number, name in enumerate(("key", "value")):
            x = getattr(request, name).float()
            exponents = (torch.arange(x[..., 0].numel()).view(x.shape[:-1]) * (5 + number) % 7).float() - 12
            largest = (LARGEST * torch.exp2(exponents))[..., None]
            scaled = (x / x.abs().amax(-1, keepdim=True) * largest).clamp(-largest, largest)
            setattr(request, name, scaled.to(request.heads.dtype))
        made.append(replace(chunk, request=request))
    return made


def exact(chunks: list[Chunk], **features: object) -> torch.Tensor:
    """The definition in float64."""
    scale = 1 / math.sqrt(chunks[0].request.heads.size)
    call = call_of(paged(chunks), AttentionReduction(), scale=scale, **features)
    call.check()
    out = torch.empty_like(call.query, dtype=torch.float64)
    reference_attention(call, out, torch.float64)
    return out


def in_chunks(request: Request, size: int, start: int = 0, **options: object) -> torch.Tensor:
    """Rows from position ``start`` on, computed in chunks of ``size``."""
    starts = range(start, request.length, size)
    return torch.cat([attend([Chunk(request, at, min(at + size, request.length))], **options)[0] for at in starts])


def packed(
    requests: list[Request],
    implementation: str = "numba",
    split_size: int = 256,
    strided: bool = False,
    padding: int = 0,
    reduction: AttentionReduction | None = None,
    causal: bool = False,
    seq_lens: torch.Tensor | None = None,
    first_rows: torch.Tensor | None = None,
    kernels: Any = None,
    **options: Any,
) -> list[torch.Tensor]:
    """The output rows of each request over the keys and values of its own tokens, computed together.

    Args:
        strided: queries, keys and values are parts of one tensor.
        padding: rows behind the last request, whose output is given last.
        seq_lens: others than those that the requests have.
        first_rows: [requests + 1] at which keys begin, others than queries do.
        kernels: what serves on a GPU.
    """
    heads, lengths = requests[0].heads, torch.tensor([request.length for request in requests])
    parts = [torch.cat([getattr(one, name) for one in requests]) for name in ("query", "key", "value")]
    if padding:
        parts = [torch.cat([part, torch.full_like(part[:1].expand(padding, -1, -1), math.nan)]) for part in parts]
    if strided:
        counts = [part.shape[1] for part in parts]
        parts = list(torch.cat(parts, dim=1).split(counts, dim=1))
    starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).int().to(parts[0].device)
    call = PagedAttention(
        parts[0],
        PackedKeys.of(*parts[1:], starts if first_rows is None else first_rows),
        lengths.int().to(parts[0].device) if seq_lens is None else seq_lens,
        starts,
        AttentionSpec(heads.size**-0.5, causal=causal, **options),
        reduction or AttentionReduction(split_size),
    )
    plan = None
    if kernels is not None:
        from vllm_batch_invariant.ops.attention.cuda import plan_alone

        plan = plan_alone(call, kernels)
    out = attend_call(call, implementation, plan=plan)
    return list(out.split([*lengths.tolist(), *([padding] if padding else [])]))

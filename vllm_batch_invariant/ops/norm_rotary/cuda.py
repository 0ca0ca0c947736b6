"""RMSNorm and rotary embedding of heads on a GPU, in Triton: a program has several heads of one token."""

import torch
import triton
import triton.language as tl

from ..common.triton_rows import ALIGNMENT, aligned, on_device_of
from ..norm.kernels import inverse_root_mean, weighted

_TILE = 1024
"""Elements of a program: with 2 warps, a vector of each half of a head in every thread."""
_WARPS = 2
_UNIT = 8
"""Elements by which the stride of tokens must be divisible, and in which the kernel counts it: 16 bytes."""


@triton.jit(do_not_specialize=["token_stride"])
def _norm_rotary_kernel(
    qkv,
    positions,
    query_weight,
    key_weight,
    cos_sin_cache,
    query_out,
    key_out,
    token_stride,
    eps,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    size: tl.constexpr,
    heads_at_once: tl.constexpr,
    unit: tl.constexpr,
):
    query_groups: tl.constexpr = (heads + heads_at_once - 1) // heads_at_once
    groups: tl.constexpr = query_groups + (kv_heads + heads_at_once - 1) // heads_at_once
    half: tl.constexpr = size // 2
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    x = qkv + token * token_stride * unit
    if group < query_groups:
        first_head, count, weight = group * heads_at_once, heads, query_weight
        out = query_out + token * (heads * size)
    else:
        first_head, count, weight = (group - query_groups) * heads_at_once, kv_heads, key_weight
        x += heads * size
        out = key_out + token * (kv_heads * size)
    head = first_head + tl.arange(0, heads_at_once)
    places = head[:, None] * size + tl.arange(0, half)[None, :]
    mask = tl.broadcast_to(head[:, None] < count, places.shape)
    in_head = tl.broadcast_to(tl.arange(0, half)[None, :], places.shape)
    first = tl.load(x + places, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + places + half, mask=mask, other=0.0).to(tl.float32)
    angles = cos_sin_cache + tl.load(positions + token) * size
    first_weight = tl.load(weight + in_head, mask=mask, other=0.0)
    second_weight = tl.load(weight + in_head + half, mask=mask, other=0.0)
    cos = tl.load(angles + in_head, mask=mask, other=0.0).to(tl.float32)
    sin = tl.load(angles + in_head + half, mask=mask, other=0.0).to(tl.float32)
    scale = inverse_root_mean(tl.sum(first * first + second * second, 1), size, eps)[:, None]
    first = weighted(first * scale, first_weight).to(tl.float32)
    second = weighted(second * scale, second_weight).to(tl.float32)
    tl.store(out + places, (first * cos - second * sin).to(out.dtype.element_ty), mask=mask)
    tl.store(out + places + half, (second * cos + first * sin).to(out.dtype.element_ty), mask=mask)


def norm_rotary(
    qkv: torch.Tensor,
    positions: torch.Tensor,
    query_weight: torch.Tensor,
    key_weight: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    eps: float,
    heads: int,
    kv_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See the operation's package."""
    tokens, size = len(positions), query_weight.shape[0]
    token_stride, inner_stride = qkv.stride()
    if inner_stride != 1 or token_stride % _UNIT or qkv.data_ptr() % ALIGNMENT:
        qkv = aligned(qkv)
        token_stride = qkv.shape[1]
    queries = torch.empty(tokens, heads * size, dtype=qkv.dtype, device=qkv.device)
    keys = torch.empty(tokens, kv_heads * size, dtype=qkv.dtype, device=qkv.device)
    heads_at_once = _TILE // size
    if tokens:
        with on_device_of(qkv):
            groups = -(-heads // heads_at_once) - (-kv_heads // heads_at_once)
            _norm_rotary_kernel[(tokens * groups,)](
                qkv,
                aligned(positions),
                aligned(query_weight),
                aligned(key_weight),
                aligned(cos_sin_cache),
                queries,
                keys,
                token_stride // _UNIT,
                eps,
                heads=heads,
                kv_heads=kv_heads,
                size=size,
                heads_at_once=heads_at_once,
                unit=_UNIT,
                num_warps=_WARPS,
                enable_fp_fusion=False,
            )
    return queries, keys

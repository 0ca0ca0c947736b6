"""The definition of paged attention, in plain PyTorch."""

import torch

from .merge import merge_splits
from .params import PagedAttention

SERVES = ("sliding_window", "logits_soft_cap", "alibi_slopes", "sinks", "causal")
READS_E4M3 = READS_PACKED = READS_LATENT = SEES_RANGES = True


def paged_attention(call: PagedAttention, out: torch.Tensor, precision: torch.dtype = torch.float32) -> None:
    """Write the attention of ``call`` to ``out``, computed in ``precision`` (fp32 or fp64) by PyTorch's matmuls."""
    queries_per_kv = call.query.shape[1] // call.cache.kv_heads
    for request, rows, query_positions in call.requests():
        query = call.query[rows].to(precision).transpose(0, 1)
        partials = []
        seen = [
            (call.first_key(position, row), call.last_key(position, row, query_positions.stop))
            for row, position in enumerate(query_positions, rows.start)
        ]
        intervals = torch.tensor(seen, device=query.device)
        for split in call.reduction.splits(seen[0][0], seen[-1][1]):
            positions = call.split_positions(split, rows, query_positions)
            key, value = (
                part.to(precision).repeat_interleave(queries_per_kv, dim=0)
                for part in call.cache.gather(request, positions)
            )
            scales = None
            if call.cache.scales_of_tokens:
                scales = [
                    one.to(precision).repeat_interleave(queries_per_kv, dim=0)[:, None]
                    for one in call.cache.gather_scales(request, positions)
                ]
            partials.append(_attend_split(call, query, key, value, scales, intervals, query_positions, positions))
        if call.spec.sinks is not None:
            sinks = call.spec.sinks.to(query)[:, None].expand(query.shape[:2])
            partials.append((query.new_zeros((*query.shape[:2], call.cache.value_size)), sinks))
        outputs, lses = (torch.stack(parts) for parts in zip(*partials, strict=True))
        merged = merge_splits(outputs, lses).transpose(0, 1)
        if call.cache.v_scale is not None and not call.cache.scales_of_tokens:
            merged = merged * _of_rows(call, call.cache.v_scale).to(merged)
        out[rows] = merged.to(out.dtype)


def _of_rows(call: PagedAttention, scale: torch.Tensor) -> torch.Tensor:
    """[query heads or 1, 1] of the scale of their KV head."""
    queries_per_kv = call.query.shape[1] // call.cache.kv_heads
    of_heads = scale if scale.numel() == 1 else scale.repeat_interleave(queries_per_kv)
    return of_heads.view(-1, 1)


def _attend_split(
    call: PagedAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scales: list[torch.Tensor] | None,
    intervals: torch.Tensor,
    query_positions: range,
    key_positions: range,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised output and LSE [heads, rows] of query [heads, rows, head_size] over one split [heads, keys, ...], of
    which a row sees what is in its interval [rows, 2]. Scales of tokens are [heads, 1, keys] of keys and of values.
    """
    spec = call.spec
    q_pos, k_pos = (torch.tensor(positions, device=query.device) for positions in (query_positions, key_positions))
    distance = q_pos[:, None] - k_pos[None, :]
    first, last = intervals.unbind(1)
    visible = (k_pos >= first[:, None]) & (k_pos <= last[:, None])
    qk = spec.scale * (query @ key.transpose(1, 2))
    if scales is not None:
        qk = qk * scales[0]
    elif call.cache.k_scale is not None:
        qk = qk * _of_rows(call, call.cache.k_scale)[:, None].to(qk)
    if spec.logits_soft_cap is not None:
        qk = spec.logits_soft_cap * torch.tanh(qk / spec.logits_soft_cap)
    if spec.alibi_slopes is not None:
        qk = qk - spec.alibi_slopes.to(qk)[:, None, None] * distance
    qk = qk.masked_fill(~visible, -torch.inf)
    m = qk.amax(dim=-1)
    p = torch.exp(qk - torch.where(m == -torch.inf, 0, m)[..., None])
    l = p.sum(dim=-1)
    if scales is not None:
        p = torch.where(visible, p * scales[1], 0)
    output = (p @ value) / torch.where(l == 0, 1, l)[..., None]
    return output, m + torch.log(l)

"""The definition of paged attention, in plain PyTorch."""

import torch

from .merge import merge_splits
from .params import PagedAttention


def paged_attention(call: PagedAttention, out: torch.Tensor, precision: torch.dtype = torch.float32) -> None:
    """Write the attention of ``call`` to ``out``, computed in ``precision`` (fp32 or fp64) by PyTorch's products."""
    group = call.query.shape[1] // call.key_cache.shape[1]
    for request, rows, query_positions in call.requests():
        query = call.query[rows].to(precision).transpose(0, 1)
        partials = []
        for split in call.reduction.splits(call.first_key(query_positions[0]), query_positions[-1]):
            positions = call.split_positions(split, query_positions)
            key, value = (
                part.to(precision).repeat_interleave(group, dim=0) for part in call.gather(request, positions)
            )
            partials.append(_attend_split(call, query, key, value, query_positions, positions))
        if call.sinks is not None:
            sinks = call.sinks.to(query)[:, None].expand(query.shape[:2])
            partials.append((torch.zeros_like(query), sinks))
        outputs, lses = (torch.stack(parts) for parts in zip(*partials, strict=True))
        out[rows] = merge_splits(outputs, lses).transpose(0, 1).to(out.dtype)


def _attend_split(
    call: PagedAttention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    query_positions: range,
    key_positions: range,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalised output and LSE [heads, rows] of query [heads, rows, head_size] over one split [heads, keys, ...]."""
    places, keys = (torch.tensor(positions, device=query.device) for positions in (query_positions, key_positions))
    distance = places[:, None] - keys[None, :]
    visible = distance >= 0
    if call.sliding_window is not None:
        visible &= distance < call.sliding_window
    score = call.scale * (query @ key.transpose(1, 2))
    if call.logits_soft_cap is not None:
        score = call.logits_soft_cap * torch.tanh(score / call.logits_soft_cap)
    if call.alibi_slopes is not None:
        score = score - call.alibi_slopes.to(score)[:, None, None] * distance
    score = score.masked_fill(~visible, -torch.inf)
    top = score.amax(dim=-1)
    weight = torch.exp(score - torch.where(top == -torch.inf, 0, top)[..., None])
    total = weight.sum(dim=-1)
    output = (weight @ value) / torch.where(total == 0, 1, total)[..., None]
    return output, top + torch.log(total)

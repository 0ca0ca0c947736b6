"""Gradients of a gated delta net on a CPU: PyTorch derives them, sequence by sequence, from the rule by chunks."""

from itertools import pairwise

import torch

from ..delta_rule import DeltaRuleReduction

CHUNK = 64
"""Rows between two states that are kept: memory for states against work within chunks."""


def gdn_backward(
    grad: torch.Tensor,
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    cu_seqlens: list[int],
    reduction: DeltaRuleReduction,
) -> tuple[torch.Tensor, ...]:
    """See the operation's package."""
    given = mixed, a, b, a_log, dt_bias
    grads = [torch.zeros_like(one, dtype=torch.float32) for one in given]
    for start, stop in pairwise(cu_seqlens):
        if start == stop:
            continue
        operands = [one[start:stop] for one in given[:3]] + list(given[3:])
        with torch.enable_grad():
            leaves = [one.detach().float().requires_grad_() for one in operands]
            out = gated_delta_net(*leaves, key_heads, reduction.key_size, reduction.scale)
        found = torch.autograd.grad(out, leaves, grad[start:stop].float())
        for whole, part in zip(grads[:3], found, strict=False):
            whole[start:stop] = part
        for whole, part in zip(grads[3:], found[3:], strict=True):
            whole += part
    return tuple(whole.to(one.dtype) for whole, one in zip(grads, given, strict=True))


def gated_delta_net(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    key_size: int,
    scale: float,
) -> torch.Tensor:
    """Of one sequence [tokens, value_heads, value_size], in the dtype of its operands and by operations that PyTorch
    has gradients of: chunks as Yang et al. (2024, arXiv:2406.06484) compute the delta rule, with decays.
    """
    tokens, value_heads = a.shape
    sizes = key_heads * key_size, key_heads * key_size, mixed.shape[1] - 2 * key_heads * key_size
    q, k, v = mixed.split(sizes, dim=1)
    q, k = (x.unflatten(1, (key_heads, key_size)) for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    q, k = (x.repeat_interleave(value_heads // key_heads, dim=1) for x in (q, k))
    g = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias, threshold=100.0)
    by_chunk = (_chunks(x) for x in (q, k, v.unflatten(1, (value_heads, -1)), g, b.sigmoid()))
    q, k, v, g, beta = by_chunk  # [chunks, value_heads, CHUNK, ...]
    total = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=a.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    same = torch.eye(CHUNK, dtype=a.dtype, device=a.device)
    system = same + (beta[..., None] * (k @ k.transpose(-1, -2)) * decay).tril(-1)
    sides = torch.cat((beta[..., None] * v, (beta * total.exp())[..., None] * k), -1)
    solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
    corrected, taken = solved.split([v.shape[-1], key_size], dim=-1)
    within, seen = (q @ k.transpose(-1, -2)) * decay, q * total.exp()[..., None]
    kept, end = k * (total[..., -1:] - total).exp()[..., None], total[..., -1].exp()[..., None, None]
    state, out = v.new_zeros(value_heads, key_size, v.shape[-1]), []
    for chunk in range(len(v)):
        u = corrected[chunk] - taken[chunk] @ state
        out.append(seen[chunk] @ state + within[chunk] @ u)
        state = state * end[chunk] + kept[chunk].transpose(-1, -2) @ u
    return scale * torch.stack(out).transpose(1, 2).flatten(0, 1)[:tokens]


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """[chunks, heads, CHUNK, ...] of [tokens, heads, ...], the last filled up with zeros: they decay nothing, and what
    they add is behind every row.
    """
    filled = torch.cat((x, x.new_zeros(-len(x) % CHUNK, *x.shape[1:])))
    return filled.unflatten(0, (-1, CHUNK)).transpose(1, 2)

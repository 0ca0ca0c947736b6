"""Gradients of delta rules on a CPU: PyTorch derives them, sequence by sequence, from the rule by chunks."""

from collections.abc import Sequence
from itertools import pairwise

import torch

from ..delta_rule import DeltaRuleReduction

CHUNK = 64
"""Rows between two states that are kept: memory for states against work within chunks."""


def delta_rule_backward(
    grad: torch.Tensor,
    operands: Sequence[torch.Tensor],
    key_heads: int,
    cu_seqlens: list[int],
    reduction: DeltaRuleReduction,
) -> tuple[torch.Tensor, ...]:
    """See the operation's package."""
    function, of_tokens = (gated_delta_net, 3) if reduction.solve else (state_space, 2)
    grads = [torch.zeros_like(one, dtype=torch.float32) for one in operands]
    for start, stop in pairwise(cu_seqlens):
        if start == stop:
            continue
        with torch.enable_grad():
            leaves = [
                (one[start:stop] if place < of_tokens else one).detach().float().requires_grad_()
                for place, one in enumerate(operands)
            ]
            out = function(*leaves, key_heads, reduction.key_size)
        found = torch.autograd.grad(out, leaves, grad[start:stop].float())
        for whole, part in zip(grads[:of_tokens], found, strict=False):
            whole[start:stop] = part
        for whole, part in zip(grads[of_tokens:], found[of_tokens:], strict=True):
            whole += part
    return tuple(whole.to(one.dtype) for whole, one in zip(grads, operands, strict=True))


def gated_delta_net(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    key_size: int,
) -> torch.Tensor:
    """Of one sequence [tokens, value_heads, value_size]; see :func:`_rule`."""
    value_heads = a.shape[1]
    sizes = key_heads * key_size, key_heads * key_size, mixed.shape[1] - 2 * key_heads * key_size
    q, k, v = mixed.split(sizes, dim=1)
    q, k = (x.unflatten(1, (key_heads, key_size)) for x in (q, k))
    q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
    g = -a_log.exp() * torch.nn.functional.softplus(a + dt_bias, threshold=100.0)
    return key_size**-0.5 * _rule(q, k, v.unflatten(1, (value_heads, -1)), g, b.sigmoid(), solve=True)


def state_space(
    mixed: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    groups: int,
    state_size: int,
) -> torch.Tensor:
    """Of one sequence [tokens, heads, head_size]; see :func:`_rule`."""
    heads, of_groups = dt.shape[1], groups * state_size
    x, b, c = mixed.split([mixed.shape[1] - 2 * of_groups, of_groups, of_groups], dim=1)
    b, c = (one.unflatten(1, (groups, state_size)) for one in (b, c))
    x, steps = x.unflatten(1, (heads, -1)), torch.nn.functional.softplus(dt + dt_bias, threshold=100.0)
    return _rule(c, b, x, a * steps, steps, solve=False) + skip[:, None] * x


def _rule(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, solve: bool
) -> torch.Tensor:
    """The rule with decays e^g, not scaled, in the dtype of its operands and by operations that PyTorch has gradients
    of: chunks as Yang et al. (2024, arXiv:2406.06484) compute the delta rule, with decays; without ``solve`` nothing is
    taken from a value of what the state holds.

    Args:
        q: [tokens, key_heads, key_size].
        k: the same.
        v: [tokens, value_heads, value_size].
        g: [tokens, value_heads].
        beta: the same.
    """
    tokens, value_heads = g.shape
    q, k = (x.repeat_interleave(value_heads // x.shape[1], dim=1) for x in (q, k))
    q, k, v, g, beta = (_chunks(x) for x in (q, k, v, g, beta))  # [chunks, value_heads, CHUNK, ...]
    total = g.cumsum(-1)
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=g.device).triu(1)
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(later, -torch.inf).exp()
    given = beta[..., None] * v
    if solve:
        same = torch.eye(CHUNK, dtype=g.dtype, device=g.device)
        system = same + (beta[..., None] * (k @ k.transpose(-1, -2)) * decay).tril(-1)
        sides = torch.cat((given, (beta * total.exp())[..., None] * k), -1)
        solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
        given, taken = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within, seen = (q @ k.transpose(-1, -2)) * decay, q * total.exp()[..., None]
    kept, end = k * (total[..., -1:] - total).exp()[..., None], total[..., -1].exp()[..., None, None]
    state, out = v.new_zeros(value_heads, k.shape[-1], v.shape[-1]), []
    for chunk in range(len(v)):
        u = given[chunk] - taken[chunk] @ state if solve else given[chunk]
        out.append(seen[chunk] @ state + within[chunk] @ u)
        state = state * end[chunk] + kept[chunk].transpose(-1, -2) @ u
    return torch.stack(out).transpose(1, 2).flatten(0, 1)[:tokens]


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """[chunks, heads, CHUNK, ...] of [tokens, heads, ...], the last filled up with zeros: they decay nothing, and what
    they add is behind every row.
    """
    filled = torch.cat((x, x.new_zeros(-len(x) % CHUNK, *x.shape[1:])))
    return filled.unflatten(0, (-1, CHUNK)).transpose(1, 2)

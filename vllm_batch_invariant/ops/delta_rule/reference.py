"""The definition of the gated delta rule, also with gates of channels, and of Mamba-2's state space, in float64."""

import torch


def gdn_inputs(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    key_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """See the operation's package: float64, nothing is rounded."""
    sizes = key_heads * key_size, key_heads * key_size, mixed.shape[1] - 2 * key_heads * key_size
    q, k, v = mixed.double().split(sizes, dim=1)
    q, k = (x.unflatten(1, (key_heads, key_size)) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    g = -a_log.double().exp() * torch.nn.functional.softplus(a.double() + dt_bias.double(), threshold=100.0)
    return q, k, v.unflatten(1, (a.shape[1], -1)), g, b.double().sigmoid()


def kda_gates(
    a: torch.Tensor, b: torch.Tensor, a_log: torch.Tensor, dt_bias: torch.Tensor, least: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays and betas of ``kda_inputs``, float64."""
    heads = len(a_log)
    x, speed = (a.double() + dt_bias.double()).unflatten(1, (heads, -1)), a_log.double().exp()[:, None]
    if least is None:
        return -speed * torch.nn.functional.softplus(x, threshold=100.0), b.double().sigmoid()
    return least * (speed * x).sigmoid(), b.double().sigmoid()


def mamba2_gates(dt: torch.Tensor, a: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays and time steps of ``mamba2_inputs``, float64."""
    steps = torch.nn.functional.softplus(dt.double() + dt_bias.double(), threshold=100.0)
    return a.double() * steps, steps


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    solve: bool = True,
    skip: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of one request from its first token on, token by token: float64 [tokens, value_heads, V] and the state behind the
    last token [value_heads, K, V], where nothing is rounded in between. Without ``solve`` it is a state space; g
    [tokens, value_heads] or, with gates of channels, [tokens, value_heads, K].
    """
    group = v.shape[1] // k.shape[1]
    q, k = (x.double().repeat_interleave(group, dim=1) for x in (q, k))
    v, g, beta = v.double(), g.double(), beta.double()
    state, given = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]), torch.empty_like(v)
    for t in range(len(v)):
        state = state * g[t].exp().view(v.shape[1], -1, 1)
        difference = v[t] - torch.einsum("hk,hkv->hv", k[t], state) if solve else v[t]
        state = state + k[t][:, :, None] * (beta[t][:, None] * difference)[:, None, :]
        given[t] = torch.einsum("hk,hkv->hv", q[t], state) * (k.shape[2] ** -0.5 if solve else 1.0)
    return given if skip is None else given + skip.double()[:, None] * v, state

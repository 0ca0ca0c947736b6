"""The gated delta rule of linear attention (Yang, Kautz, Hatamizadeh: arxiv.org/abs/2412.06464), with a gate a head or,
as in Kimi Delta Attention, a gate a channel, and the state space of Mamba-2 (Dao, Gu: arxiv.org/abs/2405.21060), which
is lightning attention where the decay is constant: their prefill, decode and verify have the same bits. Qwen3-Next and
Qwen3.5 call layers of the first gated delta nets.
"""

from types import ModuleType

import torch

from ..causal_conv import causal_conv, reduction_of
from ..dispatch import implementation
from .params import Convolution, DeltaStates
from .reduction import ALIGNMENT, DeltaPages, DeltaRuleReduction

__all__ = [
    "Convolution",
    "DeltaPages",
    "DeltaRuleReduction",
    "DeltaStates",
    "delta_rule",
    "gdn_inputs",
    "kda_inputs",
    "mamba2_inputs",
]


def _is_fused(served: ModuleType, mixed: torch.Tensor, convolution: Convolution | None) -> bool:
    """Whether a device makes operands in the launch that convolves, as it does for few new tokens of each request."""
    if convolution is None or not hasattr(served, "convolved_inputs"):
        return False
    reduction_of(mixed, *convolution)  # for its errors
    return convolution.states.longest <= served.FUSED


def _convolved(mixed: torch.Tensor, convolution: Convolution | None) -> torch.Tensor:
    """What a layer's convolution and its SiLU make of rows."""
    if convolution is None:
        return mixed
    return torch.nn.functional.silu(causal_conv(mixed, *convolution))


def gdn_inputs(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    key_size: int,
    convolution: Convolution | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands of :func:`delta_rule` in a gated delta net, each token by itself behind the convolution.

    Args:
        mixed: [tokens, 2 * key_heads * key_size + value_heads * value_size] fp32, bf16 or fp16: queries, keys and
            values. Rows may be any stride apart.
        a: [tokens, value_heads], what gates are made of.
        b: [tokens, value_heads], what betas are made of.
        a_log: [value_heads]
        dt_bias: [value_heads]
        key_heads: of queries and keys.
        key_size: elements of a query and a key.
        convolution: with SiLU, what mixed's rows pass first; None: they have.

    Returns:
        q and k [tokens, key_heads, key_size], divided by their norm sqrt(sum of squares + 1e-6) in fp32 and rounded to
        mixed's dtype; v [tokens, value_heads, value_size], which may be a view of mixed;
        g = -exp(a_log) * softplus(a + dt_bias) and beta = sigmoid(b), both [tokens, value_heads] fp32.

    Raises:
        ValueError: shapes that do not fit.
        NotCovered: a device without an implementation.
    """
    tokens, value_heads = a.shape
    values = mixed.shape[1] - 2 * key_heads * key_size
    fits = (
        mixed.dim() == 2
        and mixed.stride(1) == 1
        and len(mixed) == tokens
        and b.shape == a.shape
        and a_log.shape == dt_bias.shape == (value_heads,)
        and values > 0
        and values % value_heads == 0
    )
    if not fits:
        given = ", ".join(str(list(one.shape)) for one in (mixed, a, b, a_log, dt_bias))
        raise ValueError(f"no gated delta net of {given} with {key_heads} key heads of {key_size}")
    served = implementation("delta_rule", mixed, a, b, a_log, dt_bias)
    if _is_fused(served, mixed, convolution):
        return served.convolved_inputs(mixed, convolution, (a, b, a_log, dt_bias), key_heads, key_size, True)
    mixed = _convolved(mixed, convolution)
    q, k, g, beta = served.gdn_inputs(mixed, a, b, a_log, dt_bias, key_heads, key_size)
    return q, k, mixed[:, -values:].unflatten(1, (value_heads, values // value_heads)), g, beta


def kda_inputs(
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    least: float | None = None,
    convolution: Convolution | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands of :func:`delta_rule` with gates of channels in Kimi Delta Attention (Kimi Team: arxiv.org/abs/
    2510.26692), each token by itself behind the convolution.

    Args:
        mixed: [tokens, 3 * heads * size] fp32, bf16 or fp16: queries, keys and values. Rows may be any stride apart.
        a: [tokens, heads * size], what gates are made of.
        b: [tokens, heads], what betas are made of.
        a_log: [heads]
        dt_bias: [heads * size]
        least: below 0, what gates are above; None: they have no bound.
        convolution: with SiLU, what mixed's rows pass first; None: they have.

    Returns:
        q and k [tokens, heads, size], divided by their norm sqrt(sum of squares + 1e-6) in fp32 and rounded to mixed's
        dtype; v [tokens, heads, size], which may be a view of mixed; g = -exp(a_log) * softplus(a + dt_bias), or with a
        bound least * sigmoid(exp(a_log) * (a + dt_bias)), [tokens, heads, size] fp32; beta = sigmoid(b) [tokens, heads]
        fp32.

    Raises:
        ValueError: shapes that do not fit.
        NotCovered: a device without an implementation.
    """
    tokens, heads = b.shape
    channels = mixed.shape[1] // 3
    fits = (
        mixed.dim() == 2
        and mixed.stride(1) == 1
        and mixed.shape == (tokens, 3 * channels)
        and channels % heads == 0 < channels
        and a.shape == (tokens, channels)
        and a_log.shape == (heads,)
        and dt_bias.shape == (channels,)
        and (least is None or least < 0)
    )
    if not fits:
        given = ", ".join(str(list(one.shape)) for one in (mixed, a, b, a_log, dt_bias))
        raise ValueError(f"no Kimi Delta Attention of {given} with gates above {least}")
    served = implementation("delta_rule", mixed, a, b, a_log, dt_bias)
    mixed, size = _convolved(mixed, convolution), channels // heads
    q, k, g, beta = served.kda_inputs(mixed, a, b, a_log, dt_bias, size, least)
    return q, k, mixed[:, 2 * channels :].unflatten(1, (heads, size)), g, beta


def mamba2_inputs(
    mixed: torch.Tensor,
    dt: torch.Tensor,
    a: torch.Tensor,
    dt_bias: torch.Tensor,
    groups: int,
    state_size: int,
    convolution: Convolution | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands of :func:`delta_rule` without ``solve`` in a state space of Mamba-2, each token by itself behind the
    convolution.

    Args:
        mixed: [tokens, heads * head_size + 2 * groups * state_size] fp32, bf16 or fp16: x, B and C. Rows may be any
            stride apart.
        dt: [tokens, heads], what time steps are made of.
        a: [heads] fp32, below 0.
        dt_bias: [heads]
        groups: of heads that have one B and one C.
        state_size: elements of a B and a C.
        convolution: with SiLU, what mixed's rows pass first; None: they have.

    Returns:
        C and B [tokens, groups, state_size] and x [tokens, heads, head_size], which may be views of mixed; and of the
        time steps s = softplus(dt + dt_bias) the decays a * s and s itself, both [tokens, heads] fp32.

    Raises:
        ValueError: shapes that do not fit.
        NotCovered: a device without an implementation.
    """
    tokens, heads = dt.shape
    of_groups = groups * state_size
    values = mixed.shape[1] - 2 * of_groups
    fits = (
        mixed.dim() == 2
        and mixed.stride(1) == 1
        and len(mixed) == tokens
        and a.shape == dt_bias.shape == (heads,)
        and a.dtype == torch.float32
        and values > 0
        and values % heads == 0
    )
    if not fits:
        given = ", ".join(f"{list(one.shape)} {one.dtype}" for one in (mixed, dt, a, dt_bias))
        raise ValueError(f"no state space of {given} with {groups} groups of {state_size}")
    served = implementation("delta_rule", mixed, dt, a, dt_bias)
    if _is_fused(served, mixed, convolution):
        x, b, c, g, steps = served.convolved_inputs(mixed, convolution, (dt, dt, a, dt_bias), groups, state_size, False)
        return c, b, x, g, steps
    mixed = _convolved(mixed, convolution)
    g, steps = served.mamba2_gates(dt, a, dt_bias)
    x, b, c = mixed.split([values, of_groups, of_groups], dim=1)
    b, c = (one.unflatten(1, (groups, state_size)) for one in (b, c))
    return c, b, x.unflatten(1, (heads, values // heads)), g, steps


def delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    states: DeltaStates,
    reduction: DeltaRuleReduction,
    skip: torch.Tensor | None = None,
) -> torch.Tensor:
    """Of the new tokens of some requests the gated delta rule with decays e^g, as :class:`DeltaRuleReduction` says;
    states and rows are kept in the requests' pages.

    Args:
        q: [tokens, key_heads, K] in the reduction's dtype. Rows of one request follow one another; those behind the
            last request's are not read. Value head h has key head ``h * key_heads // value_heads``.
        k: [tokens, key_heads, K] of the same dtype.
        v: [tokens, value_heads, V] of the same dtype, tokens any stride apart.
        g: [tokens, value_heads] fp32, 0 or less; of a reduction with gates of channels [tokens, value_heads, K].
        beta: [tokens, value_heads] fp32.
        states: where the requests' earlier tokens are. The new ones are written there.
        reduction: of the layer.
        skip: [value_heads] fp32, bf16 or fp16: what a head's values are multiplied by and added to its results; None:
            they are not added.

    Returns:
        [tokens, value_heads, V] of v's dtype. Rows of no request are not written. Bits of a row depend on that token
        and those before it: not on how a request is cut into calls, nor on rows that a later call writes anew, as those
        of drafts that were rejected.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotCovered: a device without an implementation.
    """
    tokens, key_heads, key_size = k.shape
    value_heads, value_size = v.shape[1:]
    requests, held = len(states.pages), states.states
    fits = (
        q.shape == k.shape
        and v.shape[0] == tokens
        and v.stride()[1:] == (value_size, 1)
        and value_heads % key_heads == 0
        and beta.shape == (tokens, value_heads)
        and g.shape == (*beta.shape, *reduction.of_gates)
        and (key_size, value_size) == (reduction.key_size, reduction.value_size)
        and {q.dtype, k.dtype, v.dtype} == {reduction.dtype}
        and {g.dtype, beta.dtype} == {torch.float32}
        and (skip is None or skip.shape == (value_heads,))
        and states.starts.shape == (requests + 1,)
        and states.context_lens.shape == (requests,)
        and states.rows >= reduction.chunk
        and held.dtype == torch.uint8
        and held.shape[1:] == (reduction.page_bytes(key_heads, value_heads, states.rows),)
        and held.stride(1) == 1
        and held.stride(0) % ALIGNMENT == held.data_ptr() % ALIGNMENT == 0
    )
    if not fits:
        given = ", ".join(f"{list(one.shape)} {one.dtype}" for one in (q, k, v, g, beta, held))
        raise ValueError(f"no delta rule of {given} for {requests} requests with {states.rows} rows and {reduction}")
    batch = states.pages, states.starts, states.context_lens
    served = implementation("delta_rule", q, k, v, g, beta, held, skip, *batch)
    return served.delta_rule(q, k, v, g, beta, states, reduction, skip)

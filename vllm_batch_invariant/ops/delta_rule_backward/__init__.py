"""Gradients of a gated delta net over whole sequences that lie one after the other: of the exact function, computed
again in fp32 with nothing rounded on the way.
"""

from collections.abc import Sequence

import torch

from ..delta_rule import DeltaRuleReduction
from ..dispatch import implementation

__all__ = ["gdn_backward"]


def gdn_backward(
    grad: torch.Tensor,
    mixed: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    key_heads: int,
    cu_seqlens: Sequence[int],
    reduction: DeltaRuleReduction,
) -> tuple[torch.Tensor, ...]:
    """Of ``delta_rule(*gdn_inputs(mixed, a, b, a_log, dt_bias))``. What a token is given depends on its sequence alone.

    Args:
        grad: [tokens, value_heads, value_size], of the rule's result.
        mixed, a, b, a_log, dt_bias, key_heads: of :func:`..delta_rule.gdn_inputs`.
        cu_seqlens: the first token of each sequence, ascending from 0, and the number of tokens.
        reduction: of the layer, with ``solve``.

    Returns:
        Gradients of mixed, a, b, a_log and dt_bias, each rounded once to its dtype. Those of the last two are added
        over sequences in fp32, ascending.

    Raises:
        ValueError: a gradient or sequences that do not fit.
        NotCovered: a device without an implementation.
    """
    bounds = list(cu_seqlens)
    if grad.shape != (len(mixed), len(a_log), reduction.value_size) or not reduction.solve:
        raise ValueError(f"no gradient {list(grad.shape)} of a gated delta net of {list(mixed.shape)} with {reduction}")
    if bounds[:1] != [0] or bounds != sorted(bounds) or bounds[-1] != len(mixed):
        raise ValueError(f"sequences of {len(mixed)} tokens cannot begin at {bounds}")
    module = implementation("delta_rule_backward", *(one.detach() for one in (grad, mixed, a, b, a_log, dt_bias)))
    return module.gdn_backward(grad, mixed, a, b, a_log, dt_bias, key_heads, bounds, reduction)

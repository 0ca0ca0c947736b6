"""Gradients of a gated delta net and of a state space of Mamba-2 over whole sequences that lie one after the other: of
the exact function, computed again in fp32 with nothing rounded on the way.
"""

from collections.abc import Sequence

import torch

from ..delta_rule import DeltaRuleReduction
from ..dispatch import implementation

__all__ = ["delta_rule_backward"]


def delta_rule_backward(
    grad: torch.Tensor,
    operands: Sequence[torch.Tensor],
    key_heads: int,
    cu_seqlens: Sequence[int],
    reduction: DeltaRuleReduction,
) -> tuple[torch.Tensor, ...]:
    """Of ``delta_rule(*gdn_inputs(mixed, a, b, a_log, dt_bias))``; without ``solve`` of
    ``delta_rule(*mamba2_inputs(mixed, dt, a, dt_bias), skip=skip)``. What a token is given depends on its sequence
    alone.

    Args:
        grad: [tokens, value_heads, value_size], of the rule's result.
        operands: mixed, a, b, a_log and dt_bias of :func:`..delta_rule.gdn_inputs`; without ``solve`` mixed, dt, a and
            dt_bias of :func:`..delta_rule.mamba2_inputs` and the skip [value_heads].
        key_heads: of queries and keys; of a state space its groups.
        cu_seqlens: the first token of each sequence, ascending from 0, and the number of tokens.
        reduction: of the layer.

    Returns:
        The operands' gradients, each rounded once to its dtype. Those of what is no token's are added over sequences in
        fp32, ascending.

    Raises:
        ValueError: a gradient or sequences that do not fit.
        NotCovered: a device without an implementation.
    """
    bounds, mixed, weight = list(cu_seqlens), operands[0], operands[-1]
    if grad.shape != (len(mixed), len(weight), reduction.value_size):
        raise ValueError(f"no gradient {list(grad.shape)} of a delta rule of {list(mixed.shape)} with {reduction}")
    if bounds[:1] != [0] or bounds != sorted(bounds) or bounds[-1] != len(mixed):
        raise ValueError(f"sequences of {len(mixed)} tokens cannot begin at {bounds}")
    module = implementation("delta_rule_backward", *(one.detach() for one in (grad, *operands)))
    return module.delta_rule_backward(grad, operands, key_heads, bounds, reduction)

"""Mixtures of experts whose tokens have the same bits whatever other tokens there are, and wherever those are routed.

    s = softmax(logits) or sigmoid(logits)                          for each token
    i[0], ..., i[k-1] = the k experts with the highest s, of equal ones the lowest first
    g[j] = s[i[j]], divided by their sum if they are renormalised, times a factor
    y = round(((g[0] e[0] + g[1] e[1]) + g[2] e[2]) + ...)          e[j]: what expert i[j] makes of the token

An expert is a gated layer: ``down(activation(gate(x)) * up(x))``, or one without a gate, ``down(activation(up(x)))``,
with the GEMMs and the rounding of a dense one. The order of the sum follows the scores of the token alone. Kernels that
add with atomics follow the order in which blocks of other tokens are done, and libraries leave open which of two equal
scores comes first.
"""

from dataclasses import replace

import torch

from ..dispatch import implementation, module_for
from ..scaled_linear import ScaledLinearReduction
from .params import ExpertAdapters, Experts, StoredExperts
from .reduction import MoeReduction

__all__ = ["ExpertAdapters", "Experts", "MoeReduction", "StoredExperts", "moe", "of_codes", "route"]


def of_codes(reduction: MoeReduction, codes: torch.Tensor, in_blocks: bool = True) -> MoeReduction:
    """The reduction of a layer whose products are of such codes [experts, N, K] of e4m3, on their device.

    Args:
        reduction: of the same layer, with products of matrices.
        codes: of one of both products.
        in_blocks: whether scales are those of blocks of 128 x 128, and not of rows.

    Raises:
        NotCovered: a device without such products.
    """
    mma = module_for("scaled_linear", codes.device.type).mma_of(codes)
    of = ScaledLinearReduction.of(codes.shape[2], reduction.dtype, codes.dtype, in_blocks, mma)
    return replace(reduction, products=of)


def route(
    logits: torch.Tensor, reduction: MoeReduction, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the experts of each token.

    Args:
        logits: [tokens, num_experts] fp32, bf16 or fp16.
        bias: [num_experts] fp32, added to scores where they are compared, but not in the weights.

    Returns:
        weights [tokens, top_k] fp32 and ids [tokens, top_k] int64, both by descending (biased) score. The ids of a
        token are valid and distinct, also if its logits are NaN.

    Raises:
        ValueError: shapes that do not fit.
        NotCovered: a dtype or device without an implementation.
    """
    shapes = [tuple(logits.shape[-1:]), *([tuple(bias.shape)] if bias is not None else [])]
    if logits.dim() != 2 or set(shapes) != {(reduction.num_experts,)}:
        raise ValueError(
            f"route takes logits [tokens, {reduction.num_experts}] and a bias of [{reduction.num_experts}], got "
            f"{list(logits.shape)}" + (f" and {list(bias.shape)}" if bias is not None else "")
        )
    return implementation("moe", logits, bias).route(logits, reduction, bias)


def moe(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Experts) -> torch.Tensor:
    """The weighted sum of what its experts make of each token.

    Args:
        x: [tokens, hidden] of the reduction's dtype.
        weights: [tokens, top_k] fp32, as :func:`route` gives them.
        ids: [tokens, top_k] integers.
        experts: of the layer.

    Returns:
        [tokens, hidden] of x's dtype. A token's bits depend on that token, its weights and ids, and the experts.

    Raises:
        ValueError: shapes or dtypes that do not fit.
        NotCovered: a device without an implementation.
    """
    experts.check(x, weights, ids)
    return implementation("moe", x, weights, ids, *experts.tensors).moe(x, weights, ids, experts)

"""Mixtures of experts in exact arithmetic on a CPU: tokens are grouped by expert as in :mod:`..moe.cpu`, and what an
expert computes is :mod:`.cpu`'s.
"""

import torch

from ...errors import NotCovered
from ..moe import cpu as of_floats
from ..moe.reduction import MoeReduction
from .cpu import ExactWeight, finish, partial_linear, prepare, silu_and_mul, softmax
from .limits import LEAVE_IT

_DEFINED = {"scoring": "softmax", "groups": 1, "scale": 1.0, "activation": "silu", "dtype": torch.bfloat16}
"""Fields of a reduction that have one value here."""


def check(reduction: MoeReduction) -> None:
    """Refuse experts that :mod:`.definition` does not define.

    Raises:
        NotCovered: by the first of their settings.
    """
    for name, value in _DEFINED.items():
        if (found := getattr(reduction, name)) != value:
            raise NotCovered(
                f"a mixture of experts with {name} {found} in exact arithmetic", f"it is defined for {value}", LEAVE_IT
            )


def route(
    logits: torch.Tensor, reduction: MoeReduction, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As :func:`.definition.route`.

    Raises:
        NotCovered: a reduction without a definition, or a bias.
    """
    check(reduction)
    if bias is not None:
        raise NotCovered("a bias of a router in exact arithmetic", "it has no definition", LEAVE_IT)
    return of_floats.route_by(softmax(logits, dtype=torch.float32), reduction, None)


def prepare_experts(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights [experts, N, K] bf16 on their rows' grids: integers [experts, N, 1, K] int16 and scales [experts, N, 1].

    Raises:
        NotCovered: weights that are not finite.
    """
    made = prepare(weight.flatten(0, 1))
    if not bool(torch.isfinite(made.scale).all()):
        raise NotCovered(
            "weights of experts that are not finite", "exact arithmetic has no integers for them", LEAVE_IT
        )
    return made.integers.unflatten(0, weight.shape[:2]), made.scale.unflatten(0, weight.shape[:2])


def moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    reduction: MoeReduction,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    places: torch.Tensor | None,
) -> torch.Tensor:
    """See the operation's package."""
    prepared = (prepare_experts(weight) for weight in (gate_up, down))
    return prepared_moe(x, weights, ids, *prepared, reduction, gate_up_bias, down_bias, places)


def prepared_moe(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: tuple[torch.Tensor, torch.Tensor],
    down: tuple[torch.Tensor, torch.Tensor],
    reduction: MoeReduction,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    places: torch.Tensor | None,
) -> torch.Tensor:
    """``moe`` with weights from :func:`prepare_experts`, as :func:`.definition.expert_sum`.

    Raises:
        NotCovered: a reduction without a definition, biases, or a part of the experts.
    """
    check(reduction)
    for what, value in (
        ("biases of experts", gate_up_bias),
        ("biases of experts", down_bias),
        ("a part of them", places),
    ):
        if value is not None:
            raise NotCovered(f"a mixture of experts with {what} in exact arithmetic", "it has no definition", LEAVE_IT)

    def expert(number: int, rows: torch.Tensor) -> torch.Tensor:
        hidden = finish(partial_linear(rows, ExactWeight(gate_up[0][number], gate_up[1][number])), None)
        return partial_linear(silu_and_mul(hidden), ExactWeight(down[0][number], down[1][number]))

    return of_floats.sum_of_experts(x, weights, ids, len(down[0]), expert)

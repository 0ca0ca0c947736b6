"""Mixtures of experts in exact arithmetic on a CPU: tokens are grouped by expert as in :mod:`..moe.cpu`, and what an
expert computes is :mod:`.cpu`'s.
"""

from dataclasses import replace

import torch

from ...errors import NotCovered
from ..moe import cpu as of_floats
from ..moe.params import Experts
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


def moe(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Experts) -> torch.Tensor:
    """See the operation's package."""
    gate_up, down = (prepare_experts(weight) for weight in (experts.gate_up, experts.down))
    return prepared_moe(x, weights, ids, replace(experts, gate_up=gate_up, down=down))


def prepared_moe(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, experts: Experts) -> torch.Tensor:
    """``moe`` with weights from :func:`prepare_experts`, as :func:`.definition.expert_sum`.

    Raises:
        NotCovered: a reduction without a definition, biases, a part of the experts, or adapters.
    """
    check(experts.reduction)
    for what, value in (
        ("biases of experts", experts.gate_up_bias),
        ("biases of experts", experts.down_bias),
        ("a part of them", experts.places),
        ("adapters", experts.adapters),
    ):
        if value is not None:
            raise NotCovered(f"a mixture of experts with {what} in exact arithmetic", "it has no definition", LEAVE_IT)

    gate_up, down = experts.gate_up, experts.down

    def expert(number: int, rows: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        hidden = finish(partial_linear(rows, ExactWeight(gate_up[0][number], gate_up[1][number])), None)
        return partial_linear(silu_and_mul(hidden), ExactWeight(down[0][number], down[1][number]))

    return of_floats.sum_of_experts(x, weights, ids, len(down[0]), expert)

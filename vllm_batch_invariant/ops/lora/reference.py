"""The definition of adapters, in float64, and in the order of a reduction."""

from collections.abc import Callable, Sequence

import torch

from .reduction import LoraReduction


def add_adapters(
    y: torch.Tensor, x: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], slots: torch.Tensor
) -> torch.Tensor:
    """See the operation's package: what y becomes, [M, N] float64, where nothing is rounded."""
    out = y.double()
    for row, slot in enumerate(slots.tolist()):
        if slot >= 0:
            pairs = ((a_i[slot, 0].double(), b_i[slot, 0].double()) for a_i, b_i in zip(a, b, strict=True))
            out[row] += torch.cat([b_i @ (a_i @ x[row].double()) for a_i, b_i in pairs])
    return out


def in_order(
    y: torch.Tensor,
    x: torch.Tensor,
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    slots: torch.Tensor,
    reduction: LoraReduction,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """What y becomes in the order of the reduction, row by row, [M, N] of y's dtype.

    Args:
        product: of a row [1, K] and a matrix [K, N] what a device makes, [1, N] in ``reduction.accumulate``, not yet
            rounded: K is that of a leaf, with N the rank step, or K is the rank step.
    """
    step, out = reduction.rank_step, y.clone()
    for row, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        deltas = []
        for a_i, b_i in zip(a, b, strict=True):
            delta = torch.zeros(1, b_i.shape[2], dtype=reduction.accumulate, device=y.device)
            for a_step, b_step in zip(a_i[slot, 0].split(step), b_i[slot, 0].split(step, 1), strict=True):
                padding = step - len(a_step)
                a_step = torch.nn.functional.pad(a_step, (0, 0, 0, padding))  # [step, K]
                b_step = torch.nn.functional.pad(b_step, (0, padding))  # [N_i, step]
                leaves = zip(
                    x[row : row + 1].split(reduction.k_leaf, 1), a_step.split(reduction.k_leaf, 1), strict=True
                )
                u = torch.zeros(1, step, dtype=reduction.accumulate, device=y.device)
                for x_leaf, a_leaf in leaves:
                    u = u + product(x_leaf, a_leaf.t())
                delta = delta + product(u.to(reduction.dtype), b_step.t())
            deltas.append(delta)
        out[row] = (y[row].to(reduction.accumulate) + torch.cat(deltas, 1)[0]).to(y.dtype)
    return out

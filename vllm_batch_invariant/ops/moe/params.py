"""The experts of a layer as a value, checked against the tokens that are routed to them."""

from dataclasses import dataclass
from typing import Any

import torch

from .reduction import MoeReduction


@dataclass(frozen=True, eq=False)
class Experts:
    """Those of a layer that are here.

    Attributes:
        gate_up: [experts, 2 * intermediate, hidden]; the halves or, for "swigluoai", the even and odd rows are those of
            gate and up. Or what an implementation's ``prepare_experts`` makes of them.
        down: [experts, hidden, intermediate], or as ``gate_up``.
        reduction: of the layer, with its activation.
        gate_up_bias: [experts, 2 * intermediate], or None.
        down_bias: [experts, hidden], or None.
        places: [num_experts] integers: where in ``gate_up`` and ``down`` an expert lies; -1 for one that is not there,
            which is left out of the sum. None if all are there, in order.
    """

    gate_up: Any
    down: Any
    reduction: MoeReduction
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    places: torch.Tensor | None = None

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All that are there."""
        return self.gate_up, self.down, self.gate_up_bias, self.down_bias, self.places

    def placed(self, ids: torch.Tensor) -> torch.Tensor:
        """Where the experts of these numbers lie; -1 for one that is not there."""
        return ids if self.places is None else self.places[ids]

    def check(self, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
        """Refuse tokens and experts that do not fit.

        Raises:
            ValueError: one line that names the argument.
        """
        down, reduction = self.down, self.reduction
        hidden, intermediate = down.shape[1:]
        expected = {
            "x": (x, (len(x), hidden)),
            "weights": (weights, (len(x), reduction.top_k)),
            "ids": (ids, (len(x), reduction.top_k)),
            "gate_up": (self.gate_up, (len(down), 2 * intermediate, hidden)),
            "gate_up_bias": (self.gate_up_bias, (len(down), 2 * intermediate)),
            "down_bias": (self.down_bias, (len(down), hidden)),
            "places": (self.places, (reduction.num_experts,)),
        }
        for name, (tensor, shape) in expected.items():
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(
                    f"moe takes {name} {list(shape)} beside down {list(down.shape)}, got {list(tensor.shape)}"
                )
        if self.places is None and len(down) != reduction.num_experts:
            raise ValueError(f"moe needs places for {len(down)} of {reduction.num_experts} experts")
        dtypes = {tensor.dtype for tensor in (x, self.gate_up, down)}
        if dtypes != {reduction.dtype} or weights.dtype != reduction.accumulate:
            raise ValueError(
                f"moe takes tokens and experts in {reduction.dtype} and weights in {reduction.accumulate}, got "
                f"{x.dtype}, {self.gate_up.dtype}, {down.dtype} and {weights.dtype}"
            )

"""The experts of a layer as a value, checked against the tokens that are routed to them."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from ..formats.eight import FP8_BLOCK, SIDE
from ..formats.record import Format
from .reduction import MoeReduction


@dataclass(frozen=True, eq=False)
class StoredExperts:
    """Weights [experts, N, K] of one GEMM as a format stores them. As a sequence it has the matrix of each expert.

    Attributes:
        format: of the weights.
        tensors: that the format stores, each with the experts as its first dimension.
        dtype: of the matrices.
    """

    format: Format
    tensors: tuple[torch.Tensor, ...]
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the weights: experts, N, K."""
        experts, n, words = self.tensors[0].shape
        return torch.Size((experts, n, words * self.format.packing))

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.tensors[0].device

    @property
    def is_meta(self) -> bool:
        """Whether they have no memory."""
        return self.tensors[0].is_meta

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, expert: int) -> torch.Tensor:
        """The matrix [N, K] of an expert, in new memory."""
        out = torch.empty(*self.shape[1:], dtype=self.dtype, device=self.device)
        return self._write(expert, out)

    def _write(self, expert: int, out: torch.Tensor) -> torch.Tensor:
        return self.format.write([tensor[expert].contiguous() for tensor in self.tensors], out)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[expert] for expert in range(len(self)))

    def matrices(self, out: torch.Tensor | None = None) -> torch.Tensor:
        """All of them: [experts, N, K], written to ``out`` if that is given."""
        out = torch.empty(self.shape, dtype=self.dtype, device=self.device) if out is None else out
        by_rows = (tensor.dim() == 3 and tensor.shape[1] == out.shape[1] for tensor in self.tensors)
        if all(by_rows) and all(tensor.is_contiguous() for tensor in (*self.tensors, out)):
            self.format.write([tensor.flatten(0, 1) for tensor in self.tensors], out.flatten(0, 1))
        else:  # tensors that are no rows: of groups of elements, or of blocks
            for expert, matrix in enumerate(out):
                self._write(expert, matrix)
        return out


@dataclass(frozen=True, eq=False)
class Codes:
    """Rows as codes of e4m3 and scales of their groups, as an operand of a product. Indices choose rows.

    Attributes:
        codes: [rows, K] float8_e4m3fn, packed.
        scales: [rows, ceil(K / 128)] fp32, packed.
        dtype: of the rows that they were made of.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        """Of the rows."""
        return self.codes.shape

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.codes.device

    def __len__(self) -> int:
        return len(self.codes)

    def __getitem__(self, rows: Any) -> "Codes":
        chosen = self.codes.view(torch.uint8)[rows].view(self.codes.dtype)  # PyTorch gathers no e4m3 on every device
        return Codes(chosen, self.scales[rows], self.dtype)


@dataclass(frozen=True, eq=False)
class Experts:
    """Those of a layer that are here.

    Attributes:
        gate_up: [experts, 2 * intermediate, hidden]; the halves or, for "swigluoai", the even and odd rows are those of
            gate and up. Without a gate [experts, intermediate, hidden]. Or :class:`StoredExperts`, or what an
            implementation's ``prepare_experts`` makes of them.
        down: [experts, hidden, intermediate], or as ``gate_up``.
        reduction: of the layer, with its activation.
        gate_up_bias: of its rows, [experts, 2 * intermediate] or [experts, intermediate], or None.
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
        stored = (of.tensors if isinstance(of, StoredExperts) else (of,) for of in (self.gate_up, self.down))
        return *chain(*stored), self.gate_up_bias, self.down_bias, self.places

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
        rows = (1 + reduction.is_gated) * intermediate
        expected = {
            "x": (x, (len(x), hidden)),
            "weights": (weights, (len(x), reduction.top_k)),
            "ids": (ids, (len(x), reduction.top_k)),
            "gate_up": (self.gate_up, (len(down), rows, hidden)),
            "gate_up_bias": (self.gate_up_bias, (len(down), rows)),
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
        if reduction.products is not None:
            self._check_blocks()
        dtypes = {tensor.dtype for tensor in (x, self.gate_up, down)}
        if dtypes != {reduction.dtype} or weights.dtype != reduction.accumulate:
            raise ValueError(
                f"moe takes tokens and experts in {reduction.dtype} and weights in {reduction.accumulate}, got "
                f"{x.dtype}, {self.gate_up.dtype}, {down.dtype} and {weights.dtype}"
            )

    def _check_blocks(self) -> None:
        """Refuse experts whose codes have no products."""
        if self.down.shape[2] % SIDE:
            raise ValueError(f"a block of {SIDE} rows has one scale, and gate has {self.down.shape[2]} rows")
        for name, weight in {"gate_up": self.gate_up, "down": self.down}.items():
            if not isinstance(weight, StoredExperts) or weight.format is not FP8_BLOCK:
                raise ValueError(f"moe takes {name} as codes in blocks, where its products are those of codes")
            codes, scales = weight.tensors
            experts, n, k = codes.shape
            wanted = (experts, -(-n // SIDE), -(-k // SIDE))
            if tuple(scales.shape) != wanted or not weight.format.is_stored_as(weight.tensors, weight.dtype):
                raise ValueError(
                    f"moe takes {name} as e4m3 with fp32 scales {list(wanted)}, got {codes.dtype}, {scales.dtype} and "
                    f"{list(scales.shape)}"
                )

"""The experts of a layer as a value, checked against the tokens that are routed to them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch

from ..formats.eight import FP8, FP8_BLOCK, SIDE
from ..formats.fp4 import NVFP4
from ..formats.record import Format
from ..lora import LoraReduction, add_adapters
from .reduction import MoeReduction

Slices = tuple[torch.Tensor, ...]


@dataclass(frozen=True, eq=False)
class StoredExperts:
    """Weights [experts, N, K] of one GEMM as a format stores them. As a sequence it has the matrix of each expert.

    Attributes:
        format: of the weights.
        tensors: that the format stores, each with the experts as its first dimension. Scales of rows may be fewer, each
            of as many neighbours: one of a matrix, or of gate and of up.
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
        return self.format.write(self._of(expert), out)

    def _of(self, expert: int) -> list[torch.Tensor]:
        """What the format stores of an expert."""
        codes, *others = (tensor[expert].contiguous() for tensor in self.tensors)
        if self.format in (FP8, NVFP4):
            others = [scales.repeat_interleave(len(codes) // len(scales), 0) for scales in others]
        return [codes, *others]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (self[expert] for expert in range(len(self)))

    def operand(self, expert: int) -> Slices:
        """Codes [N, K] of e4m3 and scales of an expert, as the operation ``scaled_linear`` takes them."""
        codes, scales = self._of(expert)
        return codes, scales if self.format is FP8_BLOCK else scales.flatten()

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
    """Rows as codes of e4m3 and scales of their groups or their own, as an operand of a product. Indices choose rows.

    Attributes:
        codes: [rows, K] float8_e4m3fn, packed.
        scales: [rows, ceil(K / 128)] or [rows] fp32, of any strides.
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
class ExpertAdapters:
    """Adapters of low rank (:mod:`..lora`) of a layer's experts, each token's with one in a slot or with none. To their
    operation an adapter of one expert is one of slots x experts.

    Attributes:
        slots: [tokens or more] integers, -1 for a token without an adapter; those behind the tokens are not read.
        gate_up: A and B of the first product: of each slice of its columns, in their order, [slots, experts, R, hidden]
            and [slots, experts, N_i, R], packed.
        down: of the second: one slice of [slots, experts, R, intermediate] and [slots, experts, hidden, R].
    """

    slots: torch.Tensor
    gate_up: tuple[Slices, Slices]
    down: tuple[Slices, Slices]

    @property
    def tensors(self) -> Slices:
        """All that are there."""
        return *self.gate_up[0], *self.gate_up[1], *self.down[0], *self.down[1], self.slots

    def add_gate_up(self, y: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, experts: torch.Tensor) -> None:
        """Add to rows y [pairs, N] of the first product what their adapters make of rows x [pairs, hidden].

        Args:
            tokens: [pairs] integers, the token of each pair.
            experts: [pairs] integers, where its expert lies; -1 for one that is not here.
        """
        self._add(y, x, self.gate_up, tokens, experts)

    def add_down(self, y: torch.Tensor, x: torch.Tensor, tokens: torch.Tensor, experts: torch.Tensor) -> None:
        """The same of the second product: y [pairs, hidden], x [pairs, intermediate]."""
        self._add(y, x, self.down, tokens, experts)

    def _add(
        self, y: torch.Tensor, x: torch.Tensor, of: tuple[Slices, Slices], tokens: torch.Tensor, experts: torch.Tensor
    ) -> None:
        a, b = ([one.flatten(0, 1).unsqueeze(1) for one in slices] for slices in of)
        slots = self.slots[tokens]
        own = torch.where((slots < 0) | (experts < 0), -1, slots * of[0][0].shape[1] + experts)
        add_adapters(y, x, a, b, own, LoraReduction.of_device(x.device.type, x.shape[1], x.dtype))

    def check(self, tokens: int, experts: int, hidden: int, intermediate: int, rows: int) -> None:
        """Refuse those that do not fit.

        Args:
            tokens: of the call.
            experts: that are here.
            hidden: elements of a token.
            intermediate: elements of a row of the second product's weight.
            rows: of the first product's weight.

        Raises:
            ValueError: one line that has their shapes.
        """
        of_slots, rank = self.down[0][0].shape[0], self.down[0][0].shape[2]
        columns = [one.shape[2] for one in self.gate_up[1]]
        wanted = [(of_slots, experts, rank, hidden)] * len(columns)
        wanted += [(of_slots, experts, n, rank) for n in columns]
        wanted += [(of_slots, experts, rank, intermediate), (of_slots, experts, hidden, rank)]
        found = [tuple(one.shape) for one in self.tensors[:-1]]
        if found != wanted or sum(columns) != rows or self.slots.dim() != 1 or len(self.slots) < tokens:
            raise ValueError(
                f"no adapters of {', '.join(str([*one]) for one in found)} and slots {list(self.slots.shape)} for "
                f"{tokens} tokens and {experts} experts of {hidden}, {rows} and {intermediate}"
            )


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
        adapters: of tokens of a step; None: no token has one.
        exchange: gives all workers rows of which each is at one of them, and 0 elsewhere, so that each adds what all
            experts made of a token, in the order of its scores; None: it adds what its own made.
        given: scales of the rows that both products are given, fp32, whose codes have scales of rows: of all rows the
            largest; empty: rows have their own.
    """

    gate_up: Any
    down: Any
    reduction: MoeReduction
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    places: torch.Tensor | None = None
    adapters: ExpertAdapters | None = None
    exchange: Callable[[torch.Tensor], torch.Tensor] | None = None
    given: Slices = ()

    @property
    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """All that are there."""
        stored = (of.tensors if isinstance(of, StoredExperts) else (of,) for of in (self.gate_up, self.down))
        of_adapters = () if self.adapters is None else self.adapters.tensors
        return *chain(*stored), self.gate_up_bias, self.down_bias, self.places, *of_adapters, *self.given

    def placed(self, ids: torch.Tensor) -> torch.Tensor:
        """Where the experts of these numbers lie; -1 for one that is not there."""
        return ids if self.places is None else self.places[ids]

    def of_tokens(self, start: int) -> "Experts":
        """The same for tokens from one on."""
        if self.adapters is None or not start:
            return self
        return replace(self, adapters=replace(self.adapters, slots=self.adapters.slots[start:]))

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
            self._check_codes(reduction.products.in_blocks)
        if self.adapters is not None:
            if reduction.products is not None:
                raise ValueError("adapters are added to products of matrices, not to those of codes")
            self.adapters.check(len(x), len(down), hidden, intermediate, rows)
        dtypes = {tensor.dtype for tensor in (x, self.gate_up, down)}
        if dtypes != {reduction.dtype} or weights.dtype != reduction.accumulate:
            raise ValueError(
                f"moe takes tokens and experts in {reduction.dtype} and weights in {reduction.accumulate}, got "
                f"{x.dtype}, {self.gate_up.dtype}, {down.dtype} and {weights.dtype}"
            )

    def _check_codes(self, in_blocks: bool) -> None:
        """Refuse experts whose codes have no products."""
        if in_blocks and self.reduction.is_gated and self.down.shape[2] % SIDE:
            raise ValueError(f"a block of {SIDE} rows has one scale, and gate has {self.down.shape[2]} rows")
        form, shared = (FP8_BLOCK, "blocks") if in_blocks else (FP8, "rows")
        if self.given and (in_blocks or [one.dtype for one in self.given] != [torch.float32] * 2):
            raise ValueError("moe takes scales in fp32 of what both products are given, beside scales of rows")
        for name, weight in {"gate_up": self.gate_up, "down": self.down}.items():
            if not isinstance(weight, StoredExperts) or weight.format is not form:
                raise ValueError(f"moe takes {name} as codes in {shared}, where its products are those of codes")
            codes, scales = weight.tensors
            experts, n, k = codes.shape
            of_rows = scales.shape[1] if scales.dim() > 1 and n % max(scales.shape[1], 1) == 0 else n
            wanted = (experts, -(-n // SIDE), -(-k // SIDE)) if in_blocks else (experts, of_rows, 1)
            if tuple(scales.shape) != wanted or not weight.format.is_stored_as(weight.tensors, weight.dtype):
                raise ValueError(
                    f"moe takes {name} as e4m3 with fp32 scales {list(wanted)}, got {codes.dtype}, {scales.dtype} and "
                    f"{list(scales.shape)}"
                )

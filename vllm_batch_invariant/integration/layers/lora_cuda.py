"""Adapters of low rank on a GPU: a step's rows are grouped by slot once for all layers, where CUDA graphs find them."""

from functools import cache
from typing import Any

import torch

from ...ops.dispatch import module_for
from ...ops.lora import LoraReduction
from ...ops.moe import ExpertAdapters
from .lora import Adapters


class GpuAdapters(Adapters):
    """In the place of vLLM's. A layer's kernels are compared with dense products when it is first computed, which is
    before any CUDA graph.
    """

    def __init__(
        self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, *, lora_config: Any
    ) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, lora_config=lora_config)
        self._groups = _groups(
            max_num_batched_tokens, lora_config.max_loras, lora_config.lora_dtype, torch.device(device)
        )
        self._most_tokens = max_num_batched_tokens

    def update_metadata(self, *of_step: Any, **named: Any) -> None:
        """Take the adapters of a step's rows."""
        were_in_use = self._in_use
        super().update_metadata(*of_step, **named)
        if self._in_use or were_in_use:
            self._groups.set(self.token_lora_indices)

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **named: object
    ) -> None:
        """Of an embedding, whose result y [tokens, N] is changed in place; x has the rows of A."""
        if self._in_use:
            _certify(x.shape[1], tuple(lora_b_stacked.shape[2:3]), x.shape[1], x.dtype, x.device)
        super().add_lora_embedding(y, x, lora_b_stacked, add_inputs, **named)

    def add_products(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: tuple[torch.Tensor, ...],
        b: tuple[torch.Tensor, ...],
        slots: torch.Tensor,
    ) -> None:
        """Add both products of a layer to y, in a step with adapters."""
        if not self._in_use:
            return
        _certify(x.shape[1], tuple(one.shape[2] for one in b), b[0].shape[3], x.dtype, x.device)
        if not self._are_all(slots):
            super().add_products(y, x, a, b, slots)
            return
        reduction = LoraReduction.of_device("cuda", x.shape[1], x.dtype)
        module_for("lora", "cuda").add_adapters(y, x, a, b, self._groups, reduction)

    def of_experts(self, layer: Any) -> ExpertAdapters | None:
        """Those of a layer around experts, in a step with adapters."""
        found = super().of_experts(layer)
        if found is not None:
            for a, b in (found.gate_up, found.down):
                _certify(a[0].shape[3], tuple(one.shape[2] for one in b), a[0].shape[2], a[0].dtype, a[0].device)
            slots, experts = found.down[0][0].shape[:2]
            of_pairs = self._most_tokens * layer.moe_config.experts_per_token, slots * experts
            _compile_grouping(*of_pairs, found.down[0][0].dtype, found.slots.device)
        return found

    def _are_all(self, slots: torch.Tensor) -> bool:
        """Whether slots are those of all rows of a step, and perhaps of padding behind them."""
        return slots.data_ptr() == self._token_lora_indices.data_ptr() and len(slots) >= self.indices_len[0]


def _groups(rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> Any:
    """See ``RowGroups.empty`` of :mod:`...ops.lora.cuda`."""
    return module_for("lora", "cuda").RowGroups.empty(rows, slots, dtype, device)


@cache
def _compile_grouping(pairs: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
    """Have the kernels that group up to so many pairs by slot and expert compiled before there are requests."""
    _groups(pairs, slots, dtype, device)


@cache
def _certify(k: int, columns: tuple[int, ...], rank: int, dtype: torch.dtype, device: torch.device) -> int:
    """:func:`...ops.lora.cuda.certify`, once for layers of one shape."""
    return module_for("lora", "cuda").certify(k, columns, rank, dtype, device)

"""Adapters of low rank (LoRA), by the operation.

vLLM puts a layer around each that may have adapters, and all of them call one object for the rows of a step. vLLM's own
for CPUs copies an adapter for each row, and takes -1, a row without one, for the last slot: beside others such a row
gets the adapter that is there. Its own for GPUs splits K by the number of rows, and adds by atomics.
"""

from typing import Any, NoReturn

import torch

from ...errors import NotCovered
from ...ops.lora import LoraReduction, add_adapters, add_expanded
from ...ops.moe import ExpertAdapters
from ..engine import adapters
from ..reviews import patch_points

NONE = -1
"""In the place of a slot: the row has no adapter."""
_Base: Any = patch_points.PUNICA_WRAPPER.get()


class Adapters(_Base):
    """In the place of vLLM's, on every device. Slots of a step's rows lie where a CUDA graph finds them again; those
    behind a step's rows are of none.
    """

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: torch.device | str, **_: object) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device)
        self._token_lora_indices.fill_(NONE)
        self._sampler_indices.fill_(NONE)
        self._embeddings_indices.zero_()
        self.indices_len[:] = [0] * len(self.indices_len)
        self._in_use = False
        """Whether a row of the step has an adapter. A step without launches nothing, as with vLLM's own: it has CUDA
        graphs of its own, or those of steps with adapters, whose rows have none then.
        """
        self.hidden_states: torch.Tensor | None = None
        """[tokens, K] of the step, while logits are computed of some of its prompts."""
        self.sampled: torch.Tensor | None = None
        """[rows], which of the step's are sampled, while logits are computed of them, where vLLM knows of one a request
        alone.
        """

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **_: object
    ) -> None:
        """Take the adapters of a step's rows."""
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        self.is_prefill = mapping.is_prefill
        tokens, samples, *_padded, embedded = self.indices_len
        self._token_lora_indices[tokens:] = NONE
        self._sampler_indices[samples:] = NONE
        self._embeddings_indices[embedded:] = 0
        self._in_use = any(number > 0 for number in (*mapping.index_mapping, *mapping.prompt_mapping))

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        *,
        add_inputs: bool = True,
        **_: object,
    ) -> None:
        """Of a linear layer, whose result y [tokens, N] is changed in place."""
        if scale != 1.0 or not add_inputs or output_slices != tuple(b.shape[2] for b in lora_b_stacked):
            _refuse("a layer whose adapters are not added to its result as they are stored")
        self.add_products(y, x, lora_a_stacked, lora_b_stacked, self._token_lora_indices[: len(x)])

    def add_lora_embedding(
        self, y: torch.Tensor, x: torch.Tensor, lora_b_stacked: torch.Tensor, add_inputs: bool = True, **_: object
    ) -> None:
        """Of an embedding, whose result y [tokens, N] is changed in place; x has the rows of A."""
        if not add_inputs:
            _refuse("an embedding whose adapters are not added to it")
        self.add_rows(y, x, lora_b_stacked, self._token_lora_indices[: len(x)])

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **_: object,
    ) -> None:
        """Of an output embedding, whose result y [rows, N or more] is changed in place."""
        if scale != 1.0:
            _refuse("an output embedding with scaled adapters")
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        columns = y[:, : lora_b_stacked.shape[2]]
        self.add_products(columns, x, (lora_a_stacked,), (lora_b_stacked,), self._slots_of_logits(x))

    def _slots_of_logits(self, x: torch.Tensor) -> torch.Tensor:
        """Of rows [rows, K]: those that are sampled, or neighbours among the step's, of a prompt."""
        states, samples = self.hidden_states, self.indices_len[1]
        if states is not None and x.untyped_storage().data_ptr() == states.untyped_storage().data_ptr():
            first = (x.storage_offset() - states.storage_offset()) // states.stride(0)
            return self._token_lora_indices[first : first + len(x)]
        if len(x) != samples and self.sampled is not None:
            return self._token_lora_indices[self.sampled]
        if len(x) != samples and self._in_use:
            raise RuntimeError(f"logits of {len(x)} rows, whose adapters nobody knows: {samples} are sampled")
        return self._sampler_indices[: len(x)]

    @property
    def in_use(self) -> bool:
        """Whether a row of the step has an adapter."""
        return self._in_use

    def add_products(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        a: tuple[torch.Tensor, ...],
        b: tuple[torch.Tensor, ...],
        slots: torch.Tensor,
    ) -> None:
        """Add both products of a layer to y, as :func:`...ops.lora.add_adapters` does, in a step with adapters."""
        if self._in_use:
            add_adapters(y, x, a, b, slots, LoraReduction.of_device(x.device.type, x.shape[1], x.dtype))

    def add_rows(self, y: torch.Tensor, u: torch.Tensor, b: torch.Tensor, slots: torch.Tensor) -> None:
        """Add the second product alone to y, as :func:`...ops.lora.add_expanded` does, in a step with adapters."""
        if self._in_use:
            add_expanded(y, u, b, slots, LoraReduction.of_device(u.device.type, u.shape[1], u.dtype))

    def of_experts(self, layer: Any) -> ExpertAdapters | None:
        """Those of a layer around experts, in a step with adapters."""
        if not self._in_use:
            return None
        gate_up = layer.w13_lora_a_stacked, layer.w13_lora_b_stacked
        return ExpertAdapters(self._token_lora_indices, gate_up, (layer.w2_lora_a_stacked, layer.w2_lora_b_stacked))

    def add_shrink(self, *_: object, **__: object) -> NoReturn:
        """Of layers that are refused: sharded adapters, and experts by vLLM's kernels."""
        _refuse("a layer that adds parts of its adapters by itself")

    add_expand = add_lora_w13 = add_lora_w2 = add_shrink

    def apply_lora_full_linear(self, *_: object, **__: object) -> NoReturn:
        """Of pooling models, which are refused beside LoRA."""
        _refuse("a classification head of an adapter's own")


def reductions(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, LoraReduction]:
    """Those of a model's layers that may have adapters, by names.

    Args:
        dtype: of activations.
    """
    layers = [module for module in model.modules() if isinstance(module, patch_points.LORA_LAYER.get())]
    names = "lora_a_stacked", "w13_lora_a_stacked", "w2_lora_a_stacked"
    stacked = [getattr(layer, name, ()) for layer in layers for name in names]
    of_products = [one[0] if isinstance(one, tuple | list) else one for one in stacked if len(one)]
    # an embedding's are rows, and experts' have another name for them, one by one
    ks = {one.shape[-1] for one in of_products if one.dim() == 4}
    return adapters.reductions(ks, dtype, next(model.parameters()).device.type)


def _refuse(what: str) -> NoReturn:
    raise NotCovered(what, "it has not been compared", "serve the model without LoRA")

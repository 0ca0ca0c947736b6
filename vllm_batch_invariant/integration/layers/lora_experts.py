"""Adapters of low rank of a mixture's experts.

vLLM's layer around experts holds their adapters, and hands them to a kernel that it may choose itself. Ours compute a
whole layer, so the layer keeps what it does with adapters, and tells ours where they are.
"""

from functools import partial
from typing import Any

from ...errors import NotCovered
from ..reviews import patch_points
from .experts import BatchInvariantExperts


def install() -> None:
    """Have vLLM's layer, and the one that is derived from it, hold adapters for ours."""
    if patch_points.LORA_EXPERTS.is_there():
        layer = patch_points.LORA_EXPERTS.get()
        layer.__init__, layer.set_mapping = _init, _set_mapping


def _init(self: Any, base_layer: Any) -> None:
    """In the place of vLLM's, which looks for a kernel of its own, and has the experts take no new weights but by names
    of its own.

    Raises:
        NotCovered: experts that are not ours, quantised, or apart by expert parallelism.
    """
    patch_points.LORA_LAYER.get().__init__(self)
    experts, parallel = base_layer.routed_experts, base_layer.moe_config.moe_parallel_config
    method = experts.quant_method
    if not isinstance(method, BatchInvariantExperts) or not isinstance(method, patch_points.EXPERTS_METHOD.get()):
        _refuse(base_layer, f"are computed by {type(method).__name__}")
    if parallel.use_ep:
        _refuse(base_layer, "are apart by expert parallelism")
    self.base_layer, self.moe_config = base_layer, base_layer.moe_config
    self._shared_experts = base_layer._shared_experts  # vLLM finds their layers by that name, too
    self.tp_size, self.tp_rank = parallel.tp_size, parallel.tp_rank
    self.device = experts.w2_weight.device
    self.enable_moe_shared_loras = False
    self._w13_slices = 2 if self.moe_config.is_act_and_mul else 1
    self.n_slices = self.local_num_experts * (self._w13_slices + 1)


def _set_mapping(self: Any, punica_wrapper: Any) -> None:
    """In the place of vLLM's: ours ask for the adapters of a step."""
    patch_points.LORA_LAYER.get().set_mapping(self, punica_wrapper)
    self.base_layer.routed_experts.quant_method.adapters = partial(punica_wrapper.of_experts, self)


def _refuse(layer: Any, what: str) -> None:
    raise NotCovered(
        f"LoRA adapters of the experts of {layer.layer_name}, which {what}",
        "these have not been compared",
        "leave the experts out by --lora-target-modules, or merge the adapter into the weights",
    )

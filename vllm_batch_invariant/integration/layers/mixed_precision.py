"""Checkpoints of ModelOpt whose ``quantized_layers`` give each layer a format: a layer of which vLLM would guess it is
refused.
"""

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

import torch

from ...errors import NotCovered
from ..reviews import patch_points, schemes

_SHARDS = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Of layers that vLLM fuses, where a model does not say of which."""
_KEPT = "16 bits"
_WHY = "vLLM has one format for all of it, which is a guess"
_REMEDY = "name each layer once, in quantized_layers or in ignore, and the parts of a fused one alike"


def install() -> None:
    """Have vLLM's choices of the methods of experts checked; those of linear layers are where they are replaced."""
    if patch_points.EXPERTS_CHOICE.is_there():
        patch_points.EXPERTS_CHOICE.put(checked(patch_points.EXPERTS_CHOICE.get()))


def checked(choose: Callable[..., Any], is_plain: Callable[[Any], bool] = lambda _: False) -> Callable[..., Any]:
    """vLLM's choice of the method of a layer, of which ``quantized_layers`` say all.

    Args:
        choose: that.
        is_plain: whether a method is that of weights of 16 bits; None is.
    """

    @wraps(choose)
    def resolve_quant_method(quant_config: Any, layer: Any, prefix: str) -> Any:
        if quant_config.get_name() != schemes.MIXED:
            return choose(quant_config, layer, prefix)
        said = {algorithm: name for name, algorithm in _said(quant_config, layer, prefix)} or {_KEPT: prefix}
        if len(said) > 1:
            parts = " and ".join(f"{name} in {algorithm}" for algorithm, name in said.items())
            raise NotCovered(f"{prefix} of parts in several formats, {parts}", _WHY, _REMEDY)
        [algorithm] = said
        method = choose(quant_config, layer, prefix)
        is_quantised = method is not None and not is_plain(method)
        if is_quantised is (algorithm == _KEPT):
            kept = f"in 16 bits that quantized_layers has in {algorithm}"
            which = "quantised, of which quantized_layers says nothing" if is_quantised else kept
            raise NotCovered(f"{prefix} {which}", _WHY, _REMEDY)
        return method

    return resolve_quant_method


def _said(quant_config: Any, layer: torch.nn.Module, prefix: str) -> Iterator[tuple[str, str]]:
    """What ``quantized_layers`` have of each part of a layer: of several that vLLM fuses, of each expert."""
    of, names = quant_config.quantized_layers, quant_config._quantized_layer_prefix_candidates(prefix)
    found = {name: of[name]["quant_algo"].upper() for name in names if name in of}
    if isinstance(layer, patch_points.ROUTED_EXPERTS.get()):
        starts = tuple(f"{name}." for name in names)
        found |= {name: recipe["quant_algo"].upper() for name, recipe in of.items() if name.startswith(starts)}
    if found:
        yield from found.items()
        return
    parent, _, last = prefix.rpartition(".")
    for part in quant_config.packed_modules_mapping.get(last) or _SHARDS.get(last, ()):
        whole = [f"{name}.{part}" for name in quant_config._quantized_layer_prefix_candidates(parent)]
        yield part, next((of[name]["quant_algo"].upper() for name in whole if name in of), _KEPT)

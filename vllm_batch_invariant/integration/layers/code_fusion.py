"""A norm, an activation or attention on a GPU writes what it gives also as the codes that the layer behind it
multiplies.

A decoder layer of the models in :mod:`.decoders` hands rows from one operation to the next, which nobody changes
between them::

    qkv_proj(input_layernorm(x)),  o_proj(attn(q, k, v)),  mlp(post_attention_layernorm(x)),  down_proj(act_fn(x))

Where the second quantises groups of a row to e4m3, the kernel of the first has these groups in its tile; of attention
that of decode, where a group is a head. The bits are those of the operations apart, which they stay while somebody
looks at what one of them gives.
"""

import logging
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from ...ops.dispatch import module_for
from ...ops.quantise import QuantiseReduction
from ..reviews import patch_points
from ..side_table import beside
from . import fp8
from .decoders import is_known, is_ours, kinds_of
from .experts import CudaExperts
from .fusion import Fusion, is_watched

logger = logging.getLogger("vllm.batch_invariant")


class Codes(NamedTuple):
    """What a layer writes beside its rows, and the modules through which they go: itself and those behind it."""

    reduction: QuantiseReduction
    modules: tuple[torch.nn.Module, ...]


def codes_of(layer: Any) -> QuantiseReduction | None:
    """What a norm, an activation or attention writes now; None: its rows alone."""
    found = beside(layer).codes
    return None if found is None or is_watched(*found.modules) else found.reduction


class _WritingCodes(Fusion):
    """Norms, activations and attention, and the quantising behind them."""

    def fuse_in(self, worker: Any) -> None:
        if count := fuse(worker.get_model()):
            logger.info("%d norms, activations and layers of attention write the codes of what they give.", count)


WRITING_CODES = _WritingCodes()


def fuse(model: torch.nn.Module) -> int:
    """Fuse what is known of a model, as vLLM has loaded it; returns how many layers write codes from now on."""
    fused = 0
    if not any(_reduction_of(part) for part in model.modules()):
        return fused
    for decoder in filter(is_known, model.modules()):
        for layer, through, reader in _pairs(decoder):
            reduction, forward = _reduction_of(reader), _forward_of(layer)
            if reduction is None or reduction.group is None or beside(layer).codes:
                continue
            if forward:
                layer._forward_method = forward
            elif not _is_attention(layer):
                continue
            beside(layer).codes = Codes(reduction, (layer, *through, reader))
            fused += 1
    return fused


def _pairs(decoder: Any) -> Iterator[tuple[Any, tuple[Any, ...], Any]]:
    """Layers whose rows one layer reads, those that hand them on, and that one."""
    kinds = kinds_of(decoder)
    assert kinds is not None
    for layer in decoder.layers:
        block = getattr(layer, kinds.name)
        yield layer.input_layernorm, (layer.self_attn,), layer.self_attn.qkv_proj
        yield layer.self_attn.attn, (), layer.self_attn.o_proj
        if hasattr(block, "experts"):
            yield layer.post_attention_layernorm, (block,), block.experts
        else:
            yield layer.post_attention_layernorm, (block,), block.gate_up_proj
            yield block.act_fn, (), block.down_proj


def _reduction_of(reader: Any) -> QuantiseReduction | None:
    """How a layer quantises what it is given, whatever that is; None: it does not."""
    if fp8.computes(reader):
        return None if reader.quant_method.source.static else fp8.quantises(reader)
    method = getattr(getattr(reader, "routed_experts", None), "quant_method", None)
    return method.reduction.quantised if isinstance(method, CudaExperts) and method.reduction else None


def _is_attention(layer: Any) -> bool:
    """Whether a layer of attention looks itself for what it writes."""
    return getattr(getattr(layer, "impl", None), "writes_codes", False)


def _forward_of(layer: Any) -> Callable[..., Any] | None:
    """The method of a norm or an activation that writes codes; None of other layers."""
    if is_ours(layer):

        def norm(x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
            operands = x, layer.weight.data, layer.variance_epsilon, residual, None
            return module_for("norm", "cuda").rms_norm(*operands, codes=codes_of(layer))

        return norm
    if type(layer) is patch_points.CUSTOM_OP.module().op_registry_oot.get("SiluAndMul"):
        return lambda x: module_for("silu", "cuda").silu_and_mul(x, codes=codes_of(layer))
    return None

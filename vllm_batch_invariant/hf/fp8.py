"""Which linear layers of a trainer quantise weights and activations to FP8, as an engine's do, and their weights as an
engine takes them.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from .. import envs
from ..errors import NotCovered
from ..integration.layers import fp8
from ..integration.layers.fp8 import Source
from ..integration.parallel import tensor_tree
from ..ops.quantise.weights import quantise_weight
from . import adapters
from .families import decoder_of

QUANTIZATIONS = {f"fp8_per_{shared}": Source(shared) for shared in ("block", "channel", "tensor")}
"""By vLLM's names of what it quantises while it loads weights."""
_FUSED = (("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")), ("mlp.gate_up_proj", ("gate_proj", "up_proj")))
_ALONE = ("self_attn.o_proj", "mlp.down_proj")
_MATMULS = (*_FUSED, *((name, (name.rpartition(".")[2],)) for name in _ALONE))
"""Of a decoder layer: the engine's name of a linear layer, and Hugging Face's of what it is merged of."""

_EXPERTS, _ROUTER = "mlp.experts", "mlp.gate"
_OF_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The parameters of a layer's experts, and of what each is merged by the names of checkpoints."""

Layers = dict[str, list[torch.nn.Linear]]


def layers_of(model: torch.nn.Module) -> Layers:
    """A model's linear layers but its output head and its routers, by the engine's names."""
    found = {}
    for number, layer in enumerate(decoder_of(model).layers):
        for name, parts in _MATMULS:
            inside = layer.get_submodule(name.partition(".")[0])
            if hasattr(inside, parts[0]):
                found[f"model.layers.{number}.{name}"] = [adapters.base_of(getattr(inside, part)) for part in parts]
    return found


def experts_of(model: torch.nn.Module) -> dict[str, Any]:
    """A model's layers of experts, by the engine's names."""
    found = {}
    for number, layer in enumerate(decoder_of(model).layers):
        mlp: Any = getattr(layer, "mlp", None)
        if hasattr(mlp, "experts"):
            found[f"model.layers.{number}.{_EXPERTS}"] = adapters.base_of(mlp.experts)
    return found


def install(model: torch.nn.Module, quantization: str | None, unquantised: Sequence[str]) -> None:
    """Note in every linear layer, and in every layer of experts, how the engine's holds its weight.

    Args:
        model: of a family with a patch.
        quantization: of :data:`QUANTIZATIONS`, or None.
        unquantised: names of layers that stay in the model's dtype, the engine's or Hugging Face's.

    Raises:
        NotCovered: another quantisation, a model with states, experts by rows or as a whole or on a GPU, a layer that
            there is not, a part of one, or sizes of which the engine refuses blocks.
    """
    experts = experts_of(model)
    if quantization is None and not unquantised:
        linears = (module for module in model.modules() if isinstance(module, torch.nn.Linear))
        for module in (*linears, *experts.values()):
            module.fp8 = None
        return
    source = QUANTIZATIONS.get(quantization or "")
    if source is None:
        raise NotCovered(
            f"a trainer with quantization {quantization!r}",
            "its forward pass quantises as vLLM's FP8 does",
            f"pass one of {', '.join(QUANTIZATIONS)}, or nothing",
        )
    if not _attends(model):
        raise NotCovered(
            f"{quantization} in a trainer whose layers keep states", "no engine has it", "train another model"
        )
    if experts and source.shared != "block":
        raise NotCovered(f"{quantization} in a trainer with experts", "nobody has compared it", "pass fp8_per_block")
    device = next(model.parameters()).device.type
    if experts and device != "cpu" and not envs.starts_untried():
        raise NotCovered(
            f"{quantization} in a trainer with experts on device '{device}'",
            "it was compared with engines on a CPU alone",
            f"train on a CPU; {envs.UNTRIED.name}=1 trains all the same",
        )
    left = set(unquantised) - {name.replace(_EXPERTS, _ROUTER) for name in experts}
    for name, module in experts.items():
        module.fp8 = None if name in left else source
        left -= {name}
        if module.fp8 is not None:
            _check_experts(name, module)
    if len({module.fp8 for module in experts.values()}) > 1:
        raise NotCovered(
            "experts of some layers of a trainer in FP8 and of others not",
            "an engine says of no layer which it has",
            f"leave the experts of all layers unquantised, or of none: {', '.join(experts)}",
        )
    for name, parts in layers_of(model).items():
        within = name.rpartition(".")[0]
        names = [f"{within}.{part}" for part in _parts(name)]
        asked = {name, *names} & left
        left -= asked
        if asked and name not in asked and len(asked) < len(names):
            raise NotCovered(
                f"{', '.join(sorted(asked))} in a trainer's dtype beside the rest of {name} in FP8",
                "the engine multiplies once with all of it",
                f"name {name}",
            )
        if not asked:
            _check_sizes(source, name, parts)
        for part in parts:
            part.fp8 = None if asked else source
    if left:
        raise NotCovered(
            f"the layers {', '.join(sorted(left))} of a trainer left unquantised",
            "the model has none of these names",
            "name linear layers of its decoder; its output head and its embeddings are never quantised",
        )


def _attends(model: torch.nn.Module) -> bool:
    """Whether every layer is attention and an MLP or experts."""
    inside = ("down_proj", "experts")
    return all(
        hasattr(layer, "self_attn") and any(hasattr(getattr(layer, "mlp", None), name) for name in inside)
        for layer in decoder_of(model).layers
    )


def _check_experts(name: str, module: Any) -> None:
    _, hidden, intermediate = module.down_proj.shape
    odd = next((size for size in (hidden, intermediate) if size % fp8.GROUP), None)
    if odd is not None:
        raise NotCovered(
            f"{odd} inputs of the experts of {name} in FP8",
            f"a block of {fp8.GROUP} x {fp8.GROUP} has one scale, and an engine no part of one",
            "leave them unquantised in both",
        )


def _parts(name: str) -> tuple[str, ...]:
    return next(parts for layer, parts in _MATMULS if name.endswith(f".{layer}"))


def _check_sizes(source: Source, name: str, parts: Sequence[torch.nn.Linear]) -> None:
    fp8.check_settings(source, name)
    k, outputs = parts[0].in_features, [part.out_features for part in parts]
    if source.shared == "block":
        fp8.check_blocks(name, k, k, outputs, sum(outputs))
    if name.endswith(_ALONE):
        fp8.check_slices(tensor_tree.of_inputs(k, name), k, name, k)


def reductions(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """What an engine with the same layers in FP8 says of them, by names; nothing where none are."""
    found: dict[str, Any] = {}
    beside: dict[str, Any] = {}
    for name, parts in (layers_of(model) if _attends(model) else {}).items():
        source, weight = parts[0].fp8, parts[0].weight
        if source is not None:
            found |= fp8.reductions_of(source, parts[0].in_features, dtype, weight)
        else:
            n = sum(part.out_features for part in parts)
            beside |= fp8.reductions_beside(name, n, parts[0].in_features, dtype, weight.device.type)
    for name, module in experts_of(model).items():
        experts, hidden, _ = module.down_proj.shape
        router = name.replace(_EXPERTS, _ROUTER)
        beside |= fp8.reductions_beside(router, experts, hidden, dtype, module.down_proj.device.type)
    return found | beside if found else {}


def engine_weights(
    model: torch.nn.Module,
    weights: Iterable[tuple[str, torch.Tensor]] | None = None,
    scale: str = "weight_scale_inv",
) -> Iterator[tuple[str, torch.Tensor]]:
    """A patched model's weights for an engine that loads codes: of layers in FP8 the codes and scales that the
    trainer's forward pass makes of them; the others as they are.

    An engine that quantises what it loads (``--quantization fp8_per_block``) takes the weights as they are.

    Args:
        model: of :func:`.patch` with a ``quantization``.
        weights: names and whole tensors, such as those that ranks have gathered; None: the model's parameters.
        scale: what the engine's checkpoint calls scales: "weight_scale_inv" of blocks in the format "fp8",
            "weight_scale" of all others.

    Yields:
        Names and tensors. Scales are fp32: of blocks [ceil(N / 128), ceil(K / 128)], of rows [N, 1], of a tensor [].

    Raises:
        NotCovered: a model with adapters.
    """
    if next(adapters.layers_of(model), None):
        raise NotCovered(
            "weights of a model with adapters, for an engine",
            "it has those of the base model, and reads an adapter's files",
            "save the adapter by PEFT, and have the engine load its folder",
        )
    for name, tensor in model.named_parameters() if weights is None else weights:
        layer, _, kind = name.rpartition(".")
        source = getattr(model.get_submodule(layer), "fp8", None) if kind in ("weight", *_OF_EXPERTS) else None
        if source is not None and kind in _OF_EXPERTS:
            yield from _codes_of_experts(layer, kind, tensor.detach(), scale)
            continue
        if source is None:
            yield name, tensor.detach()
            continue
        codes, scales = quantise_weight(tensor.detach(), source.shared)
        yield name, codes
        yield f"{layer}.{scale}", scales[0] if source.shared == "tensor" else scales


def _codes_of_experts(layer: str, kind: str, weight: torch.Tensor, scale: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Those of a parameter [experts, N, K], by the names that a checkpoint has for each expert."""
    names = _OF_EXPERTS[kind]
    for expert, of_expert in enumerate(weight):
        for name, part in zip(names, of_expert.chunk(len(names)), strict=True):
            codes, scales = quantise_weight(part, "block")
            yield f"{layer}.{expert}.{name}.weight", codes
            yield f"{layer}.{expert}.{name}.{scale}", scales

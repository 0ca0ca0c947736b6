"""LoRA adapters of PEFT in a trainer, added to their layers as the engine adds them, with gradients.

An adapter's matrices are those that the engine has after it has loaded the adapter's files: rounded to the model's
dtype, and B then multiplied with the factor, in that dtype.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from .. import envs
from ..errors import NotCovered
from ..integration.engine import adapters as engine_adapters
from ..integration.parallel.tensor_tree import k_slices
from ..ops import linear as linear_op
from ..ops.lora import LoraReduction, add_adapters

_READ = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "lora_dropout", "target_modules"),
    *("exclude_modules", "layers_to_transform", "layers_pattern", "task_type", "peft_type", "auto_mapping"),
    "target_parameters",
    *("peft_version", "base_model_name_or_path", "revision", "inference_mode", "init_lora_weights", "loftq_config"),
    *("eva_config", "runtime_config"),
}
"""Fields of PEFT's LoraConfig that may have any value, or are looked at in the layers; others have their default."""
_OF_PARAMETER = "ParamWrapper"
"""PEFT's name of its layer around a module that has the parameter; that of another parameter is around that layer."""
_FIRST_WEIGHTS = ("gaussian", "eva", "orthogonal")
"""Names of ``init_lora_weights`` that leave the layer's own weights as they are, and whose adapters vLLM loads."""


def unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The Hugging Face model that PEFT has wrapped, or the model itself.

    Raises:
        NotCovered: a wrapper of PEFT's for something else than LoRA and causal language models.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel | peft.PeftMixedModel):
        return model
    if type(model) not in (peft.PeftModel, peft.PeftModelForCausalLM) or str(model.peft_type) != "PeftType.LORA":
        raise NotCovered(
            f"a trainer's {type(model).__name__}", "the engine adds LoRA adapters alone", "train one of type LORA"
        )
    return model.get_base_model()


def is_adapted(module: torch.nn.Module) -> bool:
    """Whether this is PEFT's layer around a linear layer, or around a module that has a parameter with an adapter."""
    kind = type(module)
    return kind.__name__ in ("Linear", _OF_PARAMETER) and kind.__module__ == "peft.tuners.lora.layer"


def is_of_parameter(layer: torch.nn.Module) -> bool:
    """Whether a layer of PEFT's is around a module that has a parameter with an adapter."""
    return type(layer).__name__ == _OF_PARAMETER


def problem_of_parameters(layer: Any, experts: type[torch.nn.Module] | None) -> str:
    """What adapters of a module's parameters no engine has; empty if they are those of both products of experts.

    Args:
        layer: PEFT's outermost around the module.
        experts: the class of a layer's; None where the model has none.
    """
    base, targets = base_of(layer), []
    while is_of_parameter(layer):
        targets.append(layer.parameter_name)
        layer = layer.base_layer
    if type(base) is not experts:
        return f"an adapter of {targets[0]} of a {type(base).__name__}"
    return "" if targets == ["down_proj", "gate_up_proj"] else f"an adapter of {', '.join(targets)} of experts alone"


def is_adapters_own(name: str) -> bool:
    """Whether a parameter of this name is a matrix of an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def layers_of(model: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    """PEFT's layers of a model that it has not wrapped, or no longer, by name."""
    return ((name, module) for name, module in model.named_modules() if is_adapted(module))


def check(model: torch.nn.Module, configs: dict[str, Any]) -> None:
    """Whether the engine's operation can stand for every adapter of a model; note in each layer which ones were looked
    at.

    Args:
        model: that PEFT has put its layers into.
        configs: PEFT's, by the name of the adapter.

    Raises:
        NotCovered: the first thing for which it cannot.
    """
    found = list(layers_of(model))
    if found and k_slices() > 1:
        raise _refusal(
            f"adapters with {envs.TP_TREE.name}={k_slices()}", "engines have no tree beside them", "leave the tree out"
        )
    on = next(model.parameters()).device.type
    if found and on != "cpu" and not envs.starts_untried():
        raise _refusal(
            f"adapters on device '{on}'",
            "they were compared with engines on CPUs alone",
            f"train on a CPU, or set {envs.UNTRIED.name}=1",
        )
    for name, layer in found:
        layer.adapters_looked_at = frozenset()
        for adapter in layer.lora_A:
            if adapter not in configs:
                raise NotCovered(f"the adapter {adapter} at {name}", "it has no configuration", "pass PEFT's own model")
            _check_config(adapter, configs[adapter])
        layer.adapters_looked_at = frozenset(layer.lora_A)
        _in_force(layer)
    for _, layer in found:
        if is_of_parameter(layer.base_layer):
            _in_force_of_both(layer)


def _check_config(adapter: str, config: Any) -> None:
    for field in fields(config):
        value = getattr(config, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if field.name not in _READ and value and value != default:
            raise _refusal(f"{field.name}={value} of the adapter {adapter}", "vLLM has no such adapters")
    first = config.init_lora_weights
    if isinstance(first, str) and first.lower() not in _FIRST_WEIGHTS:
        raise _refusal(
            f"init_lora_weights={first!r} of the adapter {adapter}", "it changes weights that the adapter's files lack"
        )


def _refusal(what: str, why: str, remedy: str = "train an adapter without it") -> NotCovered:
    return NotCovered(f"{what} in a trainer", why, remedy)


def base_of(layer: Any) -> Any:
    """The linear layer, or the experts, that have the weight."""
    while is_adapted(layer):
        layer = layer.base_layer
    return layer


def add(y: torch.Tensor, x: torch.Tensor, layers: Sequence[Any]) -> torch.Tensor:
    """What the layers' adapters make of y, the result of one matmul with all of their weights.

    Args:
        y: [tokens, N], of the layers after another; changed in place where one has an adapter.
        x: [tokens, K] of the same dtype, what they were given.
        layers: PEFT's, or linear ones, which have none.

    Returns:
        y, [tokens, N].

    Raises:
        NotCovered: an adapter that the engine cannot have.
    """
    starts: list[int] = []
    matrices: list[torch.Tensor] = []
    start = 0
    for layer in layers:
        name = _in_force(layer) if is_adapted(layer) else None
        if name is not None:
            starts.append(start)
            matrices += _matrices(layer, name, x.dtype)
        start += base_of(layer).out_features
    return _Adapted.apply(y, x, tuple(starts), *matrices) if matrices else y


def _matrices(layer: Any, name: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B, times the factor, of the adapter of a name."""
    a, b = (part[name].weight.to(dtype) for part in (layer.lora_A, layer.lora_B))
    return a, b if layer.scaling[name] == 1 else b * layer.scaling[name]


def of_experts(layer: Any, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """The adapters of both products of a layer's experts; none where it has none.

    Args:
        layer: PEFT's around ``down_proj``, which is around that of ``gate_up_proj``; or the experts.
        dtype: that they are computed in.

    Returns:
        A [experts, R, hidden] and B [experts, 2 * intermediate, R] of the first product, A [experts, R', intermediate]
        and B [experts, hidden, R'] of the second, of the dtype and packed.

    Raises:
        NotCovered: an adapter that the engine cannot have.
    """
    if not is_adapted(layer):
        return ()
    name = _in_force_of_both(layer)
    if name is None:
        return ()
    matrices: list[torch.Tensor] = []
    for product in (layer.base_layer, layer):
        a, b = _matrices(product, name, dtype)  # PEFT stacks ranks of experts' A, and interleaves those of B
        matrices.append(a.view(product.num_experts, -1, a.shape[1]))
        matrices.append(b.view(len(b), -1, product.num_experts).permute(2, 0, 1).contiguous())
    return tuple(matrices)


def _in_force_of_both(layer: Any) -> str | None:
    """The adapter that both products of experts have, as :func:`_in_force` says."""
    first, second = (_in_force(product) for product in (layer.base_layer, layer))
    if first != second:
        raise _refusal(f"the adapters {first} and {second} of one layer's experts", "an engine's request has one")
    return first


def _in_force(layer: Any) -> str | None:
    """The adapter that a layer of PEFT's adds; none where adapters are disabled, or merged into its weight.

    Raises:
        NotCovered: one that the engine cannot have, or two.
    """
    names = [name for name in layer.active_adapters if name in layer.lora_A]
    if layer.merged and layer.disable_adapters:
        raise _refusal("adapters that are merged and disabled", "PEFT takes them out", "call unmerge_adapter first")
    if layer.merged or layer.disable_adapters or not names:
        return None
    name = names[0]
    if name not in getattr(layer, "adapters_looked_at", ()):
        what = f"the adapter {name}, which came after patch,"
        raise _refusal(what, "nobody has looked at it", "patch the model that PEFT returns")
    scaling = layer.lora_alpha[name] / (math.sqrt(layer.r[name]) if layer.use_rslora[name] else layer.r[name])
    dropout = layer.lora_dropout[name]
    dtypes = {layer.lora_A[name].weight.dtype, layer.lora_B[name].weight.dtype}
    found = {
        f"the adapters {', '.join(names)} at once": (len(names) > 1, "an engine's request has one"),
        "adapters of a layer with hooks": (
            layer._forward_hooks or layer._forward_pre_hooks,
            "they would not be called, as adapter_names of rows would not be seen",
        ),
        "dropout of adapters": (
            layer.training and getattr(dropout, "p", 0.0) > 0,
            "the rollout drops nothing",
        ),
        f"an adapter whose factor is {layer.scaling[name]} and not {scaling}": (
            layer.scaling[name] != scaling,
            "its files do not say so",
        ),
        "a variant of LoRA": (name in layer.lora_variant, "vLLM has no such adapters"),
        "an adapter with a bias": (layer.lora_B[name].bias is not None, "vLLM adds none"),
        "transposed weights": (layer.fan_in_fan_out, "the engine's are not"),
        f"an adapter in {' and '.join(sorted(map(str, dtypes)))}": (
            not dtypes <= {next(base_of(layer).parameters()).dtype, torch.float32},
            "it is rounded to the model's dtype, from that or from fp32",
        ),
    }
    for what, (is_found, why) in found.items():
        if is_found:
            raise _refusal(what, why)
    return name


def reductions(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Those of a model's adapters, by the names that an engine has for them; nothing where it has none."""
    ks = {layer.in_features for _, layer in layers_of(unwrapped(model))}
    return engine_adapters.reductions(ks, dtype, next(model.parameters()).device.type)


class _Adapted(torch.autograd.Function):
    """Parts of y with an adapter each. x A^T is computed again backward, with the bits that it had."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        y: torch.Tensor,
        x: torch.Tensor,
        starts: tuple[int, ...],
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, *matrices)
        ctx.starts = starts
        ctx.mark_dirty(y)
        for start, a, b in zip(starts, matrices[::2], matrices[1::2], strict=True):
            _add(y[:, start : start + len(b)], x, a, b)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *matrices = ctx.saved_tensors
        wanted = ctx.needs_input_grad[3:]
        of_matrices: list[torch.Tensor | None] = []
        of_us = []
        for number, start in enumerate(ctx.starts):
            a, b = matrices[2 * number : 2 * number + 2]
            own = grad[:, start : start + len(b)].contiguous()
            of_u, *of_both = gradients(own, x, a, b, wanted[2 * number : 2 * number + 2])
            of_us.append(of_u)
            of_matrices += of_both
        of_x = linear_op.mm(torch.cat(of_us, 1), torch.cat(matrices[::2])) if ctx.needs_input_grad[1] else None
        return grad, of_x, None, *of_matrices


def gradients(
    grad: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, wanted: Sequence[bool]
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Gradients of u = x a^T [rows, R], of a [R, K] and of b [N, R].

    Args:
        grad: [rows, N], of what u b^T was added to.
        x: [rows, K].
        wanted: whether that of a, and of b.
    """
    of_u = linear_op.mm(grad, b)
    of_a = linear_op.mm(of_u.t(), x) if wanted[0] else None
    return of_u, of_a, linear_op.mm(grad.t(), _shrunk(x, a)) if wanted[1] else None


def _add(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """To y [tokens, N] what an adapter a [R, K], b [N, R] makes of x [tokens, K], in place."""
    slots = torch.zeros(len(x), dtype=torch.int64, device=x.device)
    one_slot = [[one.contiguous()[None, None]] for one in (a, b)]
    reduction = LoraReduction.of_device(x.device.type, x.shape[1], x.dtype)
    add_adapters(y, x, one_slot[0], one_slot[1], slots, reduction)


def _shrunk(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
    """x a^T [tokens, R] as it is rounded forward: times 1, plus zeros, it is what it was."""
    u = x.new_zeros(len(x), len(a))
    _add(u, x, a, torch.eye(len(a), dtype=x.dtype, device=x.device))
    return u

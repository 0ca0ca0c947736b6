"""Which quantised checkpoints start, as a table: by what vLLM reads of a configuration. What is not in it is refused.

:mod:`..layers.quantised` looks again, at each layer as vLLM builds it.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

PLAIN_ACTIVATIONS = ""
"""Activations that are not quantised."""
_METHODS = {
    **dict.fromkeys(("auto_gptq", "gptq", "gptq_marlin"), "gptq"),
    **dict.fromkeys(("auto_awq", "awq", "awq_marlin"), "awq"),
    "compressed-tensors": "compressed-tensors",
    "modelopt_fp4": "modelopt",
    "moe_wna16": "moe_wna16",
}
"""vLLM's names of methods."""
_OF_EXPERTS_ALONE = ("gpt_oss_mxfp4",)
"""Methods that quantise nothing but experts, in one format."""


@dataclass(frozen=True)
class Scheme:
    """How weights and activations of some layers are quantised.

    Attributes:
        method: by which vLLM reads them.
        weights: type and bits of a code, such as int4 and float8.
        shared: what has one scale: "group", "channel" (a row), "tensor" (a matrix), "block" or "tensor_group" (a group,
            beside a scale of the matrix).
        size: elements of such a group, or the sides of a block; None where the rest says it.
        zeros: whether groups have zero points.
        activations: the same of what the layer is given: type, bits and what shares a scale; of what it gives the same,
            behind which is "output"; empty: not quantised.
    """

    method: str
    weights: str
    shared: str
    size: int | tuple[int, ...] | None = None
    zeros: bool = False
    activations: str = PLAIN_ACTIVATIONS

    def __str__(self) -> str:
        size = "" if self.size is None else f" {self.size}"
        zeros = " with zero points" if self.zeros else ""
        activations = f" and {self.activations} activations" if self.activations else ""
        return f"{self.method} with {self.weights} weights (one scale a {self.shared}{size}){zeros}{activations}"


_GROUPS = 32, 64, 128
_BY_TENSOR_GROUP = "float4 dynamic tensor_group"
_WITHOUT_FP4 = frozenset(
    [
        Scheme("compressed-tensors", "float4", "tensor_group", 16, False, _BY_TENSOR_GROUP),
        Scheme("modelopt", "float4", "tensor_group", 16, False, _BY_TENSOR_GROUP),
        *(
            Scheme("compressed-tensors", "float4", "group", 32, False, activations)
            for activations in (PLAIN_ACTIVATIONS, "float4 dynamic group 32")
        ),
    ]
)
"""Those of which vLLM quantises the activations too, where a device multiplies FP4 with FP4: there they are refused. On
others it multiplies with the weights alone.
"""
COVERED = frozenset(
    [
        *(
            Scheme(method, weights, shared, size, zeros)
            for method, every_weights, every_zeros in (
                ("compressed-tensors", ("int4", "int8"), (False, True)),
                ("gptq", ("int4", "int8"), (False,)),
                ("awq", ("int4",), (True,)),
            )
            for weights in every_weights
            for shared, size in (*(("group", size) for size in _GROUPS), ("channel", None))
            for zeros in every_zeros
        ),
        *(Scheme("compressed-tensors", "float8", shared) for shared in ("tensor", "channel")),
        Scheme("compressed-tensors", "float8", "block", (128, 128)),
        *(Scheme(method, "float4", "tensor_group", 16) for method in ("compressed-tensors", "modelopt")),
        *_WITHOUT_FP4,
        *(
            Scheme(f"moe_wna16 of {method}", f"int{bits}", "group", size, zeros)
            for method, bits, zeros in (("gptq", 4, False), ("gptq", 8, False), ("awq", 4, True))
            for size in _GROUPS
        ),
        *(
            Scheme("compressed-tensors", "int8", shared, None, False, f"int8 {activations}")
            for shared in ("tensor", "channel")
            for activations in ("dynamic token", "static tensor")
        ),
    ]
)
"""Every scheme that starts."""
NAMES = (
    "compressed-tensors (INT4 and INT8 by groups of 32, 64, 128 or rows, with zero points or without; FP8 by tensors, "
    "rows or blocks of 128 x 128; NVFP4 and MXFP4), GPTQ, AWQ and ModelOpt's NVFP4"
)
"""The same in words."""


def refused(model: Any, config: Any) -> str | None:
    """What of a quantised model is not covered; None: nothing, or it is not quantised.

    Args:
        model: vLLM's configuration of a model.
        config: vLLM's configuration of its quantisation; None if there is none.
    """
    name = getattr(model, "quantization", None)
    if not name:
        return None
    method = _METHODS.get(name)
    if name in _OF_EXPERTS_ALONE:
        return None
    if method is None or config is None:
        return f"quantisation {name}"
    if getattr(config, "online_quantization_config", None) is not None or getattr(model, "quantization_config", None):
        return f"quantisation {name} beside quantisation while loading"
    if getattr(config, "transform_config", None):
        return f"quantisation {name} with transforms of activations"
    if method == "moe_wna16" and config.full_config.get("dynamic"):
        return f"quantisation {name} with rules of layers"
    if getattr(config, "kv_cache_scheme", None) or getattr(config, "kv_cache_quant_algo", None):
        return f"quantisation {name} with a scheme for the KV cache"
    other = next((scheme for scheme in _schemes(method, config) if scheme not in COVERED), None)
    if other:
        return f"quantisation {other}"
    of_fp4 = next((scheme for scheme in _schemes(method, config) if scheme in _WITHOUT_FP4), None)
    if of_fp4 and device_multiplies_fp4():
        return f"quantisation {of_fp4} on a GPU that multiplies FP4, for which vLLM quantises activations"
    of_experts = next((scheme for scheme in _schemes(method, config) if not _is_integers(scheme)), None)
    return f"quantisation {of_experts} of a mixture of experts" if of_experts and model.is_moe else None


def has_untried_fp4(model: Any, config: Any) -> bool:
    """Whether a quantised model has weights in a form of FP4 with which no GPU has run an engine."""
    method = _METHODS.get(model.quantization)
    schemes = _schemes(method, config) if method else ()
    return any(scheme in _WITHOUT_FP4 or scheme.method == "modelopt" for scheme in schemes)


def device_multiplies_fp4() -> bool:
    """Whether this machine's GPU multiplies FP4 with FP4: from compute capability 10.0 on."""
    from vllm.platforms import current_platform

    return bool(current_platform.has_device_capability(100))


def _is_integers(scheme: Scheme) -> bool:
    """Whether experts are stored so: integers, multiplied by what is not quantised."""
    return scheme.weights in ("int4", "int8") and scheme.activations == PLAIN_ACTIVATIONS


def _schemes(method: str, config: Any) -> Iterator[Scheme]:
    """Of the layers of a checkpoint."""
    match method:
        case "compressed-tensors":
            for target in config.target_scheme_map.values():
                yield _of_target(target)
        case "gptq":
            for rule in ({}, *(rule for name, rule in config.dynamic.items() if not name.startswith("-:"))):
                of = {"bits": config.weight_bits, "group_size": config.group_size, "sym": config.is_sym} | rule
                order = of.get("desc_act", config.desc_act) and of["group_size"] != -1
                activations = "reordered" if order else PLAIN_ACTIVATIONS
                yield Scheme("gptq", f"int{of['bits']}", *_rows_or(of["group_size"]), not of["sym"], activations)
        case "awq":
            yield Scheme("awq", f"int{config.weight_bits}", *_rows_or(config.group_size), config.zero_point)
        case "moe_wna16":
            of = f"moe_wna16 of {config.linear_quant_method}"
            yield Scheme(of, f"int{config.weight_bits}", *_rows_or(config.group_size), config.has_zp)
        case "modelopt":
            activations = _BY_TENSOR_GROUP if config.quant_method == "NVFP4" else PLAIN_ACTIVATIONS
            yield Scheme("modelopt", "float4", "tensor_group", config.group_size, False, activations)


def _rows_or(group: int) -> tuple[str, int | None]:
    """What has one scale, of a size that is -1 for rows."""
    return ("channel", None) if group == -1 else ("group", group)


def _of_target(target: Any) -> Scheme:
    """Of a target of compressed-tensors."""
    weights, activations = target["weights"], []
    for name in ("input_activations", "output_activations"):
        if (of := target.get(name)) is not None:
            kind = "dynamic" if of.dynamic else "static"
            zeros = "" if of.symmetric else "asymmetric "
            groups = f" {of.group_size}" if _word(of.strategy) == "group" else ""
            output = " output" if name == "output_activations" else ""
            activations.append(f"{zeros}{_kind(of)} {kind} {_word(of.strategy)}{groups}{output}")
    size: Any = None
    if weights.block_structure:
        size = tuple(weights.block_structure)
    elif _word(weights.strategy) in ("group", "tensor_group"):
        size = weights.group_size
    shared = _word(weights.strategy)
    if weights.dynamic or _word(weights.actorder) in ("group", "dynamic"):
        shared = f"{shared}, while it serves or in another order"
    return Scheme("compressed-tensors", _kind(weights), shared, size, not weights.symmetric, " and ".join(activations))


def _kind(of: Any) -> str:
    return f"{_word(of.type)}{of.num_bits}"


def _word(value: Any) -> str:
    return str(getattr(value, "value", value))

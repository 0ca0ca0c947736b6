"""Which quantised checkpoints start, as a table: by what vLLM reads of a configuration. What is not in it is refused.

:mod:`..layers.quantised` looks again, at each layer as vLLM builds it.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

TOKEN_CACHE = "fp8_per_token_head"
FP8_CACHES = ("fp8", "fp8_e4m3", TOKEN_CACHE)
"""vLLM's names of a KV cache in e4m3: scales of the last are of what is written, others of the checkpoint, or 1."""
ONE_SCALE, OF_HEADS, OF_TOKENS = "tensor", "attn_head", "token_head"
GIVEN_SCALES = {ONE_SCALE: "one scale", OF_HEADS: "one scale a head"}
"""What has one for its keys and one for its values in a checkpoint: as compressed-tensors calls it, and in words."""
CACHE_SCALES = GIVEN_SCALES | {OF_TOKENS: "one scale a token and head"}
"""The same in a cache."""
MIXED = "modelopt_mixed"
"""vLLM's name of a checkpoint of ModelOpt whose layers have several formats."""
PLAIN_ACTIVATIONS = ""
"""Activations that are not quantised."""
_METHODS = {
    **dict.fromkeys(("auto_gptq", "gptq", "gptq_marlin"), "gptq"),
    **dict.fromkeys(("auto_awq", "awq", "awq_marlin"), "awq"),
    "compressed-tensors": "compressed-tensors",
    "fp8": "fp8",
    "experts_int8": "experts_int8",
    **dict.fromkeys(
        ("fp8_per_block", "fp8_per_channel", "fp8_per_tensor", "int8_per_channel_weight_only", "online"), "online"
    ),
    **dict.fromkeys(("modelopt", "modelopt_fp4"), "modelopt"),
    MIXED: MIXED,
    "moe_wna16": "moe_wna16",
}
"""vLLM's names of methods."""
_OF_THE_BATCH = " dynamic tensor"
"""Activations with one scale for all tokens of a step."""
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

    @property
    def kind(self) -> str:
        """What ``ran.toml`` calls it beside other layers: of weights alone their method and codes, as a layer then
        multiplies with a matrix.
        """
        return str(self) if self.activations else f"{self.method} with {self.weights} weights"


_ONLINE = {
    "fp8_per_block_static": Scheme("online", "float8", "block", (128, 128), False, "float8 dynamic group 128"),
    "fp8_per_channel_static": Scheme("online", "float8", "channel", activations="float8 dynamic token"),
    "fp8_per_tensor_static": Scheme("online", "float8", "tensor", activations="float8 dynamic token"),
    "int8_per_channel_static": Scheme("online", "int8", "channel"),
}
"""By vLLM's name of what weights are quantised to while they are loaded. The last is of experts alone."""
_OLDER_INT8 = Scheme("experts_int8", "int8", "channel")
_INT8_EXPERTS = _ONLINE["int8_per_channel_static"], _OLDER_INT8
"""The last, and the same by its older name."""
_MODELOPT = {
    "FP8": Scheme("modelopt", "float8", "tensor", activations="float8 static tensor"),
    "FP8_PER_CHANNEL_PER_TOKEN": Scheme("modelopt", "float8", "channel", activations="float8 dynamic token"),
    "FP8_PB_WO": Scheme("modelopt", "float8", "block", (128, 128), activations="float8 dynamic group 128"),
}
"""By ModelOpt's name of an algorithm."""
_NVFP4 = "NVFP4", "W4A16_NVFP4"
"""Its names of NVFP4."""
_UNSAID = {"has_zero_point": False, "pre_quant_scale": False}
"""What it says of a layer in one of those, beside its algorithm and groups."""
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
_FP8_OF_EXPERTS = frozenset(
    [
        *(
            Scheme(method, "float8", "block", (128, 128), False, "float8 dynamic group 128")
            for method in ("compressed-tensors", "fp8")
        ),
        Scheme("compressed-tensors", "float8", "channel", activations="float8 dynamic token"),
        Scheme("compressed-tensors", "float8", "tensor", activations="float8 static tensor"),
        *(Scheme("fp8", "float8", "tensor", activations=f"float8 {of}") for of in ("dynamic token", "static tensor")),
        _MODELOPT["FP8"],
    ]
)
"""Those of FP8 in which experts are served, too."""
_NVFP4_OF_EXPERTS = frozenset(
    Scheme(method, "float4", "tensor_group", 16, False, activations)
    for method in ("compressed-tensors", "modelopt")
    for activations in (PLAIN_ACTIVATIONS, _BY_TENSOR_GROUP)
)
"""Those of FP4 in which experts are served, too."""
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
        *(
            Scheme("compressed-tensors", "float8", shared, None, False, f"float8 {activations}")
            for shared in ("tensor", "channel")
            for activations in ("dynamic token", "static tensor")
        ),
        *(
            Scheme("fp8", "float8", "tensor", activations=f"float8 {given}")
            for given in ("dynamic token", "static tensor")
        ),
        *_FP8_OF_EXPERTS,
        *_ONLINE.values(),
        *_MODELOPT.values(),
        _OLDER_INT8,
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
    if name in _OF_EXPERTS_ALONE:
        return None
    method = _method(model, config)
    if method is None:
        return f"quantisation {name}"
    twice = method != "online" and getattr(model, "quantization_config", None)
    if getattr(config, "online_quantization_config", None) is not None or twice:
        return f"quantisation {name} beside quantisation while loading"
    if getattr(config, "transform_config", None):
        return f"quantisation {name} with transforms of activations"
    if method == "moe_wna16" and config.full_config.get("dynamic"):
        return f"quantisation {name} with rules of layers"
    if method == MIXED and (unknown := _other_recipe(config)):
        return f"quantisation {name} with {unknown}"
    of_cache = getattr(config, "kv_cache_scheme", None)
    of_modelopt = (getattr(config, f"kv_cache_quant_{name}", None) for name in ("method", "algo"))  # of FP8, of FP4
    if (of_cache and not _is_static_fp8(of_cache)) or any(algorithm not in (None, "FP8") for algorithm in of_modelopt):
        return f"quantisation {name} with this scheme for the KV cache"
    schemes = list(_schemes(method, config))
    other = next((scheme for scheme in schemes if scheme not in COVERED and not _follows_batch(scheme)), None)
    if other:
        return f"quantisation {other}"
    of_fp4 = next((scheme for scheme in schemes if scheme in _WITHOUT_FP4), None)
    if of_fp4 and device_multiplies_fp4():
        return f"quantisation {of_fp4} on a GPU that multiplies FP4, for which vLLM quantises activations"
    if not has_experts(model) and any(scheme in _INT8_EXPERTS for scheme in schemes):
        return f"quantisation {name} of a model without experts, which alone it is for"
    known = _FP8_OF_EXPERTS | _NVFP4_OF_EXPERTS
    of_experts = next((one for one in schemes if not _is_integers(one) and one not in known), None)
    return f"quantisation {of_experts} of a mixture of experts" if of_experts and has_experts(model) else None


def has_experts(model: Any) -> bool:
    """Whether a model has experts. vLLM looks at their number, which a Nemotron-H without any has, too."""
    pattern = getattr(getattr(model, "hf_text_config", None), "hybrid_override_pattern", None)
    return bool(model.is_moe) and (pattern is None or "E" in pattern)


def kinds(model: Any, config: Any) -> tuple[str, ...]:
    """How the layers of a quantised model are, as :attr:`Scheme.kind` calls it; empty if that is not known."""
    return tuple(dict.fromkeys(one.kind for one in _of_model(model, config)))


def of_the_batch(model: Any, config: Any) -> str | None:
    """Activations of a quantised model with one scale for all tokens of a step; None: it has none."""
    found = next((scheme for scheme in _of_model(model, config) if _follows_batch(scheme)), None)
    return f"quantisation {found}" if found else None


def makes_int8_experts(model: Any, config: Any) -> bool:
    """Whether experts become int8 while they are loaded: no GPU has run such an engine."""
    return any(one in _INT8_EXPERTS for one in _of_model(model, config))


def of_activations(model: Any, config: Any) -> tuple[str, ...]:
    """How layers of a quantised model are that multiply codes with codes, as :attr:`Scheme.kind` calls it."""
    coded = (one for one in _of_model(model, config) if "float8" in one.activations or "int8" in one.activations)
    return tuple(dict.fromkeys(one.kind for one in coded))


def _of_model(model: Any, config: Any) -> Iterator[Scheme]:
    """Of the layers of a model; none if it is not quantised by a known method."""
    method = _method(model, config)
    return _schemes(method, config) if method else iter(())


def _method(model: Any, config: Any) -> str | None:
    """By which vLLM reads the weights of a model; None: by none that is known. Of "fp8" there is a second kind of
    configuration in vLLM 0.32, for weights of 16 bits.
    """
    method = _METHODS.get(getattr(model, "quantization", None) or "")
    is_known = config is not None and (method != "fp8" or hasattr(config, "weight_block_size"))
    return method if is_known else None


def _follows_batch(scheme: Scheme) -> bool:
    return scheme.activations.endswith(_OF_THE_BATCH)


def scales_of_cache(dtype: str, config: Any) -> str:
    """What has a scale of its own in a KV cache in e4m3, of :data:`CACHE_SCALES`.

    Args:
        dtype: vLLM's name of the cache's.
        config: vLLM's configuration of the model's quantisation; None if there is none.
    """
    if dtype == TOKEN_CACHE:
        return OF_TOKENS
    of_cache = getattr(config, "kv_cache_scheme", None) or {}
    return _word(of_cache.get("strategy", ONE_SCALE))


def _is_static_fp8(of_cache: Mapping[str, Any]) -> bool:
    """Whether a cache has codes in e4m3 and given scales, of a layer or of each head."""
    of = {name: of_cache.get(name) for name in ("type", "num_bits", "strategy", "dynamic", "symmetric")}
    found = {name: _word(value) if isinstance(value, Enum) else value for name, value in of.items()}
    wanted = {"type": "float", "num_bits": 8, "dynamic": False, "symmetric": True}
    return found.pop("strategy") in GIVEN_SCALES and found == wanted


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
        case "fp8":
            yield _of_fp8(config)
        case "online":
            yield from _of_online(config.args)
        case "experts_int8":
            yield _OLDER_INT8
        case "awq":
            yield Scheme("awq", f"int{config.weight_bits}", *_rows_or(config.group_size), config.zero_point)
        case "moe_wna16":
            of = f"moe_wna16 of {config.linear_quant_method}"
            yield Scheme(of, f"int{config.weight_bits}", *_rows_or(config.group_size), config.has_zp)
        case "modelopt":
            yield _of_modelopt(config.quant_method, getattr(config, "group_size", None))
        case "modelopt_mixed":
            of_vllm = config.nvfp4_config.group_size  # for all layers
            recipes = dict.fromkeys(
                (str(recipe.get("quant_algo")).upper(), recipe.get("group_size", of_vllm))
                for recipe in config.quantized_layers.values()
            )
            for algorithm, group in recipes:
                if algorithm in _NVFP4:
                    yield _of_modelopt(algorithm, of_vllm)
                yield _of_modelopt(algorithm, group)


def _of_modelopt(algorithm: str, group: int | None) -> Scheme:
    """Of an algorithm of ModelOpt's; in NVFP4 by groups."""
    if algorithm in _MODELOPT:
        return _MODELOPT[algorithm]
    activations = _BY_TENSOR_GROUP if algorithm == "NVFP4" else PLAIN_ACTIVATIONS
    return Scheme("modelopt", "float4", "tensor_group", group, False, activations)


def _other_recipe(config: Any) -> str | None:
    """What of the formats of single layers is not covered; None: nothing."""
    for name, recipe in config.quantized_layers.items():
        algorithm = str(recipe.get("quant_algo", "")).upper()
        if algorithm not in ("FP8", *_NVFP4):
            return f"{name} in {algorithm or 'no algorithm'}"
        known = _UNSAID | {"quant_algo": recipe["quant_algo"]}
        known |= {"group_size": recipe["group_size"]} if algorithm in _NVFP4 and "group_size" in recipe else {}
        other = next((key for key, value in recipe.items() if key not in known or known[key] != value), None)
        if other is not None:
            return f"{other} {recipe[other]} of {name}"
    return None


def _of_fp8(config: Any) -> Scheme:
    """Of vLLM's own configuration of FP8. Without blocks it says that activations are dynamic, and not by what: the
    mode quantises a token.
    """
    block = config.weight_block_size
    other = " with scales of powers of two" if getattr(config, "is_scale_e8m0", False) else ""
    other += f" stored as {config.store_dtype}" if getattr(config, "store_dtype", None) else ""
    if block is None:
        given = "static tensor" if config.activation_scheme == "static" else "dynamic token"
        return Scheme("fp8", f"float8{other}", "tensor", None, False, f"float8 {given}")
    return Scheme("fp8", f"float8{other}", "block", tuple(block), False, f"float8 dynamic group {block[1]}")


def _of_online(args: Any) -> Iterator[Scheme]:
    """Of what is quantised while it is loaded."""
    specs = [spec for spec in (args.linear, args.moe) if spec is not None]
    names = [str(spec) if spec.activation is None else f"{spec} with {spec.activation}" for spec in specs]
    for name in dict.fromkeys([*names, *(f"{name}_static" for name in (args.targets or {}).values())]):
        yield _ONLINE[name] if name in _ONLINE else Scheme("online", name, "group")


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

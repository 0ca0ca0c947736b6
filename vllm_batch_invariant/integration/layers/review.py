"""A look at the layers of a model that is loaded: each must be of a kind that is known to keep a request's bits.

A configuration says what it says about a model; what computes is its modules. The rule for each of them:

- A layer of vLLM's or PyTorch's must be in ``reviews/layers.toml``, by its exact class: a subclass may compute
  something else. Linear layers and embeddings must multiply with a plain weight, which :mod:`.quantised` makes of that
  of a quantised checkpoint; attention and experts must be served by ours, and a norm of vLLM's must have been replaced
  by ours. Classes of this project are known.
- A class of a model's own file (vLLM's or Hugging Face's: decoder layers, blocks, whole models) only calls other layers
  and PyTorch, whose operations the mode replaces. It passes if it inherits from such classes alone, keeps no weights of
  its own but those that its attention or its experts read, and its methods use nothing but PyTorch, Python, other
  functions of models' files, which are followed, and names that somebody has read (:mod:`.calls`).
- Anything else is refused: convolutions, state spaces, quantised layers, encoders, models to come.
"""

import functools
import math
import sys
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

import torch

from ...errors import NotCovered
from ...ops import dispatch
from .. import reviews
from ..reviews import encoding, patch_points, sources
from . import calls, encoders, experts, fp8, int8, latent, pooling, quantised, shared_norm
from .calls import MODELS

POOLERS = "vllm.model_executor.layers.pooler."
"""The package of poolers."""
PLAIN = (torch.nn.Module, torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.Sequential, torch.nn.Identity)
"""What such a class may inherit from besides."""


def check(model: torch.nn.Module) -> None:
    """Refuse a model that has a layer of an unknown kind, or an encoder that nobody has read.

    Raises:
        NotCovered: the first such layer.
    """
    towers = encoders.towers(model)
    if not towers and encoding.encoded_by(type(model)):
        encoders.check(next(model.parameters()).device.type)
    for name, tower in towers.items():
        if type(tower) is patch_points.MISSING_STAGE.get():
            continue
        if not encoding.encoded_by(type(model)):
            raise NotCovered(
                f"the encoder {name}", "its kernels are not ours", "serve text only, with --language-model-only"
            )
        encoders.check(next(model.parameters()).device.type)
        _check_weights(name, tower)
        if problem := encoders.problem_of_tower(tower) or encoders.problem_of_heads(tower):
            raise NotCovered(f"the encoder {name}", problem, "serve text only, with --language-model-only")
    for name, module in _all_modules(model):
        if problem := _problem(module):
            which = f"the layer {name}" if name else "the model itself"
            raise NotCovered(
                f"{which} ({type(module).__module__}.{type(module).__qualname__})",
                problem,
                "serve a model made of known layers",
            )


def _check_weights(name: str, encoder: torch.nn.Module) -> None:
    """Refuse an encoder of whose layers some are quantised."""
    kind, plain = patch_points.LINEAR_LAYER.get(), patch_points.LINEAR_METHOD.get()
    if any(isinstance(layer, kind) and type(layer.quant_method) is not plain for layer in encoder.modules()):
        raise NotCovered(
            f"quantised weights of the encoder {name}",
            "they have not been run",
            "serve a checkpoint whose encoder keeps 16 bits, or text only, with --language-model-only",
        )


def _all_modules(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """A model's layers by their names; with poolers and what a class of a model keeps where PyTorch does not look."""
    seen: set[int] = set()
    open_ = [("", model)]
    for prefix, root in open_:
        for inside, module in root.named_modules():
            if id(module) in seen:
                continue
            seen.add(id(module))
            name = ".".join(part for part in (prefix, inside) if part)
            yield name, module
            open_ += [(f"{name}.{task}".lstrip("."), pooler) for task, pooler in pooling.parts(module)]
            if type(module).__module__.startswith(MODELS) and type(module) is not patch_points.MISSING_STAGE.get():
                open_ += [(f"{name}.{kept}".lstrip("."), layer) for kept, layer in _kept_aside(module)]


def _kept_aside(module: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Layers in a module's attributes that are lists, tuples, sets and tables, or functions with arguments."""
    open_ = [(name, value) for name, value in vars(module).items() if not name.startswith("_")]
    for name, value in open_:
        match value:
            case torch.nn.Module():
                yield name, value
            case list() | tuple() | set() | frozenset():
                open_ += [(name, inside) for inside in value]
            case dict():
                open_ += [(name, inside) for inside in value.values()]
            case functools.partial():
                open_ += [(name, inside) for inside in (value.func, *value.args, *value.keywords.values())]
            case MethodType():
                open_.append((name, value.__self__))


def _problem(module: torch.nn.Module) -> str | None:
    """Why a layer is refused; None if it is known."""
    kind: type = type(module)
    if _is_ours(kind):
        return encoders.problem_of(module)
    if dispatch.arithmetic() == "exact" and (undefined := _undefined(module)):
        return undefined
    if _is_known(kind):
        return _of_layer(module)
    return (
        of_model_class(kind)
        or _of_functions(module)
        or _of_tensors(module)
        or _of_rotary(module)
        or encoders.problem_of_attention(module)
    )


def _undefined(module: torch.nn.Module) -> str | None:
    """Why exact arithmetic has no definition of a layer; None if it has."""
    kind = type(module)
    is_defined = reviews.is_known(reviews.layers().exact, kind.__module__, kind.__name__)
    return None if is_defined or kind.__module__.startswith(MODELS) else "it has no definition in exact arithmetic"


def _is_ours(kind: type) -> bool:
    return kind.__module__.startswith(f"{__package__.partition('.')[0]}.")


def _is_known(kind: type) -> bool:
    return reviews.is_known(reviews.layers().known, kind.__module__, kind.__name__)


def _of_layer(layer: torch.nn.Module) -> str | None:
    """Of a layer of a known class."""
    kind: type = type(layer)
    if other := _other_source(kind):
        return f"its {other} is not the one that was read"
    method = getattr(layer, "quant_method", None)
    if type(layer).__name__ in ("Attention", "EncoderOnlyAttention", "CrossAttention", "ChunkedLocalAttention"):
        if not any(_is_ours(kind) for kind in type(layer.impl).__mro__):
            return "its kernels are not ours"
        if getattr(layer.impl, "is_of_block", False):
            return "its tokens see those after them"
        if getattr(layer, "head_size_v", layer.head_size) != layer.head_size:
            return "its values have another size than its keys"
        if layer.impl.kv_cache_dtype.startswith("fp8"):
            if getattr(layer, "query_quant", None) is not None:
                return "its queries are quantised"
            if layer.impl.scales_tokens:
                return None
            scales = layer._k_scale, layer._v_scale
            if any(scale.numel() not in (1, layer.num_kv_heads) for scale in scales):
                return f"its KV cache has {scales[0].numel()} and {scales[1].numel()} scales"
            if not all(bool(((scale > 0) & (scale < math.inf)).all()) for scale in scales):
                return f"the scales of its KV cache are {' and '.join(str(scale.tolist()) for scale in scales)}"
    elif type(layer).__name__ == latent.NAME:
        return latent.problem_of(layer)
    elif type(layer).__name__ == latent.FUSED and layer._use_min_latency_gemm:
        return "it has another kernel for few rows"
    elif type(layer).__name__ == latent.OUTER and layer.fuse_qkv_rmsnorm:
        return "its norms are computed by a kernel of vLLM's"
    elif isinstance(layer, patch_points.MOE_RUNNER.get()):
        return experts.problem_of(layer)
    elif isinstance(layer, patch_points.ROUTED_EXPERTS.get()):
        return None if _is_ours(type(method)) else f"its experts are computed by {type(method).__name__}"
    elif isinstance(layer, patch_points.LORA_LAYER.get()):
        wrapper, base = type(layer.punica_wrapper), layer.base_layer
        if getattr(base, "out_dtype", None) not in (None, *(one.dtype for one in base.parameters())):
            return f"its adapters are added to results in {base.out_dtype}"
        return None if _is_ours(wrapper) else f"its adapters are computed by {wrapper.__name__}"
    elif type(layer).__module__.startswith(POOLERS):
        return pooling.problem_of(layer)
    elif type(layer).__name__ == shared_norm.NAME:
        return shared_norm.problem()
    elif type(layer).__name__ == "Conv3dLayer":
        return None if layer.enable_linear else "it is a convolution that is not a matmul"
    elif type(layer).__name__ == "GateLinear" and (problem := experts.problem_of_gate(layer)):
        return problem
    elif int8.computes(layer) or fp8.computes(layer):
        return None
    elif method is not None and not quantised.is_plain(method):
        return f"its matmuls are computed by {type(method).__name__}"
    return None


@functools.cache
def _other_source(kind: type) -> str | None:
    """A method of a class that is known by its sources, where it has another one."""
    for base in kind.__mro__:
        for name in reviews.functions("layers").get(base.__module__, {}):
            owner, _, method = name.rpartition(".")
            if owner == base.__name__ and not sources.is_read("layers", getattr(kind, method, None)):
                return method
    return None


@functools.cache
def of_model_class(kind: type) -> str | None:
    """Why a class of a model's own file is refused; None if it only puts other layers together."""
    if not kind.__module__.startswith(MODELS):
        return "this version of the plugin does not know it"
    for base in kind.__mro__:
        of_model = base.__module__.startswith(MODELS) and not _is_known(base)
        if issubclass(base, torch.nn.Module) and base not in PLAIN and not of_model:
            return f"it is a {base.__name__} of its own"
    return next(_calls(kind), None)


def _of_tensors(module: torch.nn.Module) -> str | None:
    """Of a layer of a model's own class; what its attention and its experts hold as well is read by ours."""
    own = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
    read = [getattr(getattr(getattr(child, "impl", None), "spec", None), "sinks", None) for child in module.children()]
    read += [part.e_score_correction_bias for part in _experts(module)]
    known = reviews.layers().own_tensors
    strange = [name for name, tensor in own.items() if name not in known and not any(tensor is there for there in read)]
    return f"it keeps weights of its own ({strange[0]})" if strange else None


def _experts(module: torch.nn.Module) -> Iterator[Any]:
    """Experts that a module calls, and that ours serve."""
    for child in module.children():
        if isinstance(child, patch_points.MOE_RUNNER.get()):
            yield from (
                part
                for part in child.modules()
                if isinstance(part, patch_points.ROUTED_EXPERTS.get()) and _is_ours(type(part.quant_method))
            )


def _of_rotary(module: torch.nn.Module) -> str | None:
    """Of a rotary embedding of Transformers', which may change its frequencies while it serves."""
    kind = getattr(module, "rope_type", None)
    kinds = kind.values() if isinstance(kind, dict) else [kind] if kind else []
    other = next((kind for kind in kinds if kind not in reviews.layers().steady_rotary), None)
    return f"its angles may follow the longest context of a step (rope_type {other})" if other else None


def _calls(kind: type) -> Iterator[str]:
    """What the methods of a class and of its bases use that nobody has read."""
    read = [base for base in kind.__mro__ if reviews.calls().have(base.__module__, base.__qualname__)]
    for base in kind.__mro__:
        if f"{base.__module__}.".startswith(calls.FOLLOWED):
            if not _is_known(base):
                for called in calls.Walk(_sources()).of_class(base.__module__, base.__qualname__):
                    yield f"{called.function} calls {called.name}, which nobody has read"
                for name, member in vars(base).items():
                    yield from _from_elsewhere(f"{base.__qualname__}.{name}", member)
        elif not (_is_plain(base) or any(issubclass(other, base) for other in read)):
            yield f"it inherits from {base.__module__}.{base.__qualname__}, which nobody has read"


def unread(sources: calls.Sources) -> dict[str, list[str]]:
    """Names that the classes of covered models use and that nobody has read, each with the functions that use it."""
    found: dict[str, list[str]] = {}
    for covered in reviews.calls().models:
        file, _, only = covered.partition(":")
        module = sources.get(f"vllm.model_executor.models.{file}")
        if module is None:
            continue
        for name, values in module.names.items():
            if (
                only in ("", name)
                and not reviews.is_known(reviews.layers().known, module.name, name)
                and calls.defines_a_layer(sources, module, values)
            ):
                for called in calls.Walk(sources).of_class(module.name, name):
                    found.setdefault(called.name, []).append(f"{file}.{called.function}")
    return found


def _of_functions(module: torch.nn.Module) -> str | None:
    """Of functions that one layer has in the place of its class's."""
    for name, value in vars(module).items():
        if isinstance(value, FunctionType | MethodType | functools.partial):
            for problem in _from_elsewhere(f"{type(module).__qualname__}.{name}", value):
                return problem
    return None


def _is_plain(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in {*sys.stdlib_module_names, "torch"} or _is_ours(kind)


def _from_elsewhere(name: str, member: Any) -> Iterator[str]:
    """Functions under a name that are not of the sources that are looked at: somebody has put them there."""
    while isinstance(member, functools.partial):
        member = member.func
    for attribute in ("fget", "func", "__func__"):  # of properties, cached ones and methods
        member = getattr(member, attribute, None) or member
    while isinstance(member, FunctionType):
        module, root = member.__globals__.get("__name__", ""), member.__code__.co_qualname.partition(".")[0]
        of_model = f"{module}.".startswith(calls.FOLLOWED)
        if of_model:
            file = getattr(sys.modules.get(module), "__file__", None)
            known = member.__code__.co_filename == file
        else:
            known = (
                module.partition(".")[0] in {*sys.stdlib_module_names, __package__.partition(".")[0]}
                or module.startswith(("torch.nn.", "torch.utils._contextlib"))
                or reviews.calls().have(module, root)
            )
        if not known:
            yield f"its {name} is {module}.{member.__code__.co_qualname}, which nobody has read"
        member = getattr(member, "__wrapped__", None)


@functools.cache
def _sources() -> calls.Sources:
    return calls.Sources.installed()

"""vLLM's linear layers and output embeddings of quantised checkpoints: what is multiplied is the matrix that a format
stands for. A kernel that reads what is stored is given that; where there is none, the matrix is made when the weights
are loaded.

vLLM makes a layer's tensors, loads them and shards them; its kernels for packed weights are asked for nothing. Then the
layer has only what it multiplies with, and the mode's method for it. What comes again is taken again. Shards of a
fused layer keep their own scales.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from weakref import WeakSet

import torch

from ...errors import NotCovered
from ...ops.formats import eight, fp4, layouts
from ...ops.formats.integers import INTEGERS, integers
from ...ops.formats.record import Format
from ...ops.linear import reads_as_stored
from ...ops.linear.spec import spec_of
from ..reviews import patch_points, schemes
from ..side_table import beside
from . import fp8, int8, linear, mixed_precision

_ABSORBED = ".kv_b_proj"
"""What the name of a layer ends with that nobody calls in a model with latent attention, which multiplies with parts of
its matrix: queries and results, that are not quantised whatever the others are given.
"""
_unpacked: WeakSet[torch.nn.Module] = WeakSet()
"""Layers of this process that have a weight in the place of what their checkpoint stores."""


@dataclass(frozen=True)
class Source:
    """How layers of one class of vLLM's methods or schemes hold a format.

    Attributes:
        format: that they hold.
        stored: gives its tensors, of a layer whose weights are loaded.
        uncounted: a parameter that nothing reads, and that comes once for each shard of a fused layer, or not at all.
            It stays: that of the last shard may come when all the rest is there.
    """

    format: Format
    stored: Callable[[Any], tuple[torch.Tensor, ...]]
    uncounted: str = ""


def _integers(bits: int, group: int, zeros: bool) -> Format | None:
    """The format of these; None for one that is not tested."""
    if bits not in (4, 8):
        return None
    found = integers(bits, None if group == -1 else group, zeros)
    return found if found in INTEGERS else None


def _of_compressed_integers(scheme: Any) -> Source | None:
    def stored(layer: Any) -> tuple[torch.Tensor, ...]:
        zeros = None if scheme.symmetric else layer.weight_zero_point.data
        return layouts.from_compressed_tensors(
            layer.weight_packed.data, layer.weight_scale.data, zeros, bits=scheme.num_bits
        )

    found = _integers(scheme.num_bits, scheme.group_size, not scheme.symmetric)
    return Source(found, stored, "weight_shape") if found else None


def _of_compressed_fp8(scheme: Any) -> Source | None:
    strategy = str(getattr(scheme.strategy, "value", scheme.strategy))
    if scheme.is_static_input_scheme or strategy not in ("tensor", "channel", "block"):
        return None
    if strategy == "block":
        sides = [eight.SIDE] * 2
        if list(scheme.weight_block_size) != sides:
            return None
        return Source(eight.FP8_BLOCK, lambda layer: (layer.weight.data, layer.weight_scale.data))

    def stored(layer: Any) -> tuple[torch.Tensor, ...]:
        scales = layer.weight_scale.data
        return layer.weight.data, layouts.per_row(scales, layer.logical_widths) if strategy == "tensor" else scales

    return Source(eight.FP8, stored)


def _of_compressed_nvfp4(scheme: Any) -> Source | None:
    def stored(layer: Any) -> tuple[torch.Tensor, ...]:
        of_shards = 1.0 / layer.weight_global_scale.data
        return layer.weight_packed.data, layer.weight_scale.data, layouts.per_row(of_shards, layer.logical_widths)

    return Source(fp4.NVFP4, stored) if scheme.use_a16 or not schemes.device_multiplies_fp4() else None


def _of_compressed_mxfp4(_: Any) -> Source | None:
    if schemes.device_multiplies_fp4():
        return None
    return Source(fp4.MXFP4, lambda layer: (layer.weight_packed.data, layer.weight_scale.data))


def _of_modelopt(method: Any) -> Source | None:
    def stored(layer: Any) -> tuple[torch.Tensor, ...]:
        of_rows = layouts.per_row(layer.weight_scale_2.data, layer.logical_widths)
        return layer.weight.data, layer.weight_scale.data, of_rows

    if type(method.wkey).__name__ != "KNvfp4Static" or method.ctx.group_size != fp4.NVFP4.group:
        return None
    if method.akey is None:  # vLLM makes an input_scale then, for the older files that have one
        return Source(fp4.NVFP4, stored, "input_scale")
    return None if schemes.device_multiplies_fp4() else Source(fp4.NVFP4, stored)


def _of_gptq(method: Any) -> Source | None:
    config = method.quant_config

    def stored(layer: Any) -> tuple[torch.Tensor, ...]:  # vLLM takes symmetric ones alone, in the order of K
        return layouts.from_gptq(layer.qweight.data, layer.scales.data, bits=config.weight_bits)

    found = _integers(config.weight_bits, config.group_size, False)
    return Source(found, stored) if found and config.is_sym and not config.desc_act else None


def _of_awq(method: Any) -> Source | None:
    config = method.quant_config

    def stored(layer: Any) -> tuple[torch.Tensor, ...]:
        return layouts.from_awq(layer.qweight.data, layer.scales.data, layer.qzeros.data)

    found = _integers(config.weight_bits, config.group_size, True)
    return Source(found, stored) if found and config.weight_bits == 4 and config.zero_point else None


_QUANTIZATION = "vllm.model_executor.layers.quantization"
_SCHEMES = f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors"
_SOURCES = {
    f"{_SCHEMES}_wNa16.CompressedTensorsWNA16": _of_compressed_integers,
    f"{_SCHEMES}_w8a16_fp8.CompressedTensorsW8A16Fp8": _of_compressed_fp8,
    f"{_SCHEMES}_w4a4_nvfp4.CompressedTensorsW4A4Fp4": _of_compressed_nvfp4,
    f"{_SCHEMES}_w4a4_mxfp4.CompressedTensorsW4A4Mxfp4": _of_compressed_mxfp4,
    f"{_QUANTIZATION}.modelopt.ModelOptLinearMethod": _of_modelopt,
    f"{_QUANTIZATION}.auto_gptq.AutoGPTQLinearMethod": _of_gptq,
    f"{_QUANTIZATION}.auto_awq.AutoAWQMarlinLinearMethod": _of_awq,
    f"{_QUANTIZATION}.auto_awq.AutoAWQLinearMethod": _of_awq,
}
"""By vLLM's methods of linear layers, and by schemes of compressed-tensors."""
_CHOICES = {
    **fp8.CHOICES,
    f"{_SCHEMES}_wNa16": ("choose_mp_linear_kernel",),
    f"{_SCHEMES}_w8a16_fp8": ("init_wfp8_a16_linear_kernel",),
    f"{_SCHEMES}_w4a4_nvfp4": ("init_nvfp4_linear_kernel",),
    f"{_SCHEMES}_w4a4_mxfp4": ("init_mxfp4_linear_kernel",),
    f"{_QUANTIZATION}.auto_gptq": ("choose_mp_linear_kernel", "verify_marlin_supported"),
    f"{_QUANTIZATION}.auto_awq": ("choose_mp_linear_kernel", "verify_marlin_supported"),
}
"""Functions by which these choose one of vLLM's kernels, and ask whether there is one. Some refuse where there is none,
or because the flag is 1.
"""


class UnpackedAtLoad:
    """Stands where vLLM has a kernel for packed weights. Nobody calls it."""

    def __init__(self, *arguments: object, **named: object) -> None:
        pass

    def input_quant_key(self) -> None:
        """The dtype in which a kernel would take activations quantised: none."""


def install() -> None:
    """Have linear layers and output embeddings of quantised checkpoints unpack what is loaded."""
    for point in (patch_points.LINEAR_CHOICE, patch_points.EMBEDDING_CHOICE):
        if point.is_there():
            point.put(_choosing(point.get()))
    mixed_precision.install()
    if patch_points.ATTENTION_CHOICE.is_there():
        patch_points.ATTENTION_CHOICE.put(_choosing_scales(patch_points.ATTENTION_CHOICE.get()))


def _choosing_scales(choose: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's choice of what has the scales of a KV cache, where the cache or its checkpoint has some. vLLM's can be
    processed once alone, and weights that a trainer sends are processed each time.
    """

    @functools.wraps(choose)
    def resolve_quant_method(quant_config: Any, layer: Any, prefix: str) -> Any:
        if layer.kv_cache_dtype not in schemes.FP8_CACHES and not getattr(quant_config, "kv_cache_scheme", None):
            return None
        method = choose(quant_config, layer, prefix)
        if method is not None:
            create, process = method.create_weights, method.process_weights_after_loading

            def create_weights(of: Any) -> None:
                create(of)
                _name_loaders(of)

            method.create_weights = create_weights
            method.process_weights_after_loading = lambda of: process(of) if hasattr(of, "k_scale") else None
        return method

    return resolve_quant_method


def _name_loaders(layer: torch.nn.Module) -> None:
    """Those of scales of heads are partial, and vLLM's reload asks each for its name."""
    loaders = (getattr(parameter, "weight_loader", None) for parameter in layer.parameters(recurse=False))
    for loader in loaders:
        if isinstance(loader, functools.partial):
            vars(loader)["__name__"] = loader.func.__name__


def _choosing(choose: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's choice of the method of a layer, in whose place comes ours if the layer is quantised."""
    choose = mixed_precision.checked(choose, is_plain)

    @functools.wraps(choose)
    def resolve_quant_method(quant_config: Any, layer: Any, prefix: str) -> Any:
        _keep_kernels_apart()
        method = choose(quant_config, layer, prefix)
        is_linear = isinstance(layer, patch_points.LINEAR_LAYER.get())
        if method is None or is_plain(method):
            return method
        absorbed = is_absorbed(prefix)
        if int8.has_scheme(layer) and not absorbed:
            return method
        multiplied = fp8.source_of(method, layer)
        if multiplied is not None and not absorbed:
            return fp8.method_of(method, multiplied)
        source = source_of(method, layer) if multiplied is None else _of_codes(multiplied)
        if source is None:
            scheme = type(getattr(layer, "scheme", method)).__name__
            raise NotCovered(f"weights of {prefix} by {scheme}", "no format of the mode's stands for them", fp8.REMEDY)
        base = (patch_points.LINEAR_METHOD if is_linear else patch_points.EMBEDDING_METHOD).get()
        return _method_of(base)(method, source, absorbed)

    return resolve_quant_method


@functools.cache
def _keep_kernels_apart() -> None:
    """Have no kernel of vLLM's for packed weights chosen."""
    stand_ins = {"choose": lambda *_, **__: UnpackedAtLoad, "init": UnpackedAtLoad, "verify": lambda *_, **__: None}
    for module, names in _CHOICES.items():
        found = import_module(module)
        for name in names:
            assert hasattr(found, name), f"{module}.{name}"
            setattr(found, name, stand_ins[name.partition("_")[0]])


def source_of(method: Any, layer: Any) -> Source | None:
    """How a layer for which vLLM has chosen a method holds its weight; None for what nobody has read."""
    by = layer.scheme if _name(method) == fp8.BY_SCHEME else method
    find = _SOURCES.get(_name(by))
    return find(by) if find else None


def _of_codes(multiplied: fp8.Source) -> Source | None:
    """How the matrix lies of a layer whose codes could be multiplied with codes; None for what has not been run."""
    form = {"block": eight.FP8_BLOCK, "channel": eight.FP8}.get(multiplied.shared)
    if form is None or multiplied.online or multiplied.static:
        return None
    return Source(form, lambda layer: (layer.weight.data, getattr(layer, multiplied.scale).data))


def is_absorbed(prefix: str) -> bool:
    """Whether latent attention multiplies with parts of the matrix of the layer of that name."""
    return prefix.endswith(_ABSORBED) and bool(patch_points.CURRENT_CONFIG.get()().model_config.use_mla)


def _name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _plain_methods() -> tuple[type[Any], ...]:
    return patch_points.LINEAR_METHOD.get(), patch_points.EMBEDDING_METHOD.get()


def is_plain(method: object) -> bool:
    """Whether a method multiplies with a layer's weight as it is, or as it was unpacked."""
    return type(method) in _plain_methods() or getattr(method, "unpacks", False)


@functools.cache
def _method_of(base: type[Any]) -> type[Any]:
    """The method that unpacks, of vLLM's class for plain weights that ours computes."""

    class UnpackingMethod(base):
        """A layer's method that makes its weight of what is loaded; ``as_matrix`` also where a kernel reads that."""

        unpacks = True

        def __init__(self, packed: Any, source: Source, as_matrix: bool = False) -> None:
            super().__init__()
            self.packed, self.source, self.as_matrix = packed, source, as_matrix
            self._names: tuple[str, ...] = ()
            """Of the parameters that the checkpoint has."""
            self._dtype = torch.float32

        def create_weights(
            self,
            layer: Any,
            input_size_per_partition: int,
            output_partition_sizes: list[int],
            input_size: int,
            output_size: int,
            params_dtype: torch.dtype,
            **named: Any,
        ) -> None:
            """vLLM's method: the tensors of the checkpoint. Scales are NaN until they are loaded."""
            of_format, name = self.source.format, fp8.layer_name(layer)
            _check_groups(layer, of_format, input_size_per_partition, input_size)
            if of_format is eight.FP8_BLOCK:
                fp8.check_blocks(name, input_size_per_partition, input_size, output_partition_sizes, output_size)
            if of_format.storage[0] == fp8.E4M3:
                named["weight_loader"] = fp8.checking(named["weight_loader"], name)
            before, self._dtype = set(layer._parameters), params_dtype
            sizes = input_size_per_partition, output_partition_sizes, input_size, output_size
            self.packed.create_weights(layer, *sizes, params_dtype=params_dtype, **named)
            made = {name: layer._parameters[name] for name in layer._parameters if name not in before}
            self._names = tuple(made)
            for name, parameter in made.items():
                if parameter.is_floating_point() and not parameter.is_meta:
                    parameter.data.fill_(torch.nan)
                if name == self.source.uncounted:
                    parameter.weight_loader_numel = 0

        def process_weights_after_loading(self, layer: Any) -> None:
            """vLLM's method."""
            if all(name in layer._parameters for name in self._names):
                self._unpack(layer)
            super().process_weights_after_loading(layer)

        def _unpack(self, layer: Any) -> None:
            stored, of_format = self.source.stored(layer), self.source.format
            if flaw := of_format.flaw(stored):
                raise NotCovered(
                    f"weights of {fp8.layer_name(layer)} as {of_format.name}: {flaw}",
                    "they stand for no matrix",
                    "serve a checkpoint that is whole",
                )
            assert of_format.is_stored_as(stored, self._dtype), (of_format.name, [part.dtype for part in stored])
            for name in self._names:
                if name != self.source.uncounted:
                    del layer._parameters[name]
            for name, tensor in self._kept(layer, stored).items():
                layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
                layer._parameters[name].weight_loader = functools.partial(_refuse_plain, fp8.layer_name(layer))
            _unpacked.add(layer)

        def _kept(self, layer: Any, stored: tuple[torch.Tensor, ...]) -> dict[str, torch.Tensor]:
            """What a layer multiplies with: what is stored, where a kernel reads that, or the matrix."""
            codes, of_format = stored[0], self.source.format
            k = codes.shape[1] * of_format.packing
            if not self.as_matrix and reads_as_stored(of_format, k, self._dtype, codes.device):
                scales = [f"packed_{name.replace(' ', '_')}" for name in of_format.names[1:]]
                kept = beside(layer)
                kept.b_format, kept.scales = of_format, tuple(scales)
                return dict(zip(["weight", *scales], stored, strict=True))
            weight = codes.new_empty(len(codes), k, dtype=self._dtype)
            assert of_format.decode is not None
            return {"weight": of_format.decode(stored, weight)}

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            """vLLM's method."""
            if beside(layer).b_format is None:
                return super().apply(layer, x, bias)
            k_slices = linear.spec_of_layer(layer, bias).k_slices
            return linear.multiply(layer, x, spec_of(bias is not None, k_slices, beside(layer).b_format), bias)

        def tie_weights(self, layer: Any, embed_tokens: Any) -> Any:
            """vLLM's method."""
            raise NotCovered(
                f"a quantised {fp8.layer_name(layer)} that is tied to the embedding",
                "one of the two would have the other's weight",
                fp8.REMEDY,
            )

    UnpackingMethod.__qualname__ = f"Unpacking{base.__name__}"
    patch_points.LOADERS.get().append(UnpackingMethod.__name__)
    return UnpackingMethod


def _check_groups(layer: Any, of_format: Format, k: int, whole: int) -> None:
    """Refuse a layer of which a worker has no whole groups."""
    if k % of_format.group == 0:
        return
    workers = f", of which each of {whole // k} workers has {k}" if k != whole else ""
    raise NotCovered(
        f"groups of {of_format.group} for the {whole} inputs of {fp8.layer_name(layer)}{workers}",
        "they are not cut into whole groups",
        "pass a smaller --tensor-parallel-size, or serve a checkpoint with smaller groups",
    )


def _refuse_plain(name: str, *_: object, **__: object) -> None:
    """Stands as the loader of a weight that was unpacked."""
    raise NotCovered(
        f"weights of {name} that are not quantised as its checkpoint's",
        "they would be rounded to 16 bits by another rule",
        "send weights in the format of the checkpoint",
    )


def expect(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Have layers take weights that a trainer loads beside vLLM's own ways of reloading, and that are not what they
    multiply with: a layer that has all of its tensors again is unpacked, or quantised. Returns those that did not wait
    for any.
    """
    layers = [layer for layer in _layers_of(model) if not _is_loading(layer)]
    for layer in layers:
        patch_points.RELOAD.get()(layer)
    return layers


def take_back(layers: Iterable[torch.nn.Module]) -> None:
    """Give those layers their tensors back for which nothing came that decides them."""
    for layer in layers:
        info = patch_points.RELOAD_STATE.get()(layer)
        if info.can_load() and info.load_numel == 0:
            patch_points.PLACE_BACK.get()(layer, info)
            info.reset()


def check_loaded(model: torch.nn.Module) -> None:
    """Refuse to compute with layers of which a trainer has loaded a part.

    Raises:
        NotCovered: the first such layer.
    """
    for layer in filter(_is_loading, _layers_of(model)):
        info = patch_points.RELOAD_STATE.get()(layer)
        raise NotCovered(
            f"a part of the weights of {fp8.layer_name(layer)}",
            f"{info.load_numel} of {info.load_numel_total} elements were loaded before a step",
            "load whole layers before the next request",
        )


def _layers_of(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    if not _unpacked and not fp8.quantised_here:
        return iter(())
    return (layer for layer in model.modules() if layer in _unpacked or layer in fp8.quantised_here)


def _is_loading(layer: torch.nn.Module) -> bool:
    return patch_points.RELOAD_STATE.get()(layer).can_load()

"""vLLM's linear layers whose weights and activations are FP8 (e4m3), with the operations in the place of its methods.

vLLM makes a layer's tensors, loads and shards them. Codes and scales stay as the checkpoint has them, the only copy:
shards of a fused layer keep their own scales, and no scale is rounded. Where vLLM would quantise weights of 16 bits
while it loads them, ours does, each shard by itself.
"""

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch

from ... import envs
from ...errors import NotCovered
from ...ops import dispatch
from ...ops.dispatch import module_for
from ...ops.linear import LinearReduction
from ...ops.quantise import E4M3, QuantiseReduction, quantise
from ...ops.quantise.weights import quantise_weight
from ...ops.scaled_linear import GROUP, ScaledLinearReduction, prepare, scaled_linear
from ..parallel import tensor_tree
from ..reviews import patch_points
from . import deep_gemm

REMEDY = "serve a checkpoint in one of the formats of docs/coverage.md, or the unquantised model"
_NAN = 0x7F
"""The code of NaN, but for its sign."""
_CHECKED_ROWS = 4096
"""Rows of a weight in which NaN is looked for at a time."""
_SHARDS = "batch_invariant_shards"
"""Buffer of a layer whose shards have a scale each: the shard of each row."""
_WHOLE = "serve a checkpoint that is whole"
_SCALES = torch.float32, torch.bfloat16, torch.float16
"""Dtypes of scales that fp32 holds."""

quantised_here: WeakSet[torch.nn.Module] = WeakSet()
"""Layers of this process whose codes were made of what was loaded."""


@dataclass(frozen=True)
class Source:
    """How layers of one class of vLLM's methods or schemes hold weights, and what they are given.

    Attributes:
        shared: what of a weight has one scale: a "tensor" (a shard of a fused layer), a "channel" (a row) or a "block"
            of :data:`GROUP` x :data:`GROUP`.
        scale: the name of the parameter that has these scales.
        static: whether what a layer is given has a given scale; if not, a row has its own, or with blocks a group.
        online: whether weights of 16 bits are quantised while they are loaded.
    """

    shared: str
    scale: str = "weight_scale"
    static: bool = False
    online: bool = False

    @property
    def group(self) -> int | None:
        """Elements of a row with one scale; None: the row."""
        return GROUP if self.shared == "block" else None

    @property
    def follows_width(self) -> bool:
        """Whether a part of a row has other codes than the whole."""
        return self.shared != "block" and not self.static


def _of_fp8(method: Any) -> Source | None:
    if getattr(method, "is_scale_e8m0", False):
        return None
    if not method.block_quant:
        return Source("tensor", static=method.act_q_static)
    return Source("block", "weight_scale_inv") if _are_sides(method.weight_block_size) else None


def _of_scheme(scheme: Any) -> Source | None:
    shared = str(getattr(scheme.strategy, "value", scheme.strategy))
    if shared not in ("tensor", "channel", "block") or (shared == "block" and not _are_sides(scheme.weight_block_size)):
        return None
    return Source(shared, static=bool(scheme.is_static_input_scheme))


def _of_online(shared: str, scale: str = "weight_scale") -> Callable[[Any], Source | None]:
    def of(method: Any) -> Source | None:
        return None if method.requantization_source is not None else Source(shared, scale, online=True)

    return of


def _are_sides(block: Any) -> bool:
    return list(block or ()) == [GROUP, GROUP]


def _of_modelopt(method: Any) -> Source | None:
    return _OF_MODELOPT.get((type(method.wkey).__name__, type(method.akey).__name__))


_QUANTIZATION = "vllm.model_executor.layers.quantization"
BY_SCHEME = f"{_QUANTIZATION}.compressed_tensors.compressed_tensors.CompressedTensorsLinearMethod"
"""vLLM's method that leaves all to a layer's scheme."""
_SCHEME = f"{_QUANTIZATION}.compressed_tensors.schemes.compressed_tensors_w8a8_fp8"
_BY_KEYS = f"{_QUANTIZATION}.modelopt.ModelOptLinearMethod"
"""ModelOpt's, which leaves all to how weights and activations are coded, also in FP4."""
_OF_MODELOPT = {
    ("KFp8StaticTensor", "KFp8StaticTensor"): Source("tensor", static=True),
    ("KFp8StaticChannel", "KDynamicNoParam"): Source("channel"),
    ("KFp8Block128", "KDynamicNoParam"): Source("block"),
}
"""By its classes of the codes of weights and of activations."""
_SOURCES: dict[str, Callable[[Any], Source | None]] = {
    f"{_QUANTIZATION}.fp8.Fp8LinearMethod": _of_fp8,
    _BY_KEYS: _of_modelopt,
    f"{_SCHEME}.CompressedTensorsW8A8Fp8": _of_scheme,
    f"{_QUANTIZATION}.online.fp8.Fp8PerTensorOnlineLinearMethod": _of_online("tensor"),
    f"{_QUANTIZATION}.online.fp8.Fp8PtpcOnlineLinearMethod": _of_online("channel"),
    f"{_QUANTIZATION}.online.fp8.Fp8PerBlockOnlineLinearMethod": _of_online("block", "weight_scale_inv"),
}
"""By vLLM's methods of linear layers, and by schemes of compressed-tensors."""
CHOICES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((f"{_QUANTIZATION}.fp8", _SCHEME, f"{_QUANTIZATION}.online.fp8"), ("init_fp8_linear_kernel",)),
    f"{_QUANTIZATION}.modelopt": ("init_fp8_linear_kernel", "init_nvfp4_linear_kernel"),
}
"""Functions by which these choose one of vLLM's kernels."""


def source_of(method: Any, layer: Any) -> Source | None:
    """How a layer for which vLLM has chosen a method holds FP8 that is multiplied with FP8; None: it does not.

    Raises:
        NotCovered: blocks or scales that nobody has tested, or an output head.
    """
    by = layer.scheme if _name(type(method)) == BY_SCHEME else method
    find = _SOURCES.get(_name(type(by)))
    if find is None or (find is _of_modelopt and not type(method.wkey).__name__.startswith("KFp8")):
        return None
    source = find(by)
    name = layer_name(layer)
    if source is None:
        raise NotCovered(f"FP8 weights of {name} in other blocks or scales", "nobody has compared them", REMEDY)
    if not isinstance(layer, patch_points.LINEAR_LAYER.get()):
        raise NotCovered(f"an output head in FP8, {name}", "nobody has compared it", REMEDY)
    return source


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def layer_name(layer: Any) -> str:
    """Of a layer, in messages."""
    return getattr(layer, "prefix", "") or getattr(layer, "layer_name", "") or type(layer).__name__


def method_of(method: Any, source: Source) -> Any:
    """The method that computes a layer, in the place of vLLM's."""
    return _method()(method, source)


def computes(layer: Any) -> bool:
    """Whether a layer is computed by ours."""
    return patch_points.METHOD_BASE.is_there() and type(getattr(layer, "quant_method", None)) is _method()


def quantises(layer: Any) -> QuantiseReduction:
    """How a layer of ours quantises what it is given."""
    return QuantiseReduction.of_dtype(layer.params_dtype, E4M3, layer.quant_method.source.group)


def reductions(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
    """Those of a model's layers that are computed by ours, by names; and of linear layers beside these, by theirs.

    Args:
        dtype: of activations.
    """
    found: dict[str, Any] = {}
    for layer in filter(computes, model.modules()):
        source, weight = layer.quant_method.source, layer.weight
        found |= reductions_of(source, weight.shape[1], dtype, weight)
    if found:
        kind, device = patch_points.LINEAR_LAYER.get(), weight.device.type
        beside = (layer for layer in model.modules() if isinstance(layer, kind) and not computes(layer))
        for layer in (layer for layer in beside if not getattr(layer.quant_method, "as_matrix", False)):  # nobody calls
            found |= reductions_beside(layer_name(layer), layer.output_size, layer.input_size, dtype, device)
    return found


def reductions_of(source: Source, k: int, dtype: torch.dtype, weight: torch.Tensor) -> dict[str, Any]:
    """Those of a layer with K inputs, by names, on the device of a weight.

    Raises:
        NotCovered: a device without products of e4m3.
    """
    kind = f"FP8 by {source.shared}" + ", given scales" * source.static
    mma = module_for("scaled_linear", weight.device.type).mma_of(weight)
    of_product = ScaledLinearReduction.of(k, dtype, E4M3, source.group is not None, mma)
    return {
        f"quantise ({kind})": QuantiseReduction.of_dtype(dtype, E4M3, source.group),
        f"linear ({kind})": of_product,
    }


def reductions_beside(name: str, n: int, k: int, dtype: torch.dtype, device_type: str) -> dict[str, Any]:
    """That of a linear layer [N, K] which is not in FP8 where others are, by its name."""
    return {f"linear ({name})": LinearReduction.of_device(device_type, n, k, dtype)}


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
    source: Source,
    given: torch.Tensor | None = None,
    k_slices: int = 1,
    weight_is_constant: bool = False,
) -> torch.Tensor:
    """Quantises x and multiplies it with a weight of codes, as a layer does.

    Args:
        x: [..., K] fp32, bf16 or fp16.
        weight: [N, K] e4m3.
        weight_scale: fp32, of each row [N], or with blocks [ceil(N / 128), ceil(K / 128)].
        bias: [N] of x's dtype, or None.
        source: how the layer holds its weight.
        given: one fp32 number, the scale of x, if that is static.
        k_slices: parts of K whose products are rounded, and added as a tree.
        weight_is_constant: as of :func:`..scaled_linear.scaled_linear`.

    Returns:
        [..., N] of x's dtype.
    """
    codes, scales = quantise(x, given, codes=E4M3, group=source.group)
    operands = codes, scales, weight, weight_scale
    if k_slices == 1:
        return scaled_linear(*operands, bias, x.dtype, weight_is_constant=weight_is_constant)
    in_blocks = source.shared == "block"
    dims = (-1, -1 if in_blocks else None, 1, 1 if in_blocks else None)
    slices = [
        [one] * k_slices if dim is None else one.chunk(k_slices, dim) for one, dim in zip(operands, dims, strict=True)
    ]
    parts = [scaled_linear(a, of_a, b, of_b, None, x.dtype) for a, of_a, b, of_b in zip(*slices, strict=True)]
    out = module_for("all_reduce", parts[0].device.type).add_ranks(torch.stack(parts), tree=True)
    return out if bias is None else out + bias


@functools.cache
def _method() -> type[Any]:
    base: Any = patch_points.METHOD_BASE.get()

    class BatchInvariantFp8Method(base):
        """Quantises rows and multiplies codes by the operations."""

        def __init__(self, wrapped: Any, source: Source) -> None:
            super().__init__()
            self.wrapped, self.source, self.k_slices = wrapped, source, 1
            self.uses_meta_device = source.online
            """vLLM's attribute: whether scales come of no checkpoint."""
            self.rows: tuple[int, tuple[int, ...]] | None = None
            """The most of a step, and those of CUDA graphs; None until they are known."""

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
            """vLLM's method: the tensors of the checkpoint. Codes and scales are NaN until they are loaded."""
            name, k = layer_name(layer), input_size_per_partition
            check_settings(self.source, name)
            if isinstance(layer, patch_points.ROW_PARALLEL.get()):
                self.k_slices = check_slices(tensor_tree.of_layer(layer), k, name, layer.input_size)
            if self.source.shared == "block":
                check_blocks(name, k, input_size, output_partition_sizes, output_size)
            if not self.source.online:
                named["weight_loader"] = checking(named["weight_loader"], name)
            sizes = k, output_partition_sizes, input_size, output_size
            self.wrapped.create_weights(layer, *sizes, params_dtype=params_dtype, **named)
            layer.logical_widths, layer.params_dtype = list(output_partition_sizes), params_dtype
            for parameter in layer.parameters(recurse=False):
                if not self.source.online and not parameter.is_meta:
                    fill_with_nan(parameter.data)

        def process_weights_after_loading(self, layer: Any) -> None:
            """vLLM's method, also for weights that come again."""
            if layer.weight.is_meta:
                return
            if layer.weight.dtype != E4M3:
                self._quantise(layer)
            weight, scale = layer.weight.data, getattr(layer, self.source.scale).data
            name = layer_name(layer)
            check(name, self.source.scale, bool((scale.isfinite() & (scale >= 0)).all()))
            check(name, "weight", not _has_nan(weight))
            if self.source.shared == "tensor" and _SHARDS not in layer._buffers:
                layer.register_buffer(_SHARDS, _rows_of_shards(layer), persistent=False)
            if self.source.static:
                check_given(name, "input_scale", layer.input_scale.data)
                check_shared(name, layer.input_scale.tolist())
            if weight.is_cuda and self.k_slices == 1 and self.rows is None:
                self.rows = _rows_of(patch_points.CURRENT_CONFIG.get()())  # not at hand when weights come again
            if weight.is_cuda:
                deep_gemm.use()
            in_blocks, has_bias = self.source.shared == "block", getattr(layer, "bias", None) is not None
            part = weight[:, : weight.shape[1] // self.k_slices]
            prepare(part, layer.params_dtype, in_blocks, has_bias, *(self.rows or (0, ())))

        def _quantise(self, layer: Any) -> None:
            """Make codes and scales of the weight that is loaded."""
            codes, scale = quantise_weight(
                layer.weight.data,
                self.source.shared,
                layer.logical_widths,
                functools.partial(_over_workers, layer, self.source.shared == "channel"),
            )
            for name, tensor in {"weight": codes, self.source.scale: scale}.items():
                layer.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))
                refuse_unasked(layer._parameters[name], layer_name(layer))
            quantised_here.add(layer)

        def apply(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            """vLLM's method: x [..., K] times the weight."""
            given = layer.input_scale.data[:1] if self.source.static else None
            of_weight = getattr(layer, self.source.scale).data
            if self.source.shared == "tensor":
                of_weight = of_weight.index_select(0, getattr(layer, _SHARDS))
            else:
                of_weight = of_weight.view(-1) if self.source.shared == "channel" else of_blocks(of_weight)
            weight = layer.weight.data  # which no kernel writes meanwhile: one quantises what it is multiplied with
            return multiply(x, weight, of_weight, bias, self.source, given, self.k_slices, weight_is_constant=True)

    patch_points.LOADERS.get().append(BatchInvariantFp8Method.__name__)
    return BatchInvariantFp8Method


def _rows_of(config: Any) -> tuple[int, tuple[int, ...]]:
    sizes = config.compilation_config.cudagraph_capture_sizes
    return config.scheduler_config.max_num_batched_tokens, tuple(sizes or ())


def of_blocks(scales: torch.Tensor) -> torch.Tensor:
    """Scales of blocks as the operations have them, [N, K], of a layer's: ModelOpt stores [N, 1, K, 1]."""
    return scales.flatten(1)


def check_settings(source: Source, name: str) -> None:
    """Refuse what cannot be had beside activations in FP8."""
    if tensor_tree.k_slices() > 1 and source.follows_width:
        raise NotCovered(
            f"{envs.TP_TREE.name} with activations in FP8 that have a scale a row",
            f"what a row of {name} is quantised to follows from the part of the row that a worker has",
            "leave it out, or serve a checkpoint with blocks of 128 x 128 or given scales",
        )
    if dispatch.arithmetic() == "exact":
        raise NotCovered(
            "FP8 weights and activations in exact arithmetic",
            "its integers are of other numbers",
            f"leave {envs.ARITHMETIC.name} out, or serve a checkpoint of which the weights alone are quantised",
        )


def check_slices(slices: int, k: int, name: str, inputs: int) -> int:
    """Parts of a worker's K that are added as a tree, of so many inputs of all workers.

    Raises:
        NotCovered: a group of 128 would be in two of them.
    """
    if slices > 1 and k % (slices * GROUP):
        raise NotCovered(
            f"{envs.TP_TREE.name}={tensor_tree.k_slices()} for the {inputs} inputs of {name} in FP8",
            f"they cannot be cut into so many parts of whole groups of {GROUP}",
            "take a smaller tree, or leave it out",
        )
    return slices


def check_blocks(name: str, k: int, whole_k: int, outputs: list[int], whole_outputs: int) -> None:
    """Refuse a layer of which a worker, or a fused layer, has parts of blocks.

    Args:
        name: of the layer.
        k: inputs that this worker has.
        whole_k: of all workers.
        outputs: of each of the layers that it is merged of, that this worker has.
        whole_outputs: of all of them and all workers.
    """
    inputs_are_cut, outputs_are_cut = k != whole_k, sum(outputs) != whole_outputs
    cut = outputs if outputs_are_cut else outputs[:-1]
    odd = next((size for size in cut if size % GROUP), None)
    if inputs_are_cut and k % GROUP:
        odd = k
    if odd is None:
        return
    of_workers = inputs_are_cut or outputs_are_cut
    raise NotCovered(
        f"blocks of {GROUP} x {GROUP} of {name}, of which {'a worker' if of_workers else 'a part'} has {odd}",
        "a block would have two scales",
        "pass a smaller --tensor-parallel-size" if of_workers else "serve a checkpoint with a scale a row",
    )


def checking(load: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A loader of a layer's tensors that takes codes for codes alone."""

    signature = inspect.signature(load)

    @functools.wraps(load)
    def checked(*arguments: Any, **named: Any) -> Any:
        parameter, loaded_weight = [*signature.bind(*arguments, **named).arguments.values()][:2]
        if loaded_weight.dtype not in ((E4M3,) if parameter.dtype == E4M3 else _SCALES):
            dtype = str(loaded_weight.dtype).removeprefix("torch.")
            raise NotCovered(
                f"{'weights' if parameter.dtype == E4M3 else 'scales'} of {name} in {dtype}",
                "they would be rounded by another rule",
                "send codes and scales in the format of the checkpoint",
            )
        return load(*arguments, **named)

    return checked


def refuse_unasked(made: Any, name: str) -> None:
    """Have a parameter of the layer ``name``, which was made of what was loaded, take nothing else."""
    made.weight_loader = functools.partial(_refuse_unasked, name)


def _refuse_unasked(name: str, *_: object, **__: object) -> None:
    """Stands as its loader."""
    raise NotCovered(
        f"codes for {name}, whose weights are quantised while they are loaded",
        "its layer makes them",
        "send weights in the format of the checkpoint",
    )


def _over_workers(layer: Any, by_rows: bool, largest: torch.Tensor) -> torch.Tensor:
    """Of a whole matrix, of those of the part that each worker has."""
    shares_k = layer.input_size != layer.input_size_per_partition
    shares_n = not by_rows and layer.output_size != layer.output_size_per_partition
    if shares_k or shares_n:
        group = patch_points.TENSOR_PARALLEL.get().device_group
        torch.distributed.all_reduce(largest, op=torch.distributed.ReduceOp.MAX, group=group)
    return largest


def fill_with_nan(tensor: torch.Tensor) -> None:
    """Have what is never loaded show."""
    if tensor.dtype == E4M3:
        tensor.view(torch.uint8).fill_(_NAN)
    elif tensor.is_floating_point():
        tensor.fill_(torch.nan)


def _has_nan(codes: torch.Tensor) -> bool:
    parts = codes.view(torch.uint8).split(_CHECKED_ROWS)
    return any(bool(((part & _NAN) == _NAN).any()) for part in parts)


def check(name: str, what: str, is_right: bool) -> None:
    """Refuse the layer ``name`` if what it has been given is not right."""
    if not is_right:
        raise NotCovered(
            f"weights of {name} whose {what} is missing, negative or not finite", "they are no numbers", _WHOLE
        )


def check_given(name: str, what: str, scales: torch.Tensor) -> None:
    """Refuse given scales by which nothing can be divided, of the layer ``name``."""
    check(name, what, bool((scales.isfinite() & (scales > 0)).all()))


def check_shared(name: str, scales: Sequence[float]) -> None:
    """Refuse several scales of what the shards of a layer are given."""
    if any(scale != scales[0] for scale in scales):
        raise NotCovered(
            f"several scales for what {name} is given, {list(scales)}",
            "its shards are given the same codes",
            "serve a checkpoint whose query, key and value, and whose gate and up, have one input scale",
        )


def _rows_of_shards(layer: Any) -> torch.Tensor:
    """The shard of each row of a layer's weight, [N] int64."""
    shards = torch.arange(len(layer.logical_widths))
    return shards.repeat_interleave(torch.tensor(layer.logical_widths)).to(layer.weight.device)

"""Experts that a checkpoint stores in four or eight bits, with the operation in the place of vLLM's kernels for them.

A format stands for a matrix (:mod:`...ops.formats`), and what is computed are the products with that matrix; or, where
vLLM quantises activations too, those of codes with codes (:mod:`...ops.scaled_linear`). vLLM's methods load the
checkpoint as ever: their parameters stay the only weights that a trainer writes, in the checkpoint's layout. What
multiplies is made of them, or reads them where they lie.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any

import torch

from ...errors import NotCovered
from ...ops import dispatch
from ...ops.dispatch import module_for
from ...ops.exact.limits import LEAVE_IT
from ...ops.formats.eight import FP8, FP8_BLOCK, SIDE
from ...ops.formats.fp4 import MXFP4, NVFP4
from ...ops.formats.integers import integers
from ...ops.formats.layouts import from_awq, from_compressed_tensors
from ...ops.formats.record import Format
from ...ops.moe import MoeReduction, StoredExperts, of_codes
from ..reviews import schemes
from ..reviews.patch_points import PatchPoint
from . import fp8
from .experts import BatchInvariantExperts, CpuExperts, CudaExperts, PreparedExperts, with_names
from .linear import PreparedWeight

PRODUCTS = ("w13", "w2")
"""What names of parameters begin with: of gate and up, and of down."""
GIVEN = "input_scale"
"""What they end with of a given scale of what a product is given."""
_PARTS = "w1", "w3"
"""vLLM's names of gate and up."""
_CHOSEN = "FusedMoEMethodCls"
"""Where configurations of ModelOpt's keep the class of their method."""
MOE = "vllm.model_executor.layers.quantization"

Stored = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Layout:
    """How a method of vLLM's keeps experts of a checkpoint.

    Attributes:
        method: its class.
        names: of its parameters, behind those of :data:`PRODUCTS`: codes, scales, and zero points or, of NVFP4, scales
            of matrices. Of a method that is made, if that says which.
        format: of a method that is made, and of its layer.
        stored: what that format stores, of the parameters [experts, ...] that there are; it keeps what it can where it
            lies.
        problem: why a method is refused, and what to do; None if it is not.
        asleep: names of the method's module that stand for others while one is made: they choose kernels, or ask what
            kernels can do.
        turned: whether codes lie as [experts, K, N]; a GPU, which reads them where they lie, has the memory turned.
        quantises: whether what layers are given is quantised too, to what their codes are multiplied with.
        is_given: whether that has a given scale, :data:`GIVEN` of each product.
    """

    method: PatchPoint
    names: tuple[str, str, str] | Callable[[Any], tuple[str, str, str]]
    format: Callable[[Any, Any], Format]
    stored: Callable[..., Stored]
    problem: Callable[[Any], tuple[str, str] | None]
    asleep: dict[str, Any]
    turned: bool = False
    quantises: bool = False
    is_given: Callable[[Any], bool] = lambda _: False

    def names_of(self, method: Any) -> tuple[str, str, str]:
        """Of the parameters of a method that is made."""
        return self.names(method) if callable(self.names) else self.names


def _of_all(function: Callable[..., Stored], *parameters: torch.Tensor | None, **named: Any) -> Stored:
    """A function of the parameters of one expert, of those of all."""
    given = [one for one in parameters if one is not None]
    made = [function(*of_one, **named) for of_one in zip(*given, strict=True)]
    return tuple(torch.stack(parts) for parts in zip(*made, strict=True))


def _as_it_lies(_: Any, codes: torch.Tensor, scales: torch.Tensor, zeros: None) -> Stored:
    return codes, scales


def _in_fp8(method: Any, codes: torch.Tensor, scales: torch.Tensor, zeros: None) -> Stored:
    """Scales of matrices [experts] and of gate and up [experts, 2] are those of as many rows."""
    return codes, scales if scales.dim() == 3 else scales.view(len(scales), -1, 1)


def _nvfp4(_: Any, codes: torch.Tensor, scales: torch.Tensor, of_matrices: torch.Tensor) -> Stored:
    """Scales of matrices [experts] and of gate and up [experts, 2] are those of as many rows; vLLM would take that of
    gate for both.
    """
    return codes, scales, of_matrices.view(len(codes), -1, 1)


def _compressed_nvfp4(method: Any, codes: torch.Tensor, scales: torch.Tensor, of_matrices: torch.Tensor) -> Stored:
    """A checkpoint has the reciprocals of the last."""
    return _nvfp4(method, codes, scales, 1.0 / of_matrices)


def _compressed_tensors(method: Any, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Stored:
    if zeros is None:
        return codes, scales
    function = partial(from_compressed_tensors, bits=method.num_bits)
    return codes, scales, _of_all(lambda *of_one: function(*of_one)[2:], codes, scales, zeros)[0]


def _gptq(_: Any, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Stored:
    """Symmetric: vLLM reads no zero point."""
    return codes.transpose(1, 2), scales.transpose(1, 2)


def _awq(_: Any, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> Stored:
    return _of_all(from_awq, codes, scales, zeros)


def _moe_wna16(method: Any, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Stored:
    """Bytes, which vLLM has made of GPTQ's words or AWQ's while it loaded them."""
    words = codes.view(torch.int32)
    if not method.quant_config.has_zp or zeros is None:
        return words, scales
    if method.quant_config.weight_bits == 8:
        return words, scales, zeros
    return words, scales, torch.stack([zeros & 15, zeros >> 4], 2).flatten(1, 2)


def _no_problem(_: Any) -> None:
    return None


def _of_compressed_tensors(method: Any) -> tuple[str, str] | None:
    if getattr(method.weight_quant, "actorder", None) == "group":
        return "quantised in an order of their own (actorder group)", "quantise them with actorder static, or none"
    if method.num_bits not in (4, 8):
        return f"of {method.num_bits} bits", "quantise them to 4 or 8"
    return None


def _of_awq(method: Any) -> tuple[str, str] | None:
    if method.quant_config.zero_point:
        return None
    return "of AWQ without zero points", "quantise them with zero points, or in another format"


def _of_moe_wna16(method: Any) -> tuple[str, str] | None:
    config = method.quant_config
    if config.has_zp and config.linear_quant_method == "gptq":
        return "of GPTQ with zero points", "quantise them symmetrically"
    return None


def _of_nvfp4(method: Any) -> tuple[str, str] | None:
    if schemes.device_multiplies_fp4() and not method.use_a16:
        return "in FP4 on a GPU that multiplies FP4", "serve on a device that does not, or the unquantised model"
    group = getattr(getattr(method, "quant_config", None), "group_size", NVFP4.group)
    if group != NVFP4.group:
        return f"in NVFP4 by groups of {group}", f"quantise them by groups of {NVFP4.group}"
    return None


_TO_BLOCKS = f"serve a checkpoint in blocks of {SIDE} x {SIDE} or with a scale a row, or the unquantised model"


def _of_fp8(method: Any) -> tuple[str, str] | None:
    if method.weight_block_size is not None and list(method.weight_block_size) != [SIDE, SIDE]:
        return "in FP8 of other blocks", _TO_BLOCKS
    if getattr(method.quant_config, "is_scale_e8m0", False):
        return "in FP8 with scales of powers of two", _TO_BLOCKS
    return None


def _of_compressed_fp8(method: Any) -> tuple[str, str] | None:
    of_weight, of_activations = (
        str(getattr(given.strategy, "value", given.strategy)) for given in (method.weight_quant, method.input_quant)
    )
    if of_weight == "channel" or (of_weight == "tensor" and not method.input_quant.dynamic):
        return None  # beside rows vLLM takes no other activations than those with a scale a token
    if list(method.weight_block_size or ()) != [SIDE, SIDE]:
        return "in FP8 with one scale for all tokens of a step, or of other blocks", _TO_BLOCKS
    if not method.input_quant.dynamic or of_activations != "group" or method.input_quant.group_size != SIDE:
        return f"in FP8 whose activations have no scale a group of {SIDE}", "quantise activations by such groups"
    return None


def _of_modelopt_fp8(method: Any) -> tuple[str, str] | None:
    algorithm = method.quant_config.quant_method
    return None if algorithm == "FP8" else (f"in ModelOpt's {algorithm}", "quantise them with its FP8")


def _fp8(method: Any, _: Any) -> Format:
    return FP8 if method.weight_block_size is None else FP8_BLOCK


def no_kernel(point: PatchPoint, kind: str) -> Callable[..., tuple[Any, None]]:
    """Stands for vLLM's choice of a kernel: none, of a kind for which a method leaves sizes as they are."""
    return lambda *_, **__: (getattr(point.get(), kind), None)


def _always(*_: Any, **__: Any) -> bool:
    return True


ORACLES = "vllm.model_executor.layers.fused_moe.oracle"
_INTEGERS = {
    "select_wna16_moe_backend": no_kernel(PatchPoint((f"{ORACLES}.int_wna16",), "WNA16MoEBackend"), "MARLIN"),
    "check_moe_marlin_supports_config": _always,
}
_NVFP4 = {
    "select_nvfp4_moe_backend": no_kernel(PatchPoint((f"{ORACLES}.nvfp4",), "NvFp4MoeBackend"), "EMULATION"),
}
_FP8 = {
    "select_fp8_moe_backend": no_kernel(PatchPoint((f"{ORACLES}.fp8",), "Fp8MoeBackend"), "NONE"),
    "resolve_fp8_moe_weight_block_shape": lambda config, size, *_: (size, None),
}
"""The second would cut the blocks of workers that have none as a whole."""
LAYOUTS = (
    Layout(
        PatchPoint((f"{MOE}.mxfp4",), "GptOssMxfp4MoEMethod"),
        ("weight", "weight_scale", ""),
        lambda method, layer: MXFP4,
        _as_it_lies,
        _no_problem,
        {"select_mxfp4_moe_backend": no_kernel(PatchPoint((f"{ORACLES}.mxfp4",), "Mxfp4MoeBackend"), "NONE")},
    ),
    Layout(
        PatchPoint((f"{MOE}.modelopt",), "ModelOptNvFp4FusedMoE"),
        ("weight", "weight_scale", "weight_scale_2"),
        lambda method, layer: NVFP4,
        _nvfp4,
        _of_nvfp4,
        _NVFP4,
    ),
    Layout(
        PatchPoint(
            (f"{MOE}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w4a4_nvfp4",),
            "CompressedTensorsW4A4Nvfp4MoEMethod",
        ),
        ("weight_packed", "weight_scale", "weight_global_scale"),
        lambda method, layer: NVFP4,
        _compressed_nvfp4,
        _of_nvfp4,
        _NVFP4,
    ),
    Layout(
        PatchPoint(
            (f"{MOE}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_wna16",),
            "CompressedTensorsWNA16MoEMethod",
        ),
        ("weight_packed", "weight_scale", "weight_zero_point"),
        lambda method, layer: _integers(method.num_bits, method.group_size, not method.symmetric),
        _compressed_tensors,
        _of_compressed_tensors,
        _INTEGERS,
    ),
    Layout(
        PatchPoint((f"{MOE}.auto_gptq",), "AutoGPTQMoEMethod"),
        ("qweight", "scales", "qzeros"),
        lambda method, layer: _integers(method.quant_config.weight_bits, method.quant_config.group_size, False),
        _gptq,
        _no_problem,
        _INTEGERS,
        turned=True,
    ),
    Layout(
        PatchPoint((f"{MOE}.auto_awq",), "AutoAWQMoEMethod"),
        ("qweight", "scales", "qzeros"),
        lambda method, layer: _integers(4, method.quant_config.group_size, True),
        _awq,
        _of_awq,
        _INTEGERS,
    ),
    Layout(
        PatchPoint((f"{MOE}.moe_wna16",), "MoeWNA16Method"),
        ("qweight", "scales", "qzeros"),
        lambda method, layer: _integers(
            method.quant_config.weight_bits, getattr(layer, "group_size", 32), method.quant_config.has_zp
        ),
        _moe_wna16,
        _of_moe_wna16,
        _INTEGERS,
    ),
    Layout(
        PatchPoint((f"{MOE}.fp8",), "Fp8MoEMethod"),
        lambda method: ("weight", method.weight_scale_name, ""),
        _fp8,
        _in_fp8,
        _of_fp8,
        _FP8,
        quantises=True,
        is_given=lambda method: method.quant_config.activation_scheme == "static",
    ),
    Layout(
        PatchPoint(
            (f"{MOE}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe_w8a8_fp8",),
            "CompressedTensorsW8A8Fp8MoEMethod",
        ),
        ("weight", "weight_scale", ""),
        _fp8,
        _in_fp8,
        _of_compressed_fp8,
        _FP8,
        quantises=True,
        is_given=lambda method: method.static_input_scales,
    ),
    Layout(
        PatchPoint((f"{MOE}.modelopt",), "ModelOptFp8MoEMethod"),
        ("weight", "weight_scale", ""),
        lambda method, layer: FP8,
        _in_fp8,
        _of_modelopt_fp8,
        _FP8,
        quantises=True,
        is_given=lambda _: True,
    ),
)
"""Every one that is served; what other methods load is refused where their layers are looked at."""


def _integers(bits: int, group: int, zeros: bool) -> Format:
    return integers(bits, None if group == -1 else group, zeros)


class PreparedStoredExperts(PreparedExperts):
    """What the operation on a CPU takes of the experts of one product, made of what the checkpoint stores; that stays
    with the layer.
    """

    def __init__(self, layer: torch.nn.Module, name: str, stored: Callable[[], StoredExperts]) -> None:
        super().__init__(layer, name, remove_weight=False)
        self._stored = stored

    def _make_copy(self, weight: torch.Tensor) -> Any:
        return module_for("moe", "cpu").prepare_experts(self._stored())


class KeptStoredExperts(PreparedWeight):
    """What the operation on a GPU reads of them: tensors of the layer's, and beside them what is no part of those. CUDA
    graphs read it, so that what would let it go makes it again, in its place. Of a format that no kernel reads it is
    the matrices.
    """

    def __init__(self, layer: torch.nn.Module, name: str, stored: Callable[[], StoredExperts]) -> None:
        super().__init__(layer, name, remove_weight=False)
        self._stored = stored
        self._stored_as: StoredExperts | None = None
        """None where matrices are kept."""

    @property
    def experts(self) -> torch.Tensor | StoredExperts:
        """What is kept, as the operation takes it."""
        return self.copy[0] if self._stored_as is None else replace(self._stored_as, tensors=tuple(self.copy))

    def _make_copy(self, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        cuda = module_for("moe", "cuda")
        stored = cuda.as_read(self._stored())
        if not cuda.reads(stored.format, stored.dtype):
            self._stored_as = None
            return (stored.matrices(None if self._copy is None else self._copy[0]),)
        self._stored_as = stored
        if self._copy is None:
            return stored.tensors
        there = {parameter.untyped_storage().data_ptr() for parameter in self._layer.parameters(recurse=False)}
        return tuple(
            new if new.untyped_storage().data_ptr() in there else held.copy_(new)
            for held, new in zip(self._copy, stored.tensors, strict=True)
        )

    def restore(self) -> None:
        """Make it again of the parameters as they are now, if these have a memory now."""
        if self._copy is not None and not getattr(self._layer, self._name).is_meta:
            self.prepare()


class ExpertsAsLoaded:
    """Codes and scales of one product, which the operation reads where vLLM's loaders write them, and a check when they
    have.
    """

    def __init__(self, held: Callable[[], StoredExperts], check: Callable[[StoredExperts], None]) -> None:
        self._held, self._check = held, check

    @property
    def experts(self) -> StoredExperts:
        """Those of now."""
        return self._held()

    copy = experts
    """By the name that prepared weights have."""

    def prepare(self) -> None:
        """Refuse what is no number."""
        self._check(self._held())

    weight_was_loaded = prepare


def make_without_kernel(
    ours: BatchInvariantExperts, method: PatchPoint, asleep: Mapping[str, Any], *arguments: Any, **named: Any
) -> None:
    """Make what stands in the place of a method of vLLM's for quantised experts, as that is made, but for a kernel.

    Args:
        ours: the method is its base behind :class:`BatchInvariantExperts`.
        method: of vLLM.
        asleep: names of its module with what stands for them meanwhile.
        arguments: of the method, as ``named``.

    Raises:
        NotCovered: in exact arithmetic.
    """
    if dispatch.arithmetic() == "exact":
        raise NotCovered("quantised experts in exact arithmetic", "nobody has compared them", LEAVE_IT)
    torch.nn.Module.__init__(ours)
    of_vllm: Any = super(BatchInvariantExperts, ours)
    with with_names(method.module(), asleep):
        of_vllm.__init__(*arguments, **named)
    of_ours: Any = ours
    of_ours.experts_cls = None


class QuantisedExperts(BatchInvariantExperts):
    """What ours has in the place of a method of vLLM's for quantised experts: its first base."""

    layout: Layout

    def __init__(self, *arguments: Any, **named: Any) -> None:
        make_without_kernel(self, self.layout.method, self.layout.asleep, *arguments, **named)
        self.given_of_parts: dict[tuple[int, str], float] = {}
        """Given scales of what gate and up of each expert are given, as they were loaded."""
        if problem := self.layout.problem(self):
            raise NotCovered(f"experts {problem[0]}", "no format of the mode stores them", problem[1])

    def create_weights(
        self,
        layer: Any,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        **others: Any,
    ) -> None:
        """As vLLM's method, for sizes that have whole groups."""
        group = self.layout.format(self, layer).group
        if self.layout.is_given(self):
            others["weight_loader"] = taking_given_scales(others["weight_loader"], self.given_of_parts)
        if self.layout.quantises:
            others["weight_loader"] = fp8.checking(others["weight_loader"], layer.layer_name)
        for what, size in {"inputs": hidden_size, "columns of a worker": intermediate_size_per_partition}.items():
            if size % group:
                raise NotCovered(
                    f"{size} {what} of the experts of {layer.layer_name}",
                    f"the checkpoint has scales of {group} neighbours, and a part of a group has none",
                    "choose another --tensor-parallel-size, or share whole experts with --enable-expert-parallel",
                )
        if self.layout.is_given(self) and layer.moe_config.moe_parallel_config.use_ep:
            raise NotCovered(
                f"given scales of what the experts of {layer.layer_name} are given, by workers with whole experts",
                "a product has the largest of them, which is another one of each worker",
                "leave --enable-expert-parallel out",
            )
        above: Any = super()
        above.create_weights(layer, num_experts, hidden_size, intermediate_size_per_partition, **others)
        if self.layout.quantises or self.layout.format(self, layer) is NVFP4:
            names = *filter(None, self.layout.names_of(self)), *(GIVEN,) * self.layout.is_given(self)
            for name in (f"{product}_{name}" for product in PRODUCTS for name in names):
                fp8.fill_with_nan(getattr(layer, name).data)

    def get_fused_moe_quant_config(self, layer: Any) -> None:
        """None: what vLLM would tell a kernel of its own."""

    def reduction_of(self, layer: Any, dtype: torch.dtype) -> MoeReduction:
        reduction = super().reduction_of(layer, dtype)
        if self.layout.format(self, layer) is NVFP4 and reduction.activation == "swigluoai":
            raise NotCovered(
                f"experts of {layer.layer_name} in NVFP4 with the activation {reduction.activation}",
                "rows of gate and up come in turn, and each of the two has a scale of its matrix",
                "serve the checkpoint in MXFP4, or the unquantised model",
            )
        if not self.layout.quantises:
            return reduction
        in_blocks = self.layout.format(self, layer) is FP8_BLOCK
        return of_codes(reduction, getattr(layer, self.names[0]).data, in_blocks)

    def stored(self, layer: Any, product: str) -> StoredExperts:
        """What the format stores of a product, of the layer's parameters as they are now.

        Raises:
            NotCovered: numbers that stand for none.
        """
        made = self.held(layer, product)
        self.check(layer, product, made)
        return made

    def held(self, layer: Any, product: str) -> StoredExperts:
        """The same without a look at the numbers."""
        names = self.layout.names_of(self)
        parameters = (getattr(layer, f"{product}_{name}", None) if name else None for name in names)
        tensors = self.layout.stored(self, *(None if one is None else one.data for one in parameters))
        return StoredExperts(self.layout.format(self, layer), tensors, layer.params_dtype)

    def given(self, layer: Any) -> tuple[torch.Tensor, ...]:
        """Of each expert one, of which the largest counts, as in vLLM: a token has the same codes for all experts."""
        is_given = self.layout.is_given(self)
        return tuple(getattr(layer, f"{product}_{GIVEN}").data for product in PRODUCTS) if is_given else ()

    def check(self, layer: Any, product: str, made: StoredExperts) -> None:
        """Refuse numbers that stand for none."""
        refuse_flaw(made, f"{product} of {layer.layer_name}")
        if self.layout.quantises:
            scale = f"{product}_{self.layout.names_of(self)[1]}"
            fp8.check(layer.layer_name, scale, bool((made.tensors[1] >= 0).all()))
        if self.layout.is_given(self):
            fp8.check_given(layer.layer_name, name := f"{product}_{GIVEN}", getattr(layer, name).data)
            if product == PRODUCTS[0]:
                fp8.check_shared(f"an expert of {layer.layer_name}", odd_scales(self.given_of_parts))

    def process_weights_after_loading(self, layer: Any) -> None:
        """As that of experts that are not quantised."""
        if (eight := getattr(self, "input_dtype", None)) is not None and eight.itemsize == 1:
            raise NotCovered(
                f"activations in {str(eight).removeprefix('torch.')} for the experts of {layer.layer_name}",
                "their scales are another reduction",
                "unset VLLM_MARLIN_INPUT_DTYPE",
            )
        if not getattr(layer, self.names[0]).is_meta:
            _leave_out_unloaded_biases(layer)
            self.prepare(layer, layer.params_dtype)

    @property
    def names(self) -> list[str]:
        """Of the codes of both products."""
        return [f"{product}_{self.layout.names_of(self)[0]}" for product in PRODUCTS]

    def of_products(self, layer: Any, kind: Callable[..., Any]) -> tuple[Any, ...]:
        """What a kind of prepared weights is of both products; where activations are quantised nothing is prepared."""
        if self.layout.quantises:
            kinds = ((partial(self.held, layer, of), partial(self.check, layer, of)) for of in PRODUCTS)
            return tuple(ExpertsAsLoaded(*of) for of in kinds)
        named = zip(self.names, PRODUCTS, strict=True)
        return tuple(kind(layer, name, partial(self.stored, layer, product)) for name, product in named)


class QuantisedCpuExperts(QuantisedExperts, CpuExperts):
    """On a CPU."""

    def copies_of(self, layer: Any) -> tuple[PreparedExperts, ...]:
        return self.of_products(layer, PreparedStoredExperts)


class QuantisedCudaExperts(QuantisedExperts, CudaExperts):
    """On a GPU."""

    kept: tuple[KeptStoredExperts, ...] = ()

    def weights_of(self, layer: Any) -> tuple[Any, Any]:
        gate_up, down = (one.experts for one in self.kept)
        return gate_up, down

    def weights_are_loaded(self, layer: Any) -> None:
        if self.layout.turned:
            for product in PRODUCTS:
                for part in self.layout.names_of(self)[:2]:
                    _turn(getattr(layer, f"{product}_{part}"))
        self.kept = self.kept or self.of_products(layer, KeptStoredExperts)
        for one in self.kept:
            one.prepare()
        super().weights_are_loaded(layer)


def _turn(parameter: torch.nn.Parameter) -> None:
    """Have a parameter [experts, K, N] lie in memory as [experts, N, K]. Who writes it sees no difference."""
    parameter.data = parameter.data.transpose(1, 2).contiguous().transpose(1, 2)


def _leave_out_unloaded_biases(layer: Any) -> None:
    """Of a method that makes some in case the checkpoint has them."""
    if not layer.moe_config.has_bias:
        for product in PRODUCTS:
            if hasattr(layer, name := f"{product}_bias") and name not in layer._loaded_expert_biases:
                layer.register_parameter(name, None)


def taking_given_scales(load: Callable[..., Any], noted: dict[tuple[int, str], float]) -> Callable[..., Any]:
    """A loader of tensors of experts that are all here, which writes given scales itself: vLLM's of compressed-tensors
    refuses another than the one that is there. Those of gate and up, which are one number, it notes by experts and
    vLLM's names of the two.
    """
    signature = inspect.signature(load)

    @wraps(load)
    def loading(*arguments: Any, **named: Any) -> Any:
        given = signature.bind(*arguments, **named).arguments
        if not given["weight_name"].endswith(GIVEN):
            return load(*arguments, **named)
        scale, expert, part = (given[name] for name in ("loaded_weight", "expert_id", "shard_id"))
        given["param"].data[expert] = scale
        if part in _PARTS and not scale.is_meta:
            noted[expert, part] = scale.item()
        return given.get("return_success") or None

    return loading


def odd_scales(noted: Mapping[tuple[int, str], float]) -> tuple[float, ...]:
    """Those of gate and up of the first expert of which they differ; none if they are equal."""
    gate, up = _PARTS
    pairs = ((noted[expert, gate], noted.get((expert, up))) for expert, part in noted if part == gate)
    return next(((of_gate, of_up) for of_gate, of_up in pairs if of_up is not None and of_gate != of_up), ())


def refuse_flaw(made: StoredExperts, name: str) -> None:
    """Refuse numbers of experts that stand for none.

    Raises:
        NotCovered: the first kind of them, and ``name``.
    """
    if flaw := made.format.flaw(made.tensors):
        raise NotCovered(
            f"{made.format.name} with {flaw} ({name})", "no matrix has these elements", "download the checkpoint again"
        )


def install_cpu() -> None:
    """Have every layer of quantised experts that is served computed by ours; in exact arithmetic ours refuse."""
    _install(QuantisedCpuExperts)


def install_cuda() -> None:
    """Have every layer of quantised experts that is served computed by ours; in exact arithmetic ours refuse."""
    _install(QuantisedCudaExperts)


def _install(kind: type[QuantisedExperts]) -> None:
    """Put ours where vLLM's configurations find their methods, under their names, by which vLLM's loaders know them."""
    for layout in LAYOUTS:
        if not layout.method.is_there() or issubclass(method := layout.method.get(), QuantisedExperts):
            continue
        bases, named = (kind, method, torch.nn.Module), {"__module__": __name__, "layout": layout}
        ours = type(method.__name__, bases, named)
        layout.method.put(ours)
        for config in vars(layout.method.module()).values():
            if getattr(getattr(config, _CHOSEN, None), "__name__", "") == method.__name__:
                setattr(config, _CHOSEN, ours)

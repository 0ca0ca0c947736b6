"""vLLM's linear layers whose weights and activations are int8 (compressed-tensors' ``int-quantized``), with the
operations in the place of its kernels.

vLLM makes a layer's tensors, loads and shards them, and asks its list of kernels, in front of which stands ours.
Weights stay as the checkpoint has them, the only copy. Shards of a fused layer keep their own scales: each row of a
weight has one.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ... import envs
from ...errors import NotCovered
from ...ops import dispatch
from ...ops.quantise import quantise
from ...ops.scaled_linear import prepare, scaled_linear
from ..parallel import tensor_tree
from ..reviews import patch_points
from . import fp8

_SHARDS = "batch_invariant_shards"
"""Buffer of a layer whose shards have a scale each: the shard of each row. A copy of their scales would be an old one
where a trainer loads new ones and says nothing.
"""


def install() -> None:
    """Have layers of int8 weights and activations computed by ours."""
    if not patch_points.INT8_KERNELS.is_there():
        return
    scheme = patch_points.INT8_SCHEME.get()
    if getattr(scheme.create_weights, "batch_invariant", False):
        return
    scheme.create_weights = _creating(scheme.create_weights)
    for kernels in patch_points.INT8_KERNELS.get().values():
        kernels.insert(0, _kernel())


def has_scheme(layer: Any) -> bool:
    """Whether a layer is one of int8 weights and activations, as vLLM knows before it makes its tensors."""
    scheme = getattr(layer, "scheme", None)
    return scheme is not None and patch_points.INT8_SCHEME.is_there() and type(scheme) is patch_points.INT8_SCHEME.get()


def computes(layer: Any) -> bool:
    """Whether such a layer, which is there, is computed by ours."""
    return has_scheme(layer) and type(layer.scheme.kernel) is _kernel()


def _creating(original: Callable[..., None]) -> Callable[..., None]:
    """The scheme's method that makes a layer's parameters: what is never loaded shows, and so do shards of a fused
    layer that want what they are given in several scales, of which vLLM keeps the last.
    """

    @functools.wraps(original)
    def create_weights(self: Any, layer: Any, output_partition_sizes: list[int], **named: Any) -> None:
        _check_settings()
        original(self, layer=layer, output_partition_sizes=output_partition_sizes, **named)
        if layer.input_scale is not None:
            scales = torch.empty(len(output_partition_sizes), dtype=torch.float32, device=layer.weight.device)
            parameter = patch_points.SHARD_SCALES.get()
            layer.input_scale = parameter(data=scales, weight_loader=named["weight_loader"])
        for parameter in (layer.weight_scale, layer.input_scale):
            if parameter is not None and not parameter.is_meta:
                parameter.data.fill_(torch.nan)

    vars(create_weights)["batch_invariant"] = True
    return create_weights


def _check_settings() -> None:
    """Refuse what cannot be had beside activations in int8."""
    if tensor_tree.k_slices() > 1:
        raise NotCovered(
            f"{envs.TP_TREE.name} with activations in int8",
            "a row's codes follow from the part of the row that a worker has",
            "leave it out",
        )
    if dispatch.arithmetic() == "exact":
        raise NotCovered(
            "activations in int8 in exact arithmetic",
            "its products are of other integers",
            f"leave {envs.ARITHMETIC.name} out: products of int8 are exact without it",
        )


@functools.cache
def _kernel() -> type[Any]:
    """The kernel for vLLM's lists."""
    base: Any = patch_points.INT8_KERNEL.get()

    class BatchInvariantInt8Kernel(base):
        """Quantises rows and multiplies codes by the operations."""

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            """vLLM's method: whether a device has it."""
            return True, None

        @classmethod
        def can_implement(cls, c: Any) -> tuple[bool, str | None]:
            """vLLM's method: whether a layer is one of its. There is no other to fall back to.

            Raises:
                NotCovered: it is not.
            """
            if not c.input_symmetric:
                raise NotCovered(
                    "activations in int8 with zero points",
                    "the product of codes has none",
                    "serve a checkpoint whose activations are quantised symmetrically",
                )
            return True, None

        def process_weights_after_loading(self, layer: Any) -> None:
            """vLLM's method, also for weights that come again."""
            weight, scale, given, *_ = self._get_layer_params(layer)
            if weight.is_meta:
                return
            fp8.check(layer.prefix, "weight_scale", bool((scale.isfinite() & (scale >= 0)).all()))
            prepare(weight.data, layer.params_dtype)
            if not self.config.is_channelwise and _SHARDS not in layer._buffers:
                layer.register_buffer(_SHARDS, _rows_of_shards(layer), persistent=False)
            if given is not None:
                fp8.check_given(layer.prefix, "input_scale", given)
                fp8.check_shared(layer.prefix, given.tolist())

        def apply_weights(self, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
            """vLLM's method: x [..., K] times the weight."""
            weight, scale, given, *_ = self._get_layer_params(layer)
            of_shards, rows = getattr(layer, _SHARDS, None), scale.data.view(-1)
            rows = rows if of_shards is None else rows.index_select(0, of_shards)
            codes, scales = quantise(x, None if given is None else given.data[:1])
            return scaled_linear(codes, scales, weight.data, rows, bias, x.dtype)

    return BatchInvariantInt8Kernel


def _rows_of_shards(layer: Any) -> torch.Tensor:
    """The shard of each row of a layer's weight, [N] int64."""
    shards = torch.arange(len(layer.logical_widths))
    return shards.repeat_interleave(torch.tensor(layer.logical_widths)).to(layer.weight.device)

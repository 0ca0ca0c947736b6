"""What vLLM's layers of gated delta rules, of Mamba-2's state spaces and of linear attention have in common: a state
that :mod:`...ops.delta_rule` keeps, and in front of it, in most, a convolution.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...ops.causal_conv import ConvReduction, ConvStates
from ...ops.delta_rule import Convolution, DeltaRuleReduction, DeltaStates
from ..reviews import patch_points
from ..reviews.patch_points import PatchPoint
from .state_backend import StateStep, with_one_page

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors of a request's page."""


class Sizes(NamedTuple):
    """Of a layer, of one worker."""

    key_heads: int
    value_heads: int
    key_size: int
    value_size: int
    width: int
    """Taps of the convolution; 0: there is none."""
    drafts: int
    """Of a step, of each request."""
    solve: bool
    """See :class:`...ops.delta_rule.DeltaRuleReduction`."""
    gates: str = "head"
    """See there."""

    @property
    def channels(self) -> int:
        """Of the convolution."""
        return 2 * self.key_heads * self.key_size + self.value_heads * self.value_size

    def reduction(self, dtype: torch.dtype) -> DeltaRuleReduction:
        """Of the rule, with activations of a dtype."""
        return DeltaRuleReduction.of(self.key_size, self.value_size, dtype, self.solve, self.gates)

    def page_bytes(self, dtype: torch.dtype) -> int:
        """Of the rule."""
        reduction = self.reduction(dtype)
        return reduction.page_bytes(self.key_heads, self.value_heads, reduction.rows(self.drafts))

    @property
    def inputs(self) -> Shapes:
        """The shape of the convolution's inputs, with room for drafts; none without one."""
        return ((self.width - 1 + self.drafts, self.channels),) if self.width else ()

    @property
    def shapes_of_model(self) -> Shapes:
        """Where nobody tells the dtype: the bytes of the rule apart from the numbers among them that have the model's
        dtype.
        """
        half, single = (self.page_bytes(dtype) for dtype in (torch.bfloat16, torch.float32))
        numbers = (single - half) // (torch.float32.itemsize - torch.bfloat16.itemsize)
        return (half - numbers * torch.bfloat16.itemsize,), (numbers,), *self.inputs


class Recurrence(NamedTuple):
    """A kind of these layers.

    Attributes:
        name: of a reduction.
        layer: vLLM's.
        calculated: how the names of vLLM's methods begin that say what its states are.
        backend: vLLM's name of what tells the layer of a step.
        told_by: the class of ours in its place.
        sizes: of a layer.
        of_model: the same of what vLLM's method for shapes is given.
        forward: vLLM's method.
        needed: what else vLLM must have.
        methods: other methods of the layer.
        convolves: whether the layer has a convolution.
    """

    name: str
    layer: PatchPoint
    calculated: str
    backend: str
    told_by: str
    sizes: Callable[[Any], Sizes]
    of_model: Callable[..., Sizes]
    forward: Callable[..., torch.Tensor | None]
    needed: tuple[PatchPoint, ...]
    methods: dict[str, Callable[..., Any]]
    convolves: bool = True

    def install(self) -> None:
        """Register the layer as the out-of-tree form of vLLM's, what tells it where the states of a step are, and what
        these states are. A vLLM that lacks one of the places keeps its own, which is refused when a model is loaded.
        """
        if not all(point.is_there() for point in (self.layer, *_NEEDED, *self.needed)):
            return
        methods: dict[str, Any] = {
            "get_state_shape": lambda layer: self._state_shape(layer),
            "get_state_dtype": lambda layer: (torch.uint8, layer.model_config.dtype)[: self._tensors],
            # A state within a step of prefill is not kept: vLLM ends the step where a page ends instead.
            "get_prefill_checkpoint_alignment": lambda _: None,
            "get_kv_cache_spec": lambda layer, vllm_config: self._pages(layer, vllm_config),
        }
        patch_points.replace_layer(self.layer.get(), "BatchInvariant", self.forward, **methods | self.methods)
        shapes, dtypes, copies = (
            point.get() for point in (patch_points.STATE_SHAPES, patch_points.STATE_DTYPES, patch_points.STATE_COPIES)
        )
        setattr(shapes, f"{self.calculated}_state_shape", staticmethod(self._shapes_of_model))
        setattr(dtypes, f"{self.calculated}_state_dtype", staticmethod(self._dtypes_of_model))
        # States are read by positions, so a page is copied as it is.
        copied = (patch_points.COPY_WHOLE_STATE.get(),) * self._tensors
        setattr(copies, f"{self.calculated}_state_copy_func", staticmethod(lambda: copied))
        kind = patch_points.MAMBA_BACKENDS.get()[self.backend]
        patch_points.REGISTER_BACKEND.get()(kind, self.told_by, is_mamba=True)

    @property
    def _tensors(self) -> int:
        """Of a request's page."""
        return 1 + self.convolves

    def _state_shape(self, layer: Any) -> Shapes:
        """Of a request's page: the bytes of the rule, and the inputs of the convolution."""
        sizes = self.sizes(layer)
        return (sizes.page_bytes(layer.model_config.dtype),), *sizes.inputs

    def _shapes_of_model(self, *args: Any, **named: Any) -> Shapes:
        """In the place of vLLM's, which says how large a page is."""
        return self.of_model(*args, **named).shapes_of_model

    def _dtypes_of_model(self, dtype: Any, *_: Any) -> tuple[torch.dtype, ...]:
        """The dtypes of :attr:`Sizes.shapes_of_model`, whatever a user or a checkpoint says of states."""
        named = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        return (torch.uint8, named, named)[: 1 + self._tensors]

    def _pages(self, layer: Any, vllm_config: Any) -> Any:
        return with_one_page(self.layer.get().get_kv_cache_spec(layer, vllm_config))

    def states(self, layer: Any, step: StateStep, dtype: torch.dtype) -> tuple[DeltaStates, DeltaRuleReduction]:
        """What the operation is given of a layer of this kind for a step."""
        sizes = self.sizes(layer)
        reduction = sizes.reduction(dtype)
        held = step.states_of(layer.kv_cache[0], DeltaStates)
        return replace(held, rows=reduction.rows(sizes.drafts)), reduction

    def certify(self, model: torch.nn.Module) -> None:
        """Compare on a GPU how steps of a model's layers are computed, once for layers of one shape.

        Raises:
            NotCovered: a token has other bits by decode than by prefill.
        """
        if not self.layer.is_there():
            return
        from ...ops.delta_rule.certificate import certify

        layers = (layer for layer in model.modules() if isinstance(layer, self.layer.get()))
        shapes = dict.fromkeys(
            (self.sizes(layer), layer.model_config.dtype, next(layer.parameters()).device) for layer in layers
        )
        for sizes, dtype, device in shapes:
            certify(sizes.key_heads, sizes.value_heads, sizes.reduction(dtype), sizes.drafts, device)

    def reductions(self, model: torch.nn.Module, dtype: torch.dtype) -> dict[str, Any]:
        """Those of a model's layers, by name, with activations of a dtype."""
        if not self.layer.is_there():
            return {}
        return self.reductions_of(
            [self.sizes(layer) for layer in model.modules() if isinstance(layer, self.layer.get())], dtype
        )

    def reductions_of(self, layers: Sequence[Sizes], dtype: torch.dtype) -> dict[str, Any]:
        """The same of layers of these sizes."""
        rules = dict.fromkeys(sizes.reduction(dtype) for sizes in layers)
        found: dict[str, Any] = {
            f"convolution of {width} taps": ConvReduction.of(width, dtype, False)
            for width in sorted({sizes.width for sizes in layers} - {0})
        }
        return found | {f"{self.name} {number}": rule for number, rule in enumerate(rules, 1)}


_NEEDED = (
    *(patch_points.MAMBA_BACKENDS, patch_points.MAMBA_PAGES, patch_points.COPY_WHOLE_STATE),
    *(patch_points.STATE_SHAPES, patch_points.STATE_DTYPES, patch_points.STATE_COPIES),
)


def convolution(layer: Any, step: StateStep) -> Convolution:
    """What projections [tokens, channels] of a step pass first in a layer."""
    return convolution_of(layer, layer.conv1d.weight, layer.conv1d.bias, step)


def convolution_of(layer: Any, weight: torch.Tensor, bias: torch.Tensor | None, step: StateStep) -> Convolution:
    """The same of a weight [channels, 1, taps]."""
    return Convolution(weight.view(len(weight), -1), bias, step.states_of(layer.kv_cache[1], ConvStates))

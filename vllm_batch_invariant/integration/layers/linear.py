"""vLLM's unquantised linear layers and output embeddings, with the operation in their place."""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple
from weakref import WeakSet

import torch

from ...errors import NotCovered
from ...ops.dispatch import module_for
from ...ops.exact.definition import segments
from ...ops.formats import PLAIN
from ...ops.linear import MatmulSpec, prepare, torch_op
from ...ops.linear.spec import PRODUCT, SWIGLU, spec_of
from ..parallel import tensor_tree
from ..reviews import patch_points
from ..side_table import beside

_CERTIFIED = 1024
"""Rows of a weight, or less than twice as many, whose products a certificate compares: a tile has at most 64 of them.
"""

_prepared: WeakSet["PreparedWeight"] = WeakSet()


class PreparedWeight:
    """A layer's weight, with a copy that was prepared once for GEMMs (on a CPU in another order, of the same size).

    A layer has either its weight or the copy: the weight is let go when it is prepared, and comes back, with the same
    bits, before anybody may write it. Then the next GEMM prepares it again.

    Args:
        layer: that has the weight.
        name: of the weight.
        remove_weight: whether nothing else reads the weight, so that it need not stay.
    """

    def __init__(self, layer: torch.nn.Module, name: str = "weight", remove_weight: bool = True) -> None:
        self._layer, self._name, self._remove_weight = layer, name, remove_weight
        self._emptied: torch.nn.Parameter | None = None
        """The layer's weight, if it was let go."""
        self._copy: Any = None
        """None until it is prepared."""
        _prepared.add(self)

    @property
    def copy(self) -> Any:
        """What :meth:`_make_copy` makes of the weight."""
        if self._copy is None:
            self.prepare()
        return self._copy

    def _make_copy(self, weight: torch.Tensor) -> Any:
        """What GEMMs read of the weight, in memory of its own where the weight is let go."""
        raise NotImplementedError

    def _make_weight(self, copy: Any) -> torch.Tensor:
        """The weight of which a copy was made."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Take the weight as it is now."""
        weight = getattr(self._layer, self._name)
        with torch.inference_mode(False), torch.no_grad():  # what is made in a step must be writable outside of it
            self._copy = self._make_copy(weight)
            if self._remove_weight:
                self._emptied = weight
                weight.data = torch.empty(0, dtype=weight.dtype)

    def restore(self) -> None:
        """Let the copy go, and give the layer its weight back if that was let go."""
        if self._copy is None:
            return
        if self._emptied is not None:
            self._emptied.data = self.as_loaded()
            self._emptied = None
        self._copy = None

    def let_go(self, weight: torch.Tensor) -> bool:
        """Whether it has the only copy of a weight."""
        return self._emptied is weight

    def as_loaded(self) -> torch.Tensor:
        """The weight that was let go, made of the copy, with its bits and dtype."""
        assert self._copy is not None
        assert self._emptied is not None
        with torch.inference_mode(False), torch.no_grad():
            return self._make_weight(self._copy)

    def weight_was_loaded(self) -> None:
        """Called when vLLM has loaded the layer again: into its own weight, or into another that it copies there."""
        if getattr(self._layer, self._name) is not self._emptied:
            self.restore()


class PreparedLinear(PreparedWeight):
    """A layer's GEMM with its weight [N, K]; stands as its ``cpu_linear``."""

    def __init__(self, layer: torch.nn.Module, remove_weight: bool) -> None:
        super().__init__(layer, remove_weight=remove_weight)
        self._k_slices = tensor_tree.of_layer(layer)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return module_for("linear", "cpu").prepared_linear(x, self.copy, bias, self._k_slices)

    def _make_copy(self, weight: torch.Tensor) -> Any:
        return module_for("linear", "cpu").prepare_weight(weight)

    def _make_weight(self, copy: Any) -> torch.Tensor:
        return copy.weight()


class ExactLinear(PreparedWeight):
    """A layer's product in exact arithmetic; stands as its ``cpu_linear``. The copy has not all bits of the weight. A
    row-parallel layer gets a partial sum, which it finishes.

    Raises:
        NotCovered: the workers have no whole segments of K.
    """

    def __init__(self, layer: torch.nn.Module, remove_weight: bool = False) -> None:
        super().__init__(layer, remove_weight=False)
        self._shared, workers = isinstance(layer, patch_points.ROW_PARALLEL.get()), getattr(layer, "tp_size", 1)
        self._parts = 1
        if self._shared:
            parts = segments(layer.input_size, shared=True)
            if parts % workers:
                raise NotCovered(
                    f"{workers} workers for the {layer.input_size} inputs of {layer.prefix} in exact arithmetic",
                    f"they are added as {parts} segments",
                    "serve it with one worker",
                )
            self._parts = parts // workers

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from ...ops.exact.cpu import ExactWeight, linear, partial_linear

        mine = ExactWeight(*self.copy)
        return partial_linear(x, mine) if self._shared else linear(x, mine, bias)

    def _make_copy(self, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        from ...ops.exact.cpu import prepare

        made = prepare(weight, self._parts)
        self._check_scale(made.scale)
        return made.integers, made.scale

    def _check_scale(self, scale: torch.Tensor) -> None:
        if not bool(torch.isfinite(scale).all()):
            raise NotCovered(
                f"weights of {getattr(self._layer, 'prefix', 'the output head')} that are not finite",
                "exact arithmetic has no integers for them",
                "serve a checkpoint without infinities and NaN",
            )


class ExactCudaLinear(ExactLinear):
    """The same on a GPU, by one worker, for a whole sum with its bias. CUDA graphs read the copy, so it stays where it
    is: what would let it go makes it again, in its place.
    """

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        from ...ops.exact.cuda import ExactWeight, linear

        return linear(x, ExactWeight(*self.copy), bias)

    def _make_copy(self, weight: torch.Tensor) -> Sequence[torch.Tensor]:
        from ...ops.exact.cuda import prepare

        made = prepare(weight, self._parts)
        self._check_scale(made.scale)
        if self._copy is None:
            _certify(*weight.shape, self._shared, weight.device)
            return made.digits, made.scale
        for held, new in zip(self._copy, (made.digits, made.scale), strict=True):
            held.copy_(new)
        return self._copy

    def restore(self) -> None:
        """Make the copy again of the weight as it is now, if it has a memory now."""
        if self._copy is not None and not getattr(self._layer, self._name).is_meta:
            self.prepare()


@cache
def _certify(n: int, k: int, shared: bool, device: torch.device) -> None:
    """Compare products for a weight [N, K] on a GPU with integers, once for all layers of that shape."""
    from ...ops.exact.cuda import certify

    certify(_CERTIFIED + n % _CERTIFIED if n > _CERTIFIED else n, k, shared, device)


def restore_weights() -> None:
    """Give every layer of this process its weight back, so that it can be read and written; and on a GPU, where layers
    have it, take it as it is now.
    """
    for prepared in list(_prepared):
        prepared.restore()


def as_loaded(weight: torch.Tensor) -> torch.Tensor:
    """A weight of this process as it was loaded, also where its layer has only the copy, which stays."""
    holder = next((prepared for prepared in list(_prepared) if weight.numel() == 0 and prepared.let_go(weight)), None)
    return weight if holder is None else holder.as_loaded()


def dispatch(layer: torch.nn.Module, remove_weight: bool, kind: Any = PreparedLinear) -> None:
    """Give a layer whose weight is loaded its GEMM; stands for vLLM's own choice among packed and oneDNN kernels.

    ``remove_weight`` says that nothing else reads the original; ``kind`` is the class of what multiplies.
    """
    found = getattr(layer, "cpu_linear", None)
    if isinstance(found, PreparedLinear):
        found.weight_was_loaded()
    elif layer.weight.is_meta or layer.weight.ndim != 2:
        layer.cpu_linear = torch.nn.functional.linear
    else:
        # by a head's weight, of which ModelOpt's says the same, an embedding may look up: the head does not know
        is_head = isinstance(layer, patch_points.VOCABULARY_LAYER.get())
        layer.cpu_linear = kind(layer, remove_weight and not is_head)
        layer.cpu_linear.prepare()


def install_cpu(kind: type[PreparedWeight] = PreparedLinear) -> None:
    """Put the operation in the place of vLLM's function of that purpose on a CPU."""
    patch_points.CPU_GEMM.put(partial(dispatch, kind=kind))


def install_cuda() -> None:
    """Put the operation in the place of vLLM's functions of that purpose on a GPU."""
    patch_points.CUDA_LINEAR.put(torch_op.linear)
    patch_points.CUDA_EMBEDDING.put(torch_op.linear)
    for method in (patch_points.LINEAR_METHOD.get(), patch_points.EMBEDDING_METHOD.get()):
        _prepare_after_loading(method)
    if tensor_tree.k_slices() > 1:
        _multiply_as_prepared(patch_points.LINEAR_METHOD.get())


def install_exact_cuda() -> None:
    """Have layers on a GPU multiply in exact arithmetic."""
    for method in (patch_points.LINEAR_METHOD.get(), patch_points.EMBEDDING_METHOD.get()):
        _multiply_exactly(method)


def _multiply_exactly(method: type[Any]) -> None:
    process = method.process_weights_after_loading

    def process_weights_after_loading(self: object, layer: torch.nn.Module) -> None:
        process(self, layer)
        if layer.weight.is_meta or layer.weight.ndim != 2:
            return
        kept = beside(layer)
        kept.exact = kept.exact or ExactCudaLinear(layer)
        kept.exact.prepare()

    def apply(self: object, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return beside(layer).exact(x, layer.weight, bias)

    method.process_weights_after_loading, method.apply = process_weights_after_loading, apply


def _prepare_after_loading(method: type[Any]) -> None:
    """Have the schedules of each weight's GEMMs chosen and verified as soon as the weight is there.

    Nothing is kept of the weight itself: when it is loaded again, one with the same layout finds its schedules.
    """
    process = method.process_weights_after_loading

    def process_weights_after_loading(self: object, layer: torch.nn.Module) -> None:
        if hasattr(layer, "base_layer"):  # a layer with adapters, which shows the method of the one within
            return
        process(self, layer)
        if layer.weight.is_cuda and layer.weight.ndim == 2:
            kept = beside(layer)
            if kept.expected is None:  # later, who loads weights need not have vLLM's configuration at hand
                kept.expected = _expected(layer, patch_points.CURRENT_CONFIG.get()())
            prepare(layer.weight, *kept.expected)

    method.process_weights_after_loading = process_weights_after_loading


def _multiply_as_prepared(method: type[Any]) -> None:
    """Have layers add K in the slices that they were prepared for; those with one compute as ever."""
    original = method.apply

    def apply(self: object, layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        spec = spec_of_layer(layer, bias)
        if spec.k_slices == 1:
            return original(self, layer, x, bias)
        return multiply(layer, x, spec, bias)

    method.apply = apply


def multiply(layer: Any, x: torch.Tensor, spec: MatmulSpec, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What ``spec`` says of a layer on a GPU, with its weight as it is stored; a bias is added behind a tree."""
    added_last = spec.k_slices > 1 and bias is not None
    scales = [getattr(layer, name) for name in beside(layer).scales]
    out = torch_op.linear(x, layer.weight, None if added_last else bias, spec.name, scales)
    return out + bias if added_last else out


class _Expected(NamedTuple):
    """What the weight of a layer on a GPU is prepared for: arguments of :func:`...ops.linear.prepare`.

    Attributes:
        max_m: the most rows of a step.
        spec: what is computed.
        sizes: of CUDA graphs.
        dtype: of activations; None: the weight's.
        repeats: whether a model has many of it.
    """

    max_m: int
    spec: MatmulSpec
    sizes: tuple[int, ...]
    dtype: torch.dtype | None
    repeats: bool = True


def spec_of_layer(layer: torch.nn.Module, bias: torch.Tensor | None) -> MatmulSpec:
    """What a layer computes, with a bias or None: what it was prepared for, if that is more."""
    expected = beside(layer).expected
    spec = PRODUCT if expected is None else expected.spec
    return spec if spec.k_slices > 1 or spec.epilogue.gated else spec_of(bias is not None, 1, spec.b_format)


def _expected(layer: torch.nn.Module, config: Any) -> _Expected:
    adds_bias = getattr(layer, "bias", None) is not None and not getattr(layer, "skip_bias_add", False)
    if tensor_tree.k_slices() > 1 and isinstance(layer, patch_points.ROW_PARALLEL.get()):
        adds_bias = False  # it comes after the root
    sizes = tuple(config.compilation_config.cudagraph_capture_sizes or ())
    kept = beside(layer)
    b_format, dtype = (PLAIN, None) if kept.b_format is None else (kept.b_format, config.model_config.dtype)
    spec = spec_of(adds_bias, tensor_tree.of_layer(layer), b_format)
    if kept.activation:
        spec = MatmulSpec(SWIGLU, 1, b_format)
    repeats = not isinstance(layer, patch_points.VOCABULARY_LAYER.get())
    return _Expected(_max_m(layer, config), spec, sizes, dtype, repeats)


def _max_m(layer: torch.nn.Module, config: Any) -> int:
    """The most rows that a layer multiplies in a step: tokens, or for an output embedding those that are sampled."""
    scheduler = config.scheduler_config
    if isinstance(layer, patch_points.VOCABULARY_LAYER.get()):
        rows = scheduler.max_num_seqs * (1 + config.num_speculative_tokens)
        return min(rows, scheduler.max_num_batched_tokens)
    return scheduler.max_num_batched_tokens

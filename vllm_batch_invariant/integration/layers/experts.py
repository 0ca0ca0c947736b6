"""vLLM's unquantised mixtures of experts, with the operation in their place.

vLLM asks a layer's method either for whole layers, with the logits of the router, or for the experts alone, with routes
that were found elsewhere. Ours takes whole layers in every version, so that what chooses experts is ours, too.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial, wraps
from threading import RLock
from types import ModuleType
from typing import Any

import torch

from ... import envs
from ...errors import NotCovered
from ...ops.dispatch import module_for
from ...ops.formats.record import Format
from ...ops.moe import ExpertAdapters, Experts, MoeReduction, StoredExperts, route
from ...ops.scaled_linear import ScaledLinearReduction
from .. import reviews
from ..parallel import tensor_tree
from ..parallel.collectives import rows_of_all
from ..reviews import patch_points, sources
from ..side_table import beside
from . import deep_gemm
from .fusion import is_watched
from .linear import PreparedWeight


class PreparedExperts(PreparedWeight):
    """Weights [experts, N, K] of a layer's experts, and what the operation makes of them."""

    def _make_copy(self, weight: torch.Tensor) -> Any:
        return module_for("moe", "cpu").prepare_experts(weight)

    def _make_weight(self, copy: Any) -> torch.Tensor:
        return torch.stack([of_expert.weight() for of_expert in copy])


class Router(torch.nn.Module):
    """Chooses the experts of each token: a module, so that whoever looks at modules sees what it gives."""

    capture: Callable[[torch.Tensor], None] | None = None
    """Is given the ids, if requests are told which experts their tokens had."""

    def __init__(self, reduction: MoeReduction, scales: Callable[[], torch.Tensor] | None = None) -> None:
        """
        Args:
            scales: gives a factor of each expert, [num_experts], that a model has; None where all are 1.
        """
        super().__init__()
        self._reduction, self._scales = reduction, scales

    def forward(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See :func:`...ops.moe.route`."""
        weights, ids = route(logits, self._reduction, bias)
        if self._scales is not None:
            weights = weights * self._scales().to(weights.dtype)[ids]
        if self.capture is not None:
            self.capture(ids)
        return weights, ids


class RouterByLogits(Router):
    """Chooses the expert with the largest logit of a token, the first of equal ones, and weights it with the sigmoid of
    that: sigmoids of other logits may be as large.
    """

    def forward(self, logits: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        best, ids = logits.float().max(-1, keepdim=True)
        if self.capture is not None:
            self.capture(ids)
        return best.sigmoid(), ids


class BatchInvariantExperts:
    """What ours has in the place of vLLM's method: its first base."""

    is_monolithic = True
    supports_pre_processed_weights = False
    reduction: MoeReduction | None = None
    """None until the weights are loaded."""
    adapters: Callable[[], ExpertAdapters | None] | None = None
    """Gives the adapters of a step, where experts may have some; None of a step without."""
    __call__: Callable[..., torch.Tensor]
    """vLLM's: calls ``forward``."""

    def __init__(self, moe: Any) -> None:
        above: Any = super(patch_points.EXPERTS_METHOD.get(), self)
        above.__init__(moe)  # vLLM's own would choose a kernel of vLLM's
        self.unquantized_backend = self.experts_cls = None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Prepare the GEMMs of the experts; called again when a trainer has written new weights, also with the layer of
        vLLM's that is around one with adapters.
        """
        layer = getattr(layer, "routed_experts", layer)
        if not layer.w13_weight.is_meta:
            self.prepare(layer, layer.w13_weight.dtype)

    def prepare(self, layer: torch.nn.Module, dtype: torch.dtype) -> None:
        """The same for a layer that has weights, which stand for matrices of a dtype."""
        if self.reduction is None:
            self.reduction = self.reduction_of(layer, dtype)
            if exchanges(layer):
                layer.moe_config.skip_final_all_reduce = True
            if tensor_tree.k_slices() > 1:
                tensor_tree.whole_sums(beside(layer).shared_experts)
            by_logits = _is_by_logits(layer)
            self.router = (RouterByLogits if by_logits else Router)(self.reduction, _scales_of_experts(layer))
        self.weights_are_loaded(layer)

    def reduction_of(self, layer: Any, dtype: torch.dtype) -> MoeReduction:
        """That of a layer whose weights stand for matrices of a dtype."""
        return reduction_of(layer, dtype)

    def weights_of(self, layer: Any) -> tuple[Any, Any]:
        """What the layer has of both products: tensors [experts, N, K], or :class:`...ops.moe.StoredExperts`."""
        return layer.w13_weight, layer.w2_weight

    def weights_are_loaded(self, layer: torch.nn.Module) -> None:
        """Called whenever they are."""
        raise NotImplementedError

    def apply_monolithic(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        router_logits: torch.Tensor,
        input_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """What the experts of this worker make of each token: [tokens, hidden]."""
        weights, ids = self.router(router_logits, layer.e_score_correction_bias)
        if layer.apply_router_weight_on_input:
            x, weights = x * weights.to(x.dtype), torch.ones_like(weights)
        return self(layer, x, weights, ids)

    def summed(self, layer: torch.nn.Module, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        """The same, also where the model's next norm adds it."""
        return self.apply_monolithic(layer, x, router_logits)

    def experts_of(self, layer: Any, gate_up: Any, down: Any) -> Experts:
        """Those of this worker, with weights as the device wants them."""
        assert self.reduction is not None
        biases = getattr(layer, "w13_bias", None), getattr(layer, "w2_bias", None)
        adapters = None if self.adapters is None else self.adapters()
        exchange = rows_of_all if exchanges(layer) else None
        return Experts(gate_up, down, self.reduction, *biases, layer.expert_map, adapters, exchange, self.given(layer))

    def given(self, layer: Any) -> tuple[torch.Tensor, ...]:
        """Scales of what both products are given; none: nothing has given ones."""
        return ()

    @contextmanager
    def without_adapters(self) -> Iterator[None]:
        """A block in which no token has one."""
        adapters, self.adapters = self.adapters, None
        try:
            yield
        finally:
            self.adapters = adapters

    def forward(
        self, layer: torch.nn.Module, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """See :func:`...ops.moe.moe`."""
        raise NotImplementedError


class CpuExperts(BatchInvariantExperts):
    """On a CPU, with copies of the weights that are prepared once."""

    prepared: tuple[PreparedExperts, ...] = ()
    remove_weights = True
    """Whether the copies have all bits of the weights, which need not stay."""

    def weights_are_loaded(self, layer: torch.nn.Module) -> None:
        for weight in self.prepared:
            weight.weight_was_loaded()
        if not self.prepared:
            self.prepared = self.copies_of(layer)
            for weight in self.prepared:
                weight.prepare()

    def copies_of(self, layer: torch.nn.Module) -> tuple[PreparedExperts, ...]:
        """Those of both products, to be prepared."""
        return tuple(PreparedExperts(layer, name, self.remove_weights) for name in ("w13_weight", "w2_weight"))

    def forward(
        self, layer: torch.nn.Module, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        copies = (weight.copy for weight in self.prepared)
        return module_for("moe", "cpu").prepared_moe(x, weights, ids, self.experts_of(layer, *copies))


class ExactExperts(CpuExperts):
    """The same in exact arithmetic."""

    remove_weights = False


class CudaExperts(BatchInvariantExperts):
    """On a GPU, with the weights as vLLM has loaded them. The norm behind the layer may add what the experts give."""

    defers_sum = False
    """Whether it does."""
    max_tokens: int | None = None
    """Of a step, where that was asked for."""
    deferred: Any = None
    """What it adds: of :func:`...ops.moe.cuda.products`."""

    def weights_are_loaded(self, layer: torch.nn.Module) -> None:
        assert self.reduction is not None
        if not_run := _not_run_on_gpus(self.reduction):
            raise NotCovered(
                f"experts of {layer.layer_name} with {not_run} on a GPU",
                "they have not been run there",
                "serve on a CPU",
            )
        for weight in self.weights_of(layer):
            form = weight.format if isinstance(weight, StoredExperts) else None
            of_weight = *weight.shape[1:], weight.dtype, weight.device
            certify(*of_weight, self.reduction.activation, form, self.reduction.products)
        if self.reduction.products is not None and self.max_tokens is None:
            config = patch_points.CURRENT_CONFIG.get()()  # not at hand when weights come again
            self.max_tokens = config.scheduler_config.max_num_batched_tokens
            deep_gemm.use_for_experts()
            experts = self.experts_of(layer, *self.weights_of(layer))
            module_for("moe", "cuda").prepare_library(experts, self.max_tokens)

    def forward(
        self, layer: torch.nn.Module, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor
    ) -> torch.Tensor:
        """Uninitialised where the norm adds, which it does not while somebody looks at what this gives."""
        moe, experts = module_for("moe", "cuda"), self.experts_of(layer, *self.weights_of(layer))
        adds = self.defers_sum and moe.a_norm_may_add(x, experts) and not is_watched(self)
        self.deferred = moe.products(x, weights, ids, experts) if adds else None
        return moe.moe(x, weights, ids, experts) if self.deferred is None else x.new_empty(x.shape)

    def summed(self, layer: torch.nn.Module, x: torch.Tensor, router_logits: torch.Tensor) -> torch.Tensor:
        given, deferred = self.apply_monolithic(layer, x, router_logits), self.take_deferred()
        return given if deferred is None else deferred.added()

    def take_deferred(self) -> Any:
        """What the norm adds, once; None where the sum is there."""
        deferred, self.deferred = self.deferred, None
        return deferred


def _not_run_on_gpus(reduction: MoeReduction) -> str | None:
    """What of a layer no engine on a GPU has been compared with."""
    if envs.starts_untried():
        return None
    if reduction.products is not None and not reduction.is_gated:
        return "products of codes and no gate"
    known = ("silu", "gelu_tanh", "swigluoai", "relu2_no_mul")
    return None if reduction.activation in known else f"the activation {reduction.activation}"


_NAMES = RLock()
"""Held while names of vLLM's modules stand for others."""


@contextmanager
def with_names(module: ModuleType, values: Mapping[str, Any]) -> Iterator[None]:
    """Have names of a module, those that it has, stand for others, for one thread at a time."""
    with _NAMES:
        before = {name: getattr(module, name) for name in values if hasattr(module, name)}
        for name in before:
            setattr(module, name, values[name])
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(module, name, value)


@cache
def certify(
    n: int,
    k: int,
    dtype: torch.dtype,
    device: torch.device,
    activation: str,
    form: Format | None = None,
    products: ScaledLinearReduction | None = None,
) -> int:
    """:func:`...ops.moe.cuda.certify`, once for layers of one shape."""
    return module_for("moe", "cuda").certify(n, k, dtype, device, activation, form, products)


def install_cpu(kind: type[CpuExperts] = CpuExperts) -> None:
    """Have every layer of experts computed by ours, also those without a gate, which vLLM configures on GPUs alone."""
    _install(kind)
    config = patch_points.EXPERTS_CONFIG.get()
    if not hasattr(config.__post_init__, "__wrapped__"):
        config.__post_init__ = _with_or_without_a_gate(config.__post_init__)


class _AsOnGpus:
    """A platform that says it is a GPU's."""

    def __init__(self, platform: Any) -> None:
        self._platform = platform

    def is_cuda_alike(self) -> bool:
        return True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)


def _with_or_without_a_gate(complete: Callable[[Any], None]) -> Callable[[Any], None]:
    """What completes a configuration of experts on a CPU: of those without a gate as on a GPU, where vLLM has kernels
    for them. Nothing else of it asks which platform this is.
    """

    @wraps(complete)
    def __post_init__(config: Any) -> None:  # noqa: N807 - Python's
        module = patch_points.EXPERTS_CONFIG.module()
        names = {} if config.is_act_and_mul else {"current_platform": _AsOnGpus(module.current_platform)}
        with with_names(module, names):
            complete(config)

    return __post_init__


def install_cuda() -> None:
    """Have every layer of experts computed by ours."""
    _install(CudaExperts)


def _install(kind: type[BatchInvariantExperts]) -> None:
    """Register the method as the out-of-tree form of vLLM's, so that every layer of experts is given it instead."""
    method = patch_points.EXPERTS_METHOD.get()
    if method.__name__ not in patch_points.CUSTOM_OP.module().op_registry_oot:
        ours = type(f"BatchInvariant{method.__name__}", (kind, method), {"__module__": __name__})
        method.register_oot(ours, name=method.__name__)
        if tensor_tree.k_slices() > 1:
            _keep_shared_experts()


def _keep_shared_experts() -> None:
    """Have each layer of routed experts know the shared ones, whose sums a tree completes before they are added."""
    runner = patch_points.MOE_RUNNER.get()
    make = runner.__init__

    @wraps(make)
    def __init__(self: Any, *args: Any, **named: Any) -> None:  # noqa: N807 - Python's
        make(self, *args, **named)
        if self.shared_experts is not None:
            beside(self.routed_experts).shared_experts = self.shared_experts

    runner.__init__ = __init__


def install_capture() -> None:
    """Have the second model runner note which experts our routers choose, where it can note any."""
    if patch_points.BIND_CAPTURE.is_there():
        patch_points.BIND_CAPTURE.put(bind_capture)


def bind_capture(model: torch.nn.Module, capturer: Any) -> None:
    """vLLM's function ``bind_routed_experts_capturer``, which takes what computes whole layers for kernels of its own
    that it has to ask.

    Args:
        model: with layers of experts that ours serves.
        capturer: vLLM's ``RoutedExpertsCapturer``: its method ``capture`` copies ids [tokens, top_k] of a layer.

    Raises:
        NotCovered: a model without such layers.
    """
    layers = [part for part in model.modules() if isinstance(part, patch_points.MOE_RUNNER.get())]
    if not layers:
        raise NotCovered("--enable-return-routed-experts of a model without experts", "there are none", "leave it out")
    for layer in layers:
        layer.routed_experts.quant_method.router.capture = partial(capturer.capture, layer.layer_id)


def reductions(model: torch.nn.Module) -> list[MoeReduction]:
    """Those of a model's layers of experts, each once."""
    found: list[Any] = [part.reduction for part in model.modules() if isinstance(part, BatchInvariantExperts)]
    return list(dict.fromkeys(found))


def reduction_of(layer: Any, dtype: torch.dtype | None = None) -> MoeReduction:
    """The reduction of a layer of vLLM's, of the class ``RoutedExperts``.

    Args:
        dtype: of the weights; None: of those that the layer has.

    Raises:
        NotCovered: a router, a scale, an activation or a dtype that is not in the reduction.
    """
    if tensor_tree.k_slices() > 1 and (beside_tree := _not_beside_a_tree(layer)):
        raise NotCovered(f"{envs.TP_TREE.name} with experts of {layer.layer_name} {beside_tree[0]}", *beside_tree[1:])
    objection = _objection(layer)
    if objection:
        raise NotCovered(f"experts of {layer.layer_name}: {objection[0]}", objection[1], "serve another model")
    groups, top_groups = (layer.num_expert_group, layer.topk_group) if layer.use_grouped_topk else (1, 1)
    return MoeReduction(
        num_experts=layer.global_num_experts,
        top_k=layer.top_k,
        dtype=dtype or layer.w13_weight.dtype,
        scoring=layer.scoring_func,
        renormalise=layer.renormalize,
        groups=groups,
        top_groups=top_groups,
        scale=layer.routed_scaling_factor,
        activation=layer.activation.value,
    )


def exchanges(layer: Any) -> bool:
    """Whether workers, each of which has some experts of a layer, give each other the rows of these, so that as many as
    may be have the bits of one.
    """
    return tensor_tree.k_slices() > 1 and layer.moe_config.moe_parallel_config.ep_size > 1


def _not_beside_a_tree(layer: Any) -> tuple[str, str, str] | None:
    """What of a layer's workers is not in the tree, why, and what to do."""
    of_workers = layer.moe_config.moe_parallel_config
    if of_workers.tp_size > 1:
        return (
            "of which workers have parts",
            "what a worker's parts make of a token is no subtree of what the experts make",
            "pass --enable-expert-parallel, or leave it out",
        )
    if of_workers.dp_size > 1 or of_workers.is_sequence_parallel:
        return "by several engines", "their tokens are elsewhere", "leave it out"
    skips = getattr(layer.moe_config, "skip_final_all_reduce", None)
    if skips is None:
        return "by this vLLM", "it adds what workers have made, also where each has the sum", "install vLLM 0.32"
    if skips:
        return "that its model adds up", "each worker would have the whole sum", "leave it out"
    if next(layer.parameters()).is_cuda and not envs.starts_untried():
        return "on a GPU", "no GPU has run it", f"serve on a CPU; {envs.UNTRIED.name}=1 starts it"
    return None


def _objection(layer: Any) -> tuple[str, str] | None:
    """What of a layer is not in the reduction, and why."""
    if layer.custom_routing_function is not None and not (_scales_of_experts(layer) or _is_by_logits(layer)):
        name = getattr(layer.custom_routing_function, "__qualname__", "a function of the model")
        return f"chosen by {name}", "a model's own function may compute anything"
    if (layer.apply_router_weight_on_input or _is_by_logits(layer)) and layer.top_k > 1:
        return "weights are applied to the input of several", "that is not in the reduction"
    settings = {name: getattr(layer, name, None) for name in ("swiglu_limit", "swiglu_alpha", "swiglu_beta")}
    for name, value in settings.items():
        if value is not None:
            return f"{name}={value}", "the activation is defined without it"
    biased = layer.e_score_correction_bias is not None
    if layer.routed_scaling_factor != 1 and not (layer.use_grouped_topk or biased):
        return f"a factor of {layer.routed_scaling_factor}", "vLLM applies none to this kind of router on a CPU"
    return None


_OWN_ROUTING = "Gemma4Router.routing_function"
"""A model's function that chooses experts by softmax, renormalises, and multiplies with a factor of each expert."""
_BY_LOGITS = "Llama4MoE.custom_routing_function"
"""One that chooses the expert with the largest logit, and gives its sigmoid."""


def _scales_of_experts(layer: Any) -> Callable[[], torch.Tensor] | None:
    """What gives these factors of a layer, as its weights are then; None of a layer without such a function, or with
    one that nobody has read.
    """
    if not _is_read(getattr(layer.custom_routing_function, "__func__", None), _OWN_ROUTING):
        return None
    return partial(getattr, layer.custom_routing_function.__self__, "per_expert_scale")


def _is_by_logits(layer: Any) -> bool:
    """Whether the experts of a layer are chosen by :class:`RouterByLogits`."""
    return _is_read(layer.custom_routing_function, _BY_LOGITS)


def _is_read(function: Any, name: str) -> bool:
    """Whether a model's function that chooses experts is the one of a name that somebody has read."""
    is_it = getattr(function, "__qualname__", "") == name and sources.is_read("routing", function)
    return is_it and not sources.unread("routing", sources.installed)


def problem_of_gate(gate: Any) -> str | None:
    """Why a router's layer of vLLM's class ``GateLinear`` is refused; None if it is a matmul like any other."""
    allowed = [name for name, value in vars(gate).items() if name.startswith("allow_") and value is True]
    return f"its matmul follows the number of tokens ({allowed[0]})" if allowed else None


def problem_of(runner: Any) -> str | None:
    """Why a layer of vLLM's class ``MoERunner`` is refused; None if its router, its sums and the linear layers around
    latent experts are known.
    """
    if type(runner.router).__name__ not in reviews.layers().routers:
        return f"its experts are chosen by {type(runner.router).__name__}"
    if getattr(runner.router, "eplb_state", None) is not None:
        return "its experts move between workers"
    if runner.gate is not None and runner.shared_expert_gate is not None:
        return "its router and the gate of its shared expert are one matmul"
    for name in ("routed_input_transform", "routed_output_transform"):
        if type(getattr(runner, name, None)) not in (type(None), patch_points.REPLICATED.get()):
            return f"it has a {name}"
    return None

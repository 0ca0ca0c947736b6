"""What vLLM needs on one device type, and how that is installed. The modules beside this one have a record each, and
so has the module that the record of a device which joined names (:class:`~vllm_batch_invariant.ops.devices.Device`).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ClassVar, Self

from ... import envs
from ...ops.attention import AttentionReduction
from ...ops.devices import Device
from ...ops.exact import FORMAT
from ...version import __version__
from ..engine import encoder_outputs, loading, request_state, resumption, weights
from ..layers import (
    delta_rule,
    encoders,
    int8,
    kda,
    latent,
    lightning,
    mamba2,
    mrope,
    norm,
    pooling,
    quantised,
    review,
    shared_norm,
    short_conv,
)
from ..layers.fusion import Fusion
from ..parallel import tensor_tree
from ..reviews import patch_points
from ..sampling import generators, sampler

MODE_IS_ON = f"Batch-invariant mode is on (vllm-batch-invariant {__version__}); "


@dataclass(frozen=True)
class VllmDevice:
    """A device type of vLLM. The methods are right for a device with vLLM's own worker; others override them. What a
    record does not say that the device has is refused on it.

    Attributes:
        ops: what operations know of it.
        attention_backend: our class of attention backends, as vLLM imports it.
        attention_choices: names of vLLM's attention backends that lead to ours, first its own; others are refused.
        latent_backend: our class of attention backends of latent attention, as vLLM imports it; empty without.
        latent_choices: names of vLLM's attention backends that lead to that, first its own.
        adapters: our class of what layers with LoRA adapters call, as vLLM imports it.
        serving: what serves the operations but attention, for the log.
        execution: how layers run, for the log.
        has_reviewed_config: whether somebody has read every field of the configurations that vLLM has on it.
        copies_weights: whether matmuls read copies of the weights, which go before the weights are written.
        guarantees: of docs/contract.md, that are kept on it.
        tensor_parallel_sizes: numbers of workers above 1 that may share each layer.
        untried_tensor_parallel_sizes: those that :data:`~.envs.UNTRIED` adds.
        pipeline_parallel_sizes: numbers of stages above 1 that a model may be cut into.
        has_data_parallelism: whether several engines may serve one dense model.
        data_parallel_sizes_of_experts: numbers of engines above 1 that may share the experts of one model.
        has_experts: whether mixtures of experts are served.
        has_speculation: whether drafts are verified.
        has_thinking_budgets: whether a thought is counted as vLLM's own runner counts it, which the mode mends.
        has_tree: whether K may be added in slices.
        arithmetic: that its workers compute in.
        fusions: of operations of vLLM's layers.
    """

    ops: Device
    attention_backend: str
    attention_choices: tuple[str, ...]
    latent_backend: str = ""
    latent_choices: tuple[str, ...] = ()
    adapters: str = "vllm_batch_invariant.integration.layers.lora.Adapters"
    serving: str = ""
    execution: str = "Layers are not compiled."
    has_reviewed_config: bool = True
    copies_weights: bool = False
    guarantees: tuple[str, ...] = ("run", "batch", "schedule")
    tensor_parallel_sizes: tuple[int, ...] = ()
    untried_tensor_parallel_sizes: tuple[int, ...] = ()
    pipeline_parallel_sizes: tuple[int, ...] = ()
    has_data_parallelism: bool = False
    data_parallel_sizes_of_experts: tuple[int, ...] = ()
    has_experts: bool = False
    has_speculation: bool = False
    has_thinking_budgets: bool = False
    has_tree: bool = False
    arithmetic: str = "float"
    fusions: tuple[Fusion, ...] = ()
    has_exact_kernels: ClassVar[bool] = False

    def check_build(self) -> None:
        """Refuse a PyTorch that is built for another device of that name.

        Raises:
            NotCovered: it is.
        """

    def install(self, platform: type) -> None:
        """What a process of vLLM needs, of the front end or a worker, before it makes a configuration."""

    def before_platform(self, vllm_config: Any) -> None:
        """Settings that the platform reads when it adjusts a configuration."""

    def kept(self, vllm_config: Any) -> dict[str, dict[str, Any]]:  # of some devices
        """Fields that the platform may change and that stay as they are, by the parts of a configuration."""
        return {}

    def update_config(self, vllm_config: Any) -> None:
        """Settings of the mode, after the platform's: our attention, and layers that are not compiled, because
        compiled ones have no operators left to replace.
        """
        vllm_config.attention_config.backend = self.backend_of(vllm_config)
        if vllm_config.model_config is not None and getattr(vllm_config.model_config, "is_mm_prefix_lm", False):
            # An image that is larger than a step would wait for ever: vLLM refuses it at start-up where this is set.
            vllm_config.scheduler_config.disable_chunked_mm_input = True
        compilation = vllm_config.compilation_config
        compilation.mode = patch_points.COMPILATION_MODE.get().NONE
        if compilation.cudagraph_mode != patch_points.CUDAGRAPH_MODE.get().NONE:
            self.update_graphs(vllm_config)
        compilation.custom_ops = ["all"] + [
            op for op in compilation.custom_ops if op not in ("all", "none") and not op.startswith("-")
        ]

    def update_graphs(self, vllm_config: Any) -> None:
        """Which steps are CUDA graphs, where the user has not asked for none."""
        vllm_config.compilation_config.cudagraph_mode = patch_points.CUDAGRAPH_MODE.get().NONE

    def after_platform(self, vllm_config: Any) -> None:
        """Settings that the platform would have overwritten."""

    def install_worker(self) -> frozenset[str]:
        """Put the operations where vLLM's layers and samplers call them, in a worker, before the model is built.

        Returns:
            ATen operators that another library has made batch-invariant, and that are left to it.

        Raises:
            NotCovered: a device or a vLLM that is not covered.
        """
        sampler.install(self.ops.type)
        generators.install()
        request_state.install()
        resumption.install_in_worker()
        encoder_outputs.install_in_worker()
        self.install_linear()
        self.install_collectives()
        if tensor_tree.k_slices() > 1:
            tensor_tree.install(tensor_tree.with_bias)
        norm.install()
        shared_norm.install()
        mrope.install()
        encoders.install()
        latent.install()
        pooling.install()
        short_conv.install()
        delta_rule.RECURRENCE.install()
        mamba2.RECURRENCE.install()
        lightning.RECURRENCE.install()
        kda.RECURRENCE.install()
        int8.install()
        quantised.install()
        for fusion in self.fusions:
            fusion.install()
        worker = patch_points.DEVICE_WORKER.get()
        loading.hook(worker, self.before_loading, self.after_loading)
        weights.watch(worker)
        return frozenset()

    def before_loading(self) -> None:
        """What a worker does before it loads a model."""

    def after_loading(self, worker: Any) -> None:
        """What a worker does with a model that it has loaded.

        Raises:
            NotCovered: a layer that nobody has read.
        """
        encoders.prepare(worker.get_model())
        latent.prepare(worker.get_model())
        review.check(worker.get_model())
        encoders.clear_before_each_step(worker.get_model())
        is_quantised = worker.vllm_config.model_config.quantization is not None
        weights.watch_loading(worker.get_model(), is_quantised)
        for fusion in self.fusions:
            fusion.fuse_in(worker)

    def install_linear(self) -> None:
        """Put the matmul where vLLM's linear layers, embeddings and experts call it."""

    def install_collectives(self) -> None:
        """Put the all-reduce where vLLM's layers call it."""

    def compile_kernels(self) -> None:
        """Compile what would have the first requests wait, with the mode on."""

    def attention_reduction(self) -> AttentionReduction:
        """The reduction of attention that is in force."""
        return AttentionReduction.of_device(self.ops.type, envs.ATTENTION.read())

    def summary(self, external_ops: Iterable[str]) -> list[str]:  # of a device that leaves some
        """What serves each operation, and what may be relied on; for the log.

        Args:
            external_ops: of :meth:`install_worker`.
        """
        seed = envs.SEED.read()
        unseeded = ", sampling without a seed."
        if seed != envs.SEED.values[0]:
            unseeded = f". A request without a seed gets one made of itself and {envs.SEED.name}={seed}."
        return [
            f"{MODE_IS_ON}vLLM's own mode of that name is not used.",
            f"{self.served_by()} {self.execution}",
            "Same bits for a request run again, in any batch, under any schedule (chunks, prefix cache, preemption, "
            f"restart) {self.where()}{unseeded}",
        ]

    def served_by(self) -> str:
        """What serves each operation, for the log."""
        chosen = envs.ATTENTION.read()
        attention = self.ops.attention if chosen == "auto" else chosen
        return f"{self.serving} Attention: {attention}, {self.attention_reduction()}."

    def where(self) -> str:
        """Where the bits stay the same and what may differ, for the log."""
        return f"on this {self.machine()}. Not covered: other hardware, other thread counts"

    def machine(self) -> str:
        """On what the bits stay the same, for the log."""
        return f"kind of {self.ops.type}"

    def info(self) -> dict[str, str | int]:
        """The device of this process, as far as bits depend on it."""
        return {"type": self.ops.type}

    def versions(self) -> dict[str, str]:
        """Versions of libraries that only this device uses, as far as bits depend on them."""
        return {}

    @property
    def is_exact(self) -> bool:
        """Whether its workers compute in exact arithmetic."""
        return self.arithmetic == "exact"

    @property
    def adds_as_tree(self) -> bool:
        """Whether what workers share is added as a tree."""
        return self.is_exact or tensor_tree.k_slices() > 1

    def engine_settings(self, vllm_config: Any) -> dict[str, str]:
        """Settings of vLLM's that decide bits, some on this device only."""
        if tree := tensor_tree.setting():  # bits then follow from it, and not from the number of workers
            return tree
        parallel, found = vllm_config.parallel_config, {}
        if parallel.tensor_parallel_size > 1:
            found["tensor_parallel_size"] = str(parallel.tensor_parallel_size)
            found |= {"expert_parallel": "on"} if getattr(parallel, "enable_expert_parallel", False) else {}
        if parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe:  # each has a part of every expert
            found["data_parallel_size"] = str(parallel.data_parallel_size)
        return found

    @property
    def backend(self) -> type[Any]:
        """The class that :attr:`attention_backend` names."""
        module, _, name = self.attention_backend.rpartition(".")
        return getattr(import_module(module), name)

    @property
    def vllm_backend(self) -> Any:
        """The member of vLLM's enumeration of attention backends that stands for ours."""
        return patch_points.BACKENDS.get()[self.attention_choices[0]]

    def latent_backends(self) -> list[Any]:
        """The members that stand for that of latent attention, first its own; a version may lack some."""
        of_vllm = patch_points.BACKENDS.get().__members__
        return [of_vllm[name] for name in self.latent_choices if name in of_vllm]

    def backend_of(self, vllm_config: Any) -> Any:
        """The member that a model's layers get."""
        model, latent_backends = vllm_config.model_config, self.latent_backends()
        is_latent = model is not None and model.use_mla and latent_backends
        return latent_backends[0] if is_latent else self.vllm_backend


class ExactDevice(VllmDevice):
    """What differs where workers compute in exact arithmetic: the first base of a device's class for it."""

    has_exact_kernels = True

    @classmethod
    def of(cls, device: VllmDevice, serving: str) -> Self:
        """The record beside that of a device, whose sums of integers are computed by ``serving``. Its attention backend
        is the class ``ExactBackend`` beside the device's, and nothing is fused.
        """
        backend = f"{device.attention_backend.rpartition('.')[0]}.ExactBackend"
        guarantees = (*device.guarantees, "hardware")
        others = {"attention_backend": backend, "guarantees": guarantees, "serving": serving, "fusions": ()}
        return cls(**(vars(device) | others | {"arithmetic": "exact"}))

    def attention_reduction(self) -> AttentionReduction:
        return AttentionReduction.of_device(self.ops.type, "exact")

    def served_by(self) -> str:
        return f"Exact arithmetic {FORMAT}: sums of integers, {self.serving}."

    def where(self) -> str:
        return "on every machine. Not covered: infinities, NaN"

    def engine_settings(self, vllm_config: Any) -> dict[str, str]:
        return {}

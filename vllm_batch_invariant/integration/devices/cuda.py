"""vLLM on an NVIDIA GPU: steps stay CUDA graphs."""

import logging
import os
from typing import Any

import torch

from ... import envs
from ...errors import NotCovered
from ...ops import dispatch
from ...ops.attention import AttentionReduction
from ...ops.common.gpu import Gpu
from ...ops.devices import DEVICES
from ...ops.linear import settle
from ..engine import adapters, cuda_graphs, draft_graphs
from ..layers import (
    activation,
    code_fusion,
    delta_rule,
    exact,
    experts,
    kda,
    lightning,
    linear,
    mamba2,
    norm_fusion,
    norm_rotary,
    online_experts,
    quantised_experts,
)
from ..parallel import collectives
from ..reviews import patch_points, ran
from ..sampling import exact_sampler, sampler
from .record import ExactDevice, VllmDevice
from .refusal import not_covered

logger = logging.getLogger("vllm.batch_invariant")
FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"
_COLLECTIVES = {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""No memory for an all-reduce of vLLM's that ours replaces, and no sums in the switch."""

_RAN_EXACTLY = (9, 0)
"""The compute capability on which engines of exact arithmetic had a CPU's bits."""
_FLEX_TILE = AttentionReduction.of_device("cuda", "flex").key_tile


class Cuda(VllmDevice):
    """An NVIDIA GPU, which either of vLLM's model runners may serve."""

    def check_build(self) -> None:
        """ROCm's PyTorch calls its devices "cuda", too."""
        if torch.version.hip is not None:
            raise not_covered("rocm")

    def install(self, platform: type) -> None:
        """Have vLLM sample with its own kernels: FlashInfer's serve a batch only while none of its requests has a seed.

        Raises:
            NotCovered: the user asks for FlashInfer's.
        """
        os.environ |= _COLLECTIVES
        if os.environ.setdefault(FLASHINFER_SAMPLER, "0") != "0":
            raise NotCovered(
                "FlashInfer's sampler", "it serves some batches and not others", f"set {FLASHINFER_SAMPLER}=0"
            )

    def update_config(self, vllm_config: Any) -> None:
        _check_pages(vllm_config)
        super().update_config(vllm_config)
        vllm_config.parallel_config.disable_custom_all_reduce = True  # and no memory for it
        scheduler = vllm_config.scheduler_config
        if vllm_config.speculative_config and not vllm_config.use_v2_model_runner and scheduler.async_scheduling:
            # For min_tokens it counts rejected drafts, too, unless a neighbour's penalties have the number corrected.
            logger.info("The first model runner verifies drafts without async scheduling.")
            scheduler.async_scheduling = False
        if getattr(vllm_config.model_config, "runner_type", None) == "pooling" and scheduler.async_scheduling:
            # What all tokens gave may be the memory of a CUDA graph, which the next step writes.
            logger.info("Models pool without async scheduling.")
            scheduler.async_scheduling = False

    def update_graphs(self, vllm_config: Any) -> None:
        """A step stays one CUDA graph: of decode, and in vLLM's second model runner any other that fits one, if
        attention is not FlexAttention's.
        """
        compilation, modes = vllm_config.compilation_config, patch_points.CUDAGRAPH_MODE.get()
        if getattr(vllm_config.model_config, "architecture", "") in ran().chunked_models:
            # vLLM's backend for chunks says that it has none, and an engine that asks for them ends.
            logger.info("Layers that see a token's own chunk run without CUDA graphs.")
            compilation.cudagraph_mode = modes.NONE
            return
        if not vllm_config.use_v2_model_runner or envs.ATTENTION.read() == "flex":
            compilation.cudagraph_mode = modes.FULL_DECODE_ONLY
            return
        scheduler = vllm_config.scheduler_config
        # One with adapters or drafts has several graphs of each size.
        alone = vllm_config.lora_config is None and vllm_config.speculative_config is None
        captured = cuda_graphs.sizes(
            compilation.cudagraph_capture_sizes or [],
            scheduler.max_num_seqs,
            cuda_graphs.most_tokens_of_a_step(vllm_config),
            1 + vllm_config.num_speculative_tokens,
            cuda_graphs.largest_size(cuda_graphs.weights_of_layer(vllm_config) if alone else None),
        )
        compilation.cudagraph_mode = modes.FULL
        compilation.cudagraph_capture_sizes = captured
        compilation.max_cudagraph_capture_size = max(captured, default=0)

    def install_worker(self) -> frozenset[str]:
        """As on every device; a GPU that the kernels are not compiled for is refused."""
        self.check_gpu()
        cuda_graphs.install()
        draft_graphs.install()
        delta_rule.install_cuda()
        external_ops = super().install_worker()
        sampler.install_second_runner()
        adapters.install_second_runner()
        return external_ops

    def after_loading(self, worker: Any) -> None:
        """As on every device; products are timed in a row, and the recurrences of a model are compared."""
        super().after_loading(worker)
        if not self.is_exact:
            settle(worker.device)
        for of_layers in (one.RECURRENCE for one in (delta_rule, mamba2, lightning, kda)):
            of_layers.certify(worker.get_model())

    def check_gpu(self) -> None:
        """Refuse a GPU that the kernels are not compiled for."""
        Gpu.of(torch.cuda.current_device())

    def install_linear(self) -> None:
        experts.install_cuda()
        quantised_experts.install_cuda()
        online_experts.install_cuda()
        experts.install_capture()
        linear.install_cuda()
        activation.install_cuda()

    def install_collectives(self) -> None:
        collectives.install_cuda(self.adds_as_tree)
        collectives.refuse_other_sums()

    def machine(self) -> str:
        return "kind of GPU"

    def info(self) -> dict[str, str | int]:
        """The kind of GPU."""
        major, minor = torch.cuda.get_device_capability()
        return {"type": self.ops.type, "name": torch.cuda.get_device_name(), "capability": f"{major}.{minor}"}

    def versions(self) -> dict[str, str]:
        return {"cuda": str(torch.version.cuda)}

    def engine_settings(self, vllm_config: Any) -> dict[str, str]:
        """The model runner: the two draw other noise of a seed."""
        runner = "second" if vllm_config.use_v2_model_runner else "first"
        return super().engine_settings(vllm_config) | {"model_runner": runner}


class ExactCuda(ExactDevice, Cuda):
    """The same in exact arithmetic, where the second model runner's sampler is replaced."""

    def install_worker(self) -> frozenset[str]:
        external_ops = super().install_worker()
        exact_sampler.install()
        exact.refuse_copies_of_pages()
        return external_ops

    def check_gpu(self) -> None:
        super().check_gpu()
        _check_gpu_of_exact_arithmetic()

    def before_loading(self) -> None:
        """While it starts, a worker multiplies ones, to have the libraries take their memory: in floats."""
        dispatch.choose(self.arithmetic)

    def install_linear(self) -> None:
        experts.install_cuda()
        quantised_experts.install_cuda()
        online_experts.install_cuda()
        experts.install_capture()
        exact.install_layers()
        linear.install_exact_cuda()


def _check_gpu_of_exact_arithmetic() -> None:
    """Refuse a GPU of a generation on which nobody has compared exact arithmetic with a CPU's."""
    found = torch.cuda.get_device_capability()
    if found != _RAN_EXACTLY:
        raise NotCovered(
            f"exact arithmetic on a GPU of compute capability {found[0]}.{found[1]}",
            f"its kernels have run on {_RAN_EXACTLY[0]}.{_RAN_EXACTLY[1]} alone",
            f"leave {envs.ARITHMETIC.name} out, or serve on a CPU",
        )


def _check_pages(vllm_config: Any) -> None:
    """Refuse pages that FlexAttention cannot read, if the user chose them."""
    if envs.ATTENTION.read() != "flex":
        return
    size = vllm_config.cache_config.block_size
    if getattr(vllm_config.cache_config, "user_specified_block_size", False) and size % _FLEX_TILE:
        raise NotCovered(
            f"FlexAttention over pages of {size} keys on a GPU",
            f"its kernel takes {_FLEX_TILE} keys at once, from one page",
            f"pass a --block-size that is a multiple of {_FLEX_TILE}, or none",
        )


DEVICE = Cuda(
    DEVICES["cuda"],
    attention_backend="vllm_batch_invariant.integration.layers.attention_cuda.Backend",
    attention_choices=("CUSTOM",),
    latent_backend="vllm_batch_invariant.integration.layers.attention_latent_cuda.LatentBackend",
    latent_choices=("TRITON_MLA",),
    adapters="vllm_batch_invariant.integration.layers.lora_cuda.GpuAdapters",
    serving="Matmuls: K in ascending order, by cuBLASLt and Triton. Norms, softmax, sums: Triton, in a fixed order.",
    execution="Layers are not compiled; steps run in CUDA graphs.",
    tensor_parallel_sizes=(2, 4),
    untried_tensor_parallel_sizes=(8,),
    pipeline_parallel_sizes=(2,),
    has_data_parallelism=True,
    data_parallel_sizes_of_experts=(2,),
    has_experts=True,
    has_speculation=True,
    has_thinking_budgets=True,
    has_tree=True,
    fusions=(
        activation.GATED_MLP,
        norm_rotary.HEAD_NORMS,
        norm_rotary.ROTATIONS,
        norm_rotary.ROTATIONS_BEHIND_STATES,
        code_fusion.WRITING_CODES,
        norm_fusion.ADDING_NORMS,
    ),
)
EXACT = ExactCuda.of(DEVICE, "by Triton")

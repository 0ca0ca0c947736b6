"""Takes the mode over from vLLM: the start-up check in the front end, the operations in the worker."""

import logging
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch

from .. import __version__, envs
from ..errors import NotCovered
from . import coverage, cuda_graphs, endpoint, patch_points, refusals, reviewed, seeds, weights
from .ascend import install as ascend

if TYPE_CHECKING:
    from ..ops.attention import AttentionReduction

logger = logging.getLogger("vllm.batch_invariant")

FLASHINFER_SAMPLER = "VLLM_USE_FLASHINFER_SAMPLER"

_FLEX_TILE = 64

_installed = False


def install() -> None:
    """Hook into this process's vLLM; called by the plugin's entry point when the flag is 1. Idempotent, touches no
    device.

    Raises:
        NotCovered: a vLLM version or device that the plugin does not know.
        BadSetting: a variable with a wrong value.
    """
    global _installed
    if _installed:
        return
    from vllm.platforms import current_platform

    patch_points.check_version()
    refusals.install()
    coverage.check_device(_device_type(current_platform))
    reviewed.check_variables()
    for variable in envs.VARIABLES:
        variable.read()
        patch_points.ENVIRONMENT.get().setdefault(variable.name, variable.read)
    _check_configurations(type(current_platform))
    device_type = current_platform.device_type
    if device_type == "cuda":
        _leave_out_flashinfer_sampler()
    if device_type == "npu":
        ascend.set_deterministic_env()
        ascend.choose_attention(type(current_platform))
    patch_points.REGISTER_BACKEND.get()(_backend(device_type), f"{__package__}.attention_{device_type}.Backend")
    patch_points.INIT_BATCH_INVARIANCE.put(install_worker)
    endpoint.offer_endpoint()
    seeds.install()
    weights.install()
    _installed = True


def _device_type(platform: Any) -> str:
    """What a platform computes on; ROCm's and others say "cuda", too."""
    return platform.device_name if platform.device_type == "cuda" and not platform.is_cuda() else platform.device_type


def _backend(device_type: str) -> Any:
    """The member of vLLM's enumeration of attention backends that stands for ours."""
    return patch_points.BACKENDS.get()[coverage.ATTENTION_CHOICES[device_type][0]]


def _leave_out_flashinfer_sampler() -> None:
    """Have vLLM sample with its own kernels: FlashInfer's serve a batch only while none of its requests has a seed."""
    if os.environ.setdefault(FLASHINFER_SAMPLER, "0") != "0":
        raise NotCovered("FlashInfer's sampler", "it serves some batches and not others", f"set {FLASHINFER_SAMPLER}=0")


def _check_configurations(platform: type) -> None:
    """Run the start-up check before the platform adjusts a configuration, and the mode's own settings after it."""
    adjust = platform.check_and_update_config.__func__

    def check_and_update_config(cls: type, vllm_config: Any) -> None:
        check(vllm_config)
        npu = vllm_config.device_config.device_type == "npu" and vllm_config.model_config is not None
        if npu:
            ascend.before_platform(vllm_config)
        adjust(cls, vllm_config)
        update_config(vllm_config)
        if npu:
            ascend.after_platform(vllm_config)

    platform.check_and_update_config = classmethod(check_and_update_config)
    _check_again(patch_points.CONFIG.get())


def _check_again(kind: type) -> None:
    """Run the start-up check once more when a configuration is complete: vLLM makes a part of it after the platform."""
    complete = kind.__post_init__

    def __post_init__(self: Any) -> None:  # noqa: N807 - vLLM's
        complete(self)
        part = self.model_config is not None and getattr(self.model_config, "is_submodel_config", False)
        if not part and self.device_config.device_type != "npu":
            check(self)

    kind.__post_init__ = __post_init__


def check(vllm_config: Any) -> None:
    """Refuse a configuration that the mode does not cover. vllm-ascend's, on an NPU, has not been reviewed by field.

    Raises:
        NotCovered: a feature that is not covered, or a field that nobody has reviewed and that has not its default.
    """
    coverage.check(vllm_config)
    if vllm_config.model_config is not None and vllm_config.device_config.device_type != "npu":
        reviewed.check(vllm_config)


def update_config(vllm_config: Any) -> None:
    """Settings of the mode: our attention, and layers that are not compiled: compiled ones have no operators left to
    replace. On a GPU a step stays one CUDA graph: of decode, and in vLLM's second model runner any other that fits one,
    if attention is not FlexAttention's.
    """
    _check_pages(vllm_config)
    vllm_config.attention_config.backend = _backend(vllm_config.device_config.device_type)
    compilation = vllm_config.compilation_config
    compilation.mode = patch_points.COMPILATION_MODE.get().NONE
    modes = patch_points.CUDAGRAPH_MODE.get()
    graphs = vllm_config.device_config.device_type == "cuda"
    if compilation.cudagraph_mode != modes.NONE:
        every_step = graphs and vllm_config.use_v2_model_runner and envs.ATTENTION.read() != "flex"
        compilation.cudagraph_mode = modes.FULL if every_step else modes.FULL_DECODE_ONLY if graphs else modes.NONE
        if every_step:
            scheduler = vllm_config.scheduler_config
            captured = cuda_graphs.sizes(
                compilation.cudagraph_capture_sizes or [], scheduler.max_num_seqs, scheduler.max_num_batched_tokens
            )
            compilation.cudagraph_capture_sizes = captured
            compilation.max_cudagraph_capture_size = max(captured, default=0)
    compilation.custom_ops = ["all"] + [
        op for op in compilation.custom_ops if op not in ("all", "none") and not op.startswith("-")
    ]


def _check_pages(vllm_config: Any) -> None:
    """Refuse pages that FlexAttention cannot read on a GPU, if the user chose them."""
    if vllm_config.device_config.device_type != "cuda" or envs.ATTENTION.read() != "flex":
        return
    size = vllm_config.cache_config.block_size
    if getattr(vllm_config.cache_config, "user_specified_block_size", False) and size % _FLEX_TILE:
        raise NotCovered(
            f"FlexAttention over pages of {size} keys on a GPU",
            f"its kernel takes {_FLEX_TILE} keys at once, from one page",
            f"pass a --block-size that is a multiple of {_FLEX_TILE}, or none",
        )


@refusals.relayed
def install_worker() -> None:
    """Install the operations in a worker; stands for vLLM's ``init_batch_invariance``, before the model is built.

    Raises:
        NotCovered: a GPU below compute capability 8.0.
    """
    from vllm.platforms import current_platform

    from ..aten import enable_batch_invariant_mode
    from ..ops.linear import schedule
    from . import linear, norm, norm_rotary, sampling, sampling_seeds

    device_type = current_platform.device_type
    external_ops: frozenset[str] = frozenset()
    if device_type == "npu":
        external_ops = ascend.start_own_mode()
        ascend.replace_norms()
    else:
        if device_type == "cuda":
            schedule.gpu(torch.cuda.current_device())
            cuda_graphs.install()
            norm_rotary.install()
        sampling.install(device_type)
        sampling_seeds.install()
        linear.install(device_type)
        norm.install()
        refusals.install_in_worker(patch_points.DEVICE_WORKER.get())
    endpoint.install()
    weights.install_in_worker(device_type)
    enable_batch_invariant_mode(external_ops)
    if device_type == "cpu":
        compile_kernels()
    for line in summary(device_type, external_ops):
        logger.info(line)


def compile_kernels() -> None:
    """Run each compiled kernel once on next to nothing, so that no request waits for the compiler: 30 s when cold."""
    from ..ops import norm, ranking, softmax, top_k_top_p
    from ..ops.attention import AttentionReduction, paged_attention

    for rows in (1, 1024):  # the kernel for one thread, and the one for many
        x = torch.zeros(rows, 64)
        norm.rms_norm(x, None, 1e-6)
        softmax.log_softmax(softmax.softmax(x))
        torch.sum(x, -1)
        ranking.top_and_ranks(x, 1, torch.zeros(rows, dtype=torch.int64))
        top_k_top_p.top_k_top_p(x, torch.full((rows,), 2), torch.full((rows,), 0.5))
    page = torch.zeros(1, 1, 16, 64)
    one = torch.ones(1, dtype=torch.int32)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    table = torch.zeros(1, 1, dtype=torch.int32)
    choice = {"scale": 1.0, "reduction": AttentionReduction(), "implementation": envs.ATTENTION.read()}
    paged_attention(torch.zeros(1, 1, 64), page, page, table, one, starts, **choice)


def _reduction(device_type: str) -> "AttentionReduction":
    from ..ops.attention import AttentionReduction

    return AttentionReduction.of_device(device_type, envs.ATTENTION.read())


def summary(device_type: str, external_ops: Iterable[str] = ()) -> list[str]:
    """What serves each operation on a device, and what may be relied on; for the log. ``external_ops`` are operators of
    an NPU that stay vllm-ascend's.
    """
    first = f"Batch-invariant mode is on (vllm-batch-invariant {__version__}); "
    if device_type == "npu":
        return [
            f"{first}vllm-ascend's own mode is kept where it has no gap.",
            f"{ascend.summary(external_ops)} Layers are not compiled.",
            "On Ascend NPUs the mode is compiled and simulated, never run on hardware: a request should have the same "
            "bits when it is run again and in any batch; verify that with: vllm-batch-invariant reproduce.",
        ]
    serving = {
        "cpu": "GEMMs: BLAS in fp32 on row tiles of fixed heights. Norms, softmax, sums: numba, in a fixed order.",
        "cuda": "GEMMs: one chain over K in cuBLASLt and Triton. Norms, softmax, sums: Triton, in a fixed order.",
    }[device_type]
    machine = f"machine with {torch.get_num_threads()} threads" if device_type == "cpu" else "kind of GPU"
    seed = envs.SEED.read()
    unseeded = ", sampling without a seed."
    if seed != envs.SEED.values[0]:
        unseeded = f". A request without a seed gets one made of itself and {envs.SEED.name}={seed}."
    return [
        f"{first}vLLM's own mode of that name is not used.",
        f"{serving} Attention: {envs.ATTENTION.read()}, {_reduction(device_type)}. Layers are not compiled"
        + ("; steps run in CUDA graphs." if device_type == "cuda" else "."),
        "Same bits for a request run again, in any batch, under any schedule (chunks, prefix cache, preemption, "
        f"restart) on this {machine}. Not covered: other hardware, other thread counts{unseeded}",
    ]

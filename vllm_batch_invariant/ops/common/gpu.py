"""What schedules know about a GPU, and which GPUs there are kernels for."""

from dataclasses import dataclass
from functools import cache

import torch

from ...errors import NotCovered
from .nvidia_gpus import COMPILED_FOR, FP8_MMA, has_tcgen05


@dataclass(frozen=True)
class Gpu:
    """What a schedule needs to know about a GPU."""

    name: str
    num_sms: int
    shared_memory: int
    """Bytes that one program may have."""
    has_tma: bool
    """Whether the tensor memory accelerator exists."""
    l2_bytes: int
    has_wgmma: bool
    """Whether it is a Hopper: no later GPU has this instruction."""
    has_tcgen05: bool = False
    """Whether tiles have 64 rows or more, so that they have one instruction: see :func:`.nvidia_gpus.has_tcgen05`."""
    fp8_mma: str | None = None
    """What multiplies codes of e4m3, of :data:`.nvidia_gpus.FP8_MMA`; None where nothing does."""

    @staticmethod
    @cache
    def of(index: int) -> "Gpu":
        """The GPU of an index.

        Raises:
            NotCovered: a compute capability that the kernels are not compiled for, or a GPU that is not NVIDIA's.
        """
        found = torch.cuda.get_device_properties(index)
        if torch.version.hip is not None:
            raise NotCovered(found.name, "its kernels were made for NVIDIA GPUs only", "use an NVIDIA GPU or a CPU")
        if found.major < 8:
            raise NotCovered(
                found.name, "its tensor cores have no bf16", "use a GPU of compute capability 8.0 or above"
            )
        capability = found.major, found.minor
        if capability not in COMPILED_FOR:
            listed = ", ".join(f"{major}.{minor}" for major, minor in COMPILED_FOR)
            raise NotCovered(
                f"{found.name} (compute capability {found.major}.{found.minor})",
                "nobody has compiled and checked the kernels for it",
                f"use a GPU of compute capability {listed}",
            )
        return Gpu(
            found.name,
            found.multi_processor_count,
            found.shared_memory_per_block_optin,
            found.major >= 9,
            found.L2_cache_size,
            capability == (9, 0),
            has_tcgen05(found.major),
            FP8_MMA.get(capability),
        )

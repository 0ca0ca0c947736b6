"""vLLM's DeepGEMM for products of e4m3 in blocks, of dense layers and of experts."""

import functools
import os
from collections.abc import Callable
from typing import Any

from ...provenance import installed
from ..reviews import patch_points

_TELLS = ("CUDA_HOME", "CUDA_PATH", "DG_JIT_NVCC_COMPILER", "DG_JIT_USE_NVRTC")
"""Variables that tell DeepGEMM its compiler."""
_SWITCH_OF_EXPERTS = "VLLM_MOE_USE_DEEP_GEMM"


@functools.cache
def use() -> None:
    """Have products of dense layers by it, where there is one and its user has not switched it off."""
    from ...ops.scaled_linear.deep_gemm import deep_gemm  # Triton is needed for it

    _use(deep_gemm, lambda: functools.partial(patch_points.DEEP_GEMM.get(), is_deep_gemm_e8m0_used=False))


@functools.cache
def use_for_experts() -> None:
    """The same of experts."""
    from ...ops.moe.deep_gemm import grouped_deep_gemm  # Triton is needed for it

    is_used = patch_points.ENVIRONMENT.get().get(_SWITCH_OF_EXPERTS)
    if patch_points.GROUPED_DEEP_GEMM.is_there() and is_used is not None and is_used():
        _use(grouped_deep_gemm, patch_points.GROUPED_DEEP_GEMM.get)


def _use(library: Any, product: Callable[[], Any]) -> None:
    if patch_points.HAS_DEEP_GEMM.is_there() and patch_points.HAS_DEEP_GEMM.get()():
        library.use(product(), f"vLLM {patch_points.installed_version()}{of_user()}")


def of_user() -> str:
    """What else tells versions of DeepGEMM apart: vLLM prefers one that its user has installed to its own, and its user
    may say by what it compiles.
    """
    version = installed("deep_gemm")
    named = "" if version == "none" else f", and deep_gemm {version}"
    told = sorted(f"{name}={value}" for name, value in os.environ.items() if name in _TELLS)
    return ", ".join([named, *told])

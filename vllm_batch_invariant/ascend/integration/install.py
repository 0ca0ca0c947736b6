"""Configures vllm-ascend, gives it our worker and attention, and fills the gaps of its own invariant mode."""

import os
from collections.abc import Iterable
from typing import Any

import torch

from ... import envs
from ...errors import BadSetting, NotCovered
from ...integration.layers import norm
from ...integration.reviews import patch_points
from . import patch_points as ascend_patch_points
from .library import LIBRARIES, attention_library

DETERMINISTIC = {"HCCL_DETERMINISTIC": "strict", "LCCL_DETERMINISTIC": "1"}
"""Read by the communication libraries when a communicator is made."""
EXTERNAL_OPS = frozenset({"mm", "addmm", "bmm", "matmul", "linear"})
"""What stays vllm-ascend's where its mode has registered it. Its softmax adds with torch_npu's sum and its sum needs a
dimension that sum() does not give, so these are gaps.
"""
WORKER = f"{__package__}.worker.Worker"
BACKEND = f"{__package__}.attention.Backend"


def set_deterministic_env() -> None:
    """Set what the communication libraries read, before a communicator exists.

    Raises:
        NotCovered: a variable has another value already.
    """
    for name, value in DETERMINISTIC.items():
        if os.environ.setdefault(name, value) != value:
            raise NotCovered(
                f"{name}={os.environ[name]}", "sums between NPUs may follow the message size", f"set {name}={value}"
            )


def choose_attention(platform: type[Any]) -> None:
    """Let the platform name our attention for every model: the start-up check has refused other backends."""

    def get_attn_backend_cls(cls: type, *args: object, **kwargs: object) -> str:
        return BACKEND

    platform.get_attn_backend_cls = classmethod(get_attn_backend_cls)


def before_platform(vllm_config: Any) -> None:
    """Settings that vllm-ascend's platform reads when it adjusts a configuration.

    Raises:
        BadSetting: an implementation of attention that no NPU has.
    """
    if envs.ATTENTION.read() != "auto":
        raise BadSetting(f"{envs.ATTENTION.name}={envs.ATTENTION.read()!r} has no implementation on an NPU; use auto.")
    settings = vllm_config.additional_config
    if settings is None:
        settings = vllm_config.additional_config = {}
    for name, value in ascend_patch_points.SETTINGS.items():
        settings[name] = {**settings.get(name, {}), **value} if isinstance(value, dict) else value
    compilation = vllm_config.compilation_config
    compilation.mode = patch_points.COMPILATION_MODE.get().NONE
    compilation.cudagraph_mode = patch_points.CUDAGRAPH_MODE.get().NONE


def after_platform(vllm_config: Any) -> None:
    """Our worker in the place of vllm-ascend's.

    Raises:
        NotCovered: another worker (310P, Xlite, a class of the user's).
    """
    parallel = vllm_config.parallel_config
    if parallel.worker_cls not in (ascend_patch_points.WORKER_CLASS, WORKER):
        raise NotCovered(
            f"the worker {parallel.worker_cls}",
            f"the mode is put into {ascend_patch_points.WORKER_CLASS}",
            "leave --worker-cls and xlite_graph_config out, and serve on an Ascend 910",
        )
    parallel.worker_cls = WORKER


def registered(library: torch.library.Library | None) -> frozenset[str]:
    """The ATen operators that a library has replaced on NPUs."""
    parts = [entry.split("/") for entry in getattr(library, "_op_impls", ())]
    return frozenset(name for namespace, name, key in parts if namespace == "aten" and key in ("NPU", "PrivateUse1"))


def start_own_mode() -> frozenset[str]:
    """Run vllm-ascend's own invariant mode, once; returns the operators that it serves and that are left to it."""
    ascend_patch_points.OWN_MODE.get()()
    ascend_patch_points.OWN_MODE_CALLED.put(lambda: None)  # a second run would register over ours
    torch.sum = ascend_patch_points.TORCH_SUM.get()  # so that torch.sum(x) and x.sum() have the same bits
    return registered(ascend_patch_points.OWN_LIBRARY.get()) & EXTERNAL_OPS


def replace_norms() -> None:
    """Our norm layers in the place of those that vllm-ascend has registered."""
    registry = patch_points.CUSTOM_OP.module().op_registry_oot
    for layer in (patch_points.RMS_NORM.get(), patch_points.GEMMA_RMS_NORM.get()):
        registry.pop(layer.__name__, None)
    norm.install()


def summary(external_ops: Iterable[str]) -> str:
    """What serves each operation on an NPU, for the log."""
    left = ", ".join(sorted(external_ops))
    matmuls = f"vllm-ascend's own for {left}; Triton for the others" if left else "Triton"
    return (
        f"Matmuls: {matmuls}. Norms, softmax, sums: Triton, in a fixed order. "
        f"Attention: {LIBRARIES.get(attention_library() or '', 'none')}, decode and prefill apart."
    )

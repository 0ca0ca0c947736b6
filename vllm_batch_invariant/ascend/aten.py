"""An NPU: torch_npu has kernels of its own for functions that PyTorch
composes elsewhere, for every reduction, and for fused operators that PyTorch does not have.

All is registered at PrivateUse1, the slot that torch_npu calls "NPU".
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..aten.overrides import OVERRIDES, DeviceOverrides, Override, linear, registrations
from ..aten.reductions import COMPOSED
from ..aten.reductions import OUTS as COMPOSED_OUTS
from ..ops.common.native_kernels import exists, keep
from ..ops.dispatch import module_for
from . import DEVICE as NPU
from . import refused

Tensor = torch.Tensor

KEY = NPU.dispatch_key
AUTOGRAD_KEY = f"Autograd{KEY}"


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention by its formula: plain matmuls and a softmax."""
    formula = torch.ops.aten._scaled_dot_product_attention_math
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return formula(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]


DECOMPOSED = (
    "_weight_norm",
    "adaptive_avg_pool2d",
    "cdist",
    "einsum",
    "gru.input",
    "kl_div",
    "l1_loss",
    "layer_norm",
    "log_softmax.int",
    "lstm.data",
    "lstm.input",
    "lstm_cell",
    "matmul",
    "matmul.out",
    "nanmean",
    "nanmean.out",
    "pdist",
    "rms_norm",
    "softmax.int",
    "tensordot",
)
"""Functions that PyTorch composes of other operators, and for which a device may have a kernel of its own. Where it
has, the composition takes its place, at the autograd key, too: the parts record the gradient.
"""


def _rows(x: Tensor, weight: Tensor) -> Tensor:
    """x with the dimensions that the weight has as one."""
    return x.reshape(*x.shape[: x.dim() - weight.dim()], weight.numel())


def _scale_of_rows(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean of squares + eps), in fp32, with the normalised dimensions kept as 1."""
    dims = list(range(x.dim() - weight.dim(), x.dim()))
    return 1 / (torch.mean(x.float().square(), dims, keepdim=True) + eps).sqrt()


def npu_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    out = module_for("norm", "npu").rms_norm(_rows(x, gamma), gamma.flatten(), epsilon, None, None)
    return out.reshape(x.shape), _scale_of_rows(x, gamma, epsilon)


def npu_gemma_rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return npu_rms_norm(x, gamma.float() + 1.0, epsilon)


def npu_add_rms_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    rows, residual = _rows(x1, gamma), _rows(x2, gamma)
    out, summed = module_for("norm", "npu").rms_norm(rows, gamma.flatten(), epsilon, residual, None)
    scale = _scale_of_rows(x1.float() + x2.float(), gamma, epsilon)
    return out.reshape(x1.shape), scale, summed.reshape(x1.shape)


def npu_bmm(input: Tensor, mat2: Tensor, output_sizes: list[int]) -> Tensor:
    out = torch.matmul(input, mat2)
    return out.reshape(output_sizes) if output_sizes and math.prod(output_sizes) == out.numel() else out


OWN: dict[str, Callable[..., object]] = {
    "npu_rms_norm": npu_rms_norm,
    "npu_gemma_rms_norm": npu_gemma_rms_norm,
    "npu_add_rms_norm": npu_add_rms_norm,
    "npu_linear": linear,
    "npu_bmmV2": npu_bmm,
}
"""Operators of torch_npu's namespace that the mode computes; the others that reduce are refused."""


def _compositions() -> Iterator[tuple[str, Callable[..., object]]]:
    yield "linear", linear
    yield "scaled_dot_product_attention", attention
    for name in DECOMPOSED:
        if exists(f"aten::{name}", KEY):
            base, _, overload = name.partition(".")
            yield name, getattr(getattr(torch.ops.aten, base), overload or "default").decompose


@contextmanager
def replaced(external_ops: frozenset[str]) -> Iterator[None]:
    """Put these operators in torch_npu's place for a block, and ask the rest of its kernels to be deterministic.

    Args:
        external_ops: operators that are left as they are.
    """
    libraries = {"aten": torch.library.Library("aten", "IMPL")}
    for namespace in refused.OWN_NAMESPACES:
        libraries[namespace] = torch.library.Library(namespace, "IMPL")

    def register(namespace: str, operators: Iterator[tuple[str, Callable[..., object]]], *keys: str) -> None:
        for name, function in list(operators):
            for key in () if name in external_ops else keys:
                libraries[namespace].impl(name, function, key, allow_override=True)

    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    settings: Any = torch.utils.deterministic  # a module with a property
    filling = settings.fill_uninitialized_memory
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*Overriding a previously registered kernel")
        register("aten", _compositions(), KEY, AUTOGRAD_KEY)
        for name, function in COMPOSED.items():
            keep(name, KEY)
            register("aten", registrations(name, Override(function, COMPOSED_OUTS.get(name, ("out",)))), KEY)
        register("aten", refused.of_aten(KEY), KEY)
        own = {name: function for name, function in OWN.items() if hasattr(torch.ops.npu, name)}
        register("npu", iter(own.items()), KEY)
        for namespace in refused.OWN_NAMESPACES:
            register(namespace, refused.of_namespace(namespace, frozenset(OWN), KEY), KEY)
    if not deterministic[0]:
        torch.use_deterministic_algorithms(True, warn_only=True)
        settings.fill_uninitialized_memory = False  # which PyTorch would begin to do
    try:
        yield
    finally:
        for library in libraries.values():
            library._destroy()
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        settings.fill_uninitialized_memory = filling


DEVICE = DeviceOverrides(OVERRIDES, has_external_ops=True, replaced=replaced)

__all__ = ["DECOMPOSED", "DEVICE", "OWN"]

"""vLLM's gated activation of most models on a GPU and that of MLPs without a gate, and gated MLPs, with the operations
in their place.
"""

from typing import Any

import torch

from ...ops.relu_squared import relu_squared
from ...ops.silu import silu_and_mul
from ..reviews import patch_points
from ..side_table import beside
from . import linear, quantised
from .fusion import ForwardFusion


def install() -> None:
    """Have every model build a layer that calls the operation, whose programs are many also for few tokens."""
    patch_points.replace_layer(patch_points.SILU_AND_MUL.get(), "BatchInvariant", _silu_and_mul)


def install_cuda() -> None:
    """The same, also of the activation of MLPs without a gate."""
    install()
    patch_points.replace_layer(patch_points.RELU_SQUARED.get(), "BatchInvariant", _relu_squared)


def _relu_squared(_: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return relu_squared(x)


def _silu_and_mul(_: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return silu_and_mul(x)


def _is_built(mlp: Any) -> None:
    """Note what the weight of its first layer is for."""
    if _fits(mlp):
        beside(mlp.gate_up_proj).activation = type(mlp.act_fn)


def _fits(mlp: Any) -> bool:
    """Whether an MLP's layers do what the operation does."""
    first = mlp.gate_up_proj
    activation = patch_points.CUSTOM_OP.module().op_registry_oot.get("SiluAndMul")
    return (
        type(first) is patch_points.MERGED_COLUMN_PARALLEL.get()
        and type(mlp.act_fn) is activation
        and all(quantised.is_plain(layer.quant_method) for layer in (first, mlp.down_proj))
        and first.bias is None
        and not first.gather_output
        and len(first.output_sizes) == 2
        and first.output_sizes[0] == first.output_sizes[1]
        and getattr(mlp, "expert_gate", None) is None
    )


def _is_noted(_: Any, parts: tuple[Any, ...], x: torch.Tensor) -> bool:
    first, activation = parts
    return beside(first).activation is type(activation) and x.is_cuda


def _forward(mlp: Any, parts: tuple[Any, ...], x: torch.Tensor) -> torch.Tensor:
    first = parts[0]
    out, _ = mlp.down_proj(linear.multiply(first, x, beside(first).expected.spec))
    return out


GATED_MLP = ForwardFusion(
    kinds=(patch_points.LLAMA_MLP, patch_points.QWEN2_MLP, patch_points.QWEN2_MOE_MLP),
    parts=("gate_up_proj", "act_fn"),
    apart="its activation stays apart",
    fits=_is_noted,
    forward=_forward,
    is_built=_is_built,
)
"""MLPs activate in the launch that multiplies."""

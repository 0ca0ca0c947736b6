"""vLLM's gated activation of most models on a GPU, and their gated MLPs, with the operations in their place."""

import functools
from typing import Any

import torch

from ...ops.linear import torch_op
from ...ops.linear.spec import GATED
from ...ops.silu import silu_and_mul
from ..reviews import patch_points
from . import linear
from .norm_rotary import is_watched


def install() -> None:
    """Have every model build a layer that calls the operation, whose programs are many also for few tokens; and have
    MLPs activate in the launch that multiplies.
    """
    patch_points.replace_layer(patch_points.SILU_AND_MUL.get(), "BatchInvariant", _silu_and_mul)
    for mlp in (patch_points.LLAMA_MLP.get(), patch_points.QWEN2_MLP.get()):
        if patch_points.replaces_forward(mlp, "its activation stays apart"):
            mlp.__init__, mlp.forward = _marking(mlp.__init__), _fused(mlp.forward)


def _silu_and_mul(_: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return silu_and_mul(x)


def _marking(init: Any) -> Any:
    """The constructor of an MLP that says what the weight of its first layer is for, before it is loaded."""

    @functools.wraps(init)
    def construct(self: Any, *args: Any, **named: Any) -> None:
        init(self, *args, **named)
        if _fits(self):
            setattr(self.gate_up_proj, linear.ACTIVATION, type(self.act_fn))

    return construct


def _fits(mlp: Any) -> bool:
    """Whether an MLP's layers do what the operation does."""
    first, method = mlp.gate_up_proj, patch_points.LINEAR_METHOD.get()
    activation = patch_points.CUSTOM_OP.module().op_registry_oot.get("SiluAndMul")
    return (
        getattr(type(mlp).forward, "fused", False)
        and type(first) is patch_points.MERGED_COLUMN_PARALLEL.get()
        and type(mlp.act_fn) is activation
        and type(first.quant_method) is type(mlp.down_proj.quant_method) is method
        and first.bias is None
        and not first.gather_output
        and len(first.output_sizes) == 2
        and first.output_sizes[0] == first.output_sizes[1]
    )


def _fused(apart: Any) -> Any:
    """The forward method that has one operation where ``apart`` has two."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        first, activation = self.gate_up_proj, self.act_fn
        fits = getattr(first, linear.ACTIVATION, None) is type(activation)
        if not fits or not x.is_cuda or is_watched(first, activation):
            return apart(self, x)
        out, _ = self.down_proj(torch_op.linear(x, first.weight, None, GATED.name))
        return out

    vars(forward)["fused"] = True
    return forward

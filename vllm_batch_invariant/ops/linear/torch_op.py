"""The operations of an engine's layers as custom operators of PyTorch's: torch.compile sees one node and leaves M to
run time. Whatever writes weights, a step's first kernels follow it, which wait for all before them.
"""

import torch

from . import gated_linear as _gated_linear
from . import linear as _linear

_library = torch.library.Library("vllm_batch_invariant", "DEF")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias=None, int leaves=1) -> Tensor")
_library.define("gated_linear(Tensor x, Tensor weight) -> Tensor")


def _of_layer(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, leaves: int = 1) -> torch.Tensor:
    return _linear(x, weight, bias, leaves, weight_is_constant=True)


def _of_gated_layer(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return _gated_linear(x, weight, weight_is_constant=True)


_library.impl("linear", _of_layer, "CompositeExplicitAutograd")
_library.impl("gated_linear", _of_gated_layer, "CompositeExplicitAutograd")


@torch.library.register_fake("vllm_batch_invariant::linear", lib=_library)
def _shape(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,  # noqa: ARG001
    leaves: int = 1,  # noqa: ARG001
) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@torch.library.register_fake("vllm_batch_invariant::gated_linear", lib=_library)
def _shape_of_gated(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0] // 2)


linear = torch.ops.vllm_batch_invariant.linear
"""As :func:`vllm_batch_invariant.ops.linear.linear`, without autograd."""
gated_linear = torch.ops.vllm_batch_invariant.gated_linear
"""As :func:`vllm_batch_invariant.ops.linear.gated_linear`, without autograd."""

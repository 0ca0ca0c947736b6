"""The operation of an engine's layers as a custom operator of PyTorch's: torch.compile sees one node and leaves M to
run time. Whatever writes weights, a step's first kernels follow it, which wait for all before them.
"""

import torch

from . import matmul
from .spec import NAMED, spec_of

_library = torch.library.Library("vllm_batch_invariant", "DEF")
_library.define("linear(Tensor x, Tensor weight, Tensor? bias=None, str? spec=None, Tensor[]? scales=None) -> Tensor")


def _of_layer(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    spec: str | None = None,
    scales: list[torch.Tensor] | None = None,
) -> torch.Tensor:
    return matmul(x, weight, NAMED[spec] if spec else spec_of(bias is not None), bias, True, scales or ())


_library.impl("linear", _of_layer, "CompositeExplicitAutograd")


@torch.library.register_fake("vllm_batch_invariant::linear", lib=_library)
def _shape(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,  # noqa: ARG001
    spec: str | None = None,
    scales: list[torch.Tensor] | None = None,  # noqa: ARG001
) -> torch.Tensor:
    n = weight.shape[0]
    return x.new_empty(*x.shape[:-1], NAMED[spec].epilogue.columns(n) if spec else n)


linear = torch.ops.vllm_batch_invariant.linear
"""As :func:`vllm_batch_invariant.ops.linear.matmul`, without autograd; ``spec`` is the name of one, None that of a
linear layer with the bias, if there is one.
"""

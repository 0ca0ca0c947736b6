"""The functions of the package ``batch_invariant_ops`` (github.com/thinking-machines-lab/batch_invariant_ops) by the
operations of this one, for programs that import that package by name, such as torchtitan's RL trainer.

The name belongs to the other package, so a program that wants this one says so before anybody imports it:

    import sys
    import vllm_batch_invariant.batch_invariant_ops

    sys.modules["batch_invariant_ops"] = vllm_batch_invariant.batch_invariant_ops
"""

from typing import NamedTuple

import torch

from .aten import (
    disable_batch_invariant_mode,
    enable_batch_invariant_mode,
    is_batch_invariant_mode_enabled,
    set_batch_invariant_mode,
)
from .ops import reduce, softmax
from .ops.linear import mm

__all__ = [
    "AttentionBlockSize",
    "disable_batch_invariant_mode",
    "enable_batch_invariant_mode",
    "get_batch_invariant_attention_block_size",
    "is_batch_invariant_mode_enabled",
    "log_softmax",
    "matmul_persistent",
    "mean_dim",
    "set_batch_invariant_mode",
]


class AttentionBlockSize(NamedTuple):
    """Tiles of attention, in tokens."""

    block_m: int
    block_n: int


def get_batch_invariant_attention_block_size() -> AttentionBlockSize:
    """What the other package answers. Programs give it to kernels of attention of their own; ours do not read it."""
    return AttentionBlockSize(block_m=16, block_n=16)


def matmul_persistent(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``a @ b + bias``: see :func:`..ops.linear.mm`. a: [M, K], b: [K, N], bias: [N] or None; returns [M, N]."""
    return mm(a, b, bias)


def log_softmax(input: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """log_softmax over ``dim``, of input's dtype: see :func:`..ops.softmax.log_softmax`."""
    return softmax.log_softmax(input, dim)


def mean_dim(input: torch.Tensor, dim: int, keepdim: bool = False, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Mean over one dimension, rounded once to ``dtype``: see :func:`..ops.reduce.mean`. None: input's dtype, fp32 for
    integers.
    """
    wide = input if input.is_floating_point() else input.to(torch.float32)
    return reduce.mean(wide, dim, keepdim, dtype=dtype)

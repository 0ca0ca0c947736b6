"""A Hopper for Triton's interpreter: its ``tl.dot`` of e4m3 are the sums of the integer model, and it has no others."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.ops.conftest import HOPPER as WITHOUT_FP8
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.scaled_linear import WGMMA

HOPPER = replace(WITHOUT_FP8, fp8_mma=WGMMA)


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter be that GPU."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    from vllm_batch_invariant.ops.scaled_linear.cpu_tensor_core import Operand, wgmma_sums

    def create_dot(self, a, b, d, precision, max_num_imprecise_acc):
        assert len(a.data) >= 64, "mma.sync"
        assert max_num_imprecise_acc >= a.data.shape[1] == 128, "another promotion"
        assert not d.data.any(), "not from zero"
        sums = wgmma_sums(*(Operand(torch.tensor(one)) for one in (a.data, b.data.T)))
        return TensorHandle(sums.numpy().astype(np.float32), d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(Gpu, "of", lambda _: HOPPER)

"""Triton compiles a kernel anew for some values of its arguments; none of them may follow the batch.

These tests never ran on hardware, and on a CPU there is nothing to compile.
"""

from collections import Counter

import pytest
import torch

from tests.ascend.hardware.sweep import COUNTS, ROWS, draw
from tests.assertions import DTYPES
from vllm_batch_invariant.ops import reduce
from vllm_batch_invariant.ops import softmax as softmaxes
from vllm_batch_invariant.ops.linear import linear
from vllm_batch_invariant.ops.norm import rms_norm

pytestmark = pytest.mark.npu

OPERATIONS = {
    "sum": lambda x, weight: reduce.sum(x, -1),
    "mean": lambda x, weight: reduce.mean(x, -1),
    "softmax": lambda x, weight: softmaxes.softmax(x),
    "log_softmax": lambda x, weight: softmaxes.log_softmax(x),
    "rms_norm": lambda x, weight: rms_norm(x, weight[0], 1e-6),
    "rms_norm, residual": lambda x, weight: rms_norm(x, weight[0], 1e-6, x),
    "linear": lambda x, weight: linear(x, weight),
    "linear, bias": lambda x, weight: linear(x, weight, weight[:, 0].contiguous()),
}


@pytest.fixture
def compiled(npu, monkeypatch):
    """How often each kernel was not found among those that this process has compiled."""
    jit = pytest.importorskip("triton.runtime.jit")
    counter = Counter()

    def note(**call) -> None:
        counter[call["fn"].name] += 1

    # Where the hook lives changed after Triton 3.2.
    knobs = getattr(pytest.importorskip("triton"), "knobs", None)
    if knobs is None:
        monkeypatch.setattr(jit.JITFunction, "cache_hook", note)
    else:
        monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    return counter


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [544, 300, 77])
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_kernel_is_compiled_once_for_all_batch_sizes(name, length, dtype, compiled, npu):
    x, weight = draw(ROWS, length, dtype=dtype, device=npu), draw(96, length, dtype=dtype, device=npu, seed=1)
    for count in (*COUNTS, ROWS):
        OPERATIONS[name](x[:count], weight)
        OPERATIONS[name](x[-count:], weight)
    torch.npu.synchronize()
    assert max(compiled.values(), default=0) <= 1, compiled

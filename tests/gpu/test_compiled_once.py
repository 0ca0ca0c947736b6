"""Triton compiles a kernel anew for some values of its arguments; none of them may follow the batch."""

from collections import Counter

import pytest
import torch

from tests.bits import DTYPES, ROW_COUNTS
from tests.ops.attention_cases import Chunk, Heads, Request, paged
from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention
from vllm_batch_invariant.ops.linear import linear
from vllm_batch_invariant.ops.linear.schedule import tile_for
from vllm_batch_invariant.ops.norm import rms_norm
from vllm_batch_invariant.ops.reduce import mean
from vllm_batch_invariant.ops.softmax import log_softmax


@pytest.fixture
def compiled(monkeypatch):
    """How often each kernel was not found among those that this process has compiled."""
    triton = pytest.importorskip("triton")
    counter = Counter()
    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", lambda **call: counter.update([call["fn"].name]))
    return counter


def calls(counter: Counter, kernel: str) -> int:
    return sum(count for name, count in counter.items() if name.endswith(kernel))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(520, 544), (99, 300), (1, 77)])
def test_row_and_product_kernels_are_compiled_once_for_all_batch_sizes(columns, depth, dtype, compiled):
    x, weight = (torch.ones(size, depth, dtype=dtype, device="cuda") for size in (1000, columns))
    for rows in ROW_COUNTS:
        part = x[:rows]
        linear(part, weight)
        mean(part, -1)
        log_softmax(part, -1)
        rms_norm(part, x[0], 1e-6, part)
    tiles = {tile_for(rows, columns, dtype) for rows in ROW_COUNTS}
    assert calls(compiled, "_mm_kernel") <= len(tiles)
    for kernel in ("_sum_kernel", "_softmax_kernel", "_rms_norm_kernel"):
        assert calls(compiled, kernel) <= 1, kernel


def test_attention_kernels_are_compiled_once_for_all_batches(compiled):
    heads = Heads(6, 2, 48, torch.bfloat16)
    for length in (1, 2, 3, 15, 16, 17, 100, 255, 256, 257, 2000):
        for count in (1, 2, 16):
            chunks = [Chunk(Request(heads, length, seed), max(0, length - 1 - seed), length) for seed in range(count)]
            tensors = [tensor.cuda() for tensor in paged(chunks)]
            paged_attention(*tensors, scale=0.1, reduction=AttentionReduction())
    # Two sizes of blocks, each with splits walked and shared out.
    assert 1 <= calls(compiled, "_attention_kernel") <= 4
    assert calls(compiled, "_merge_kernel") <= 2

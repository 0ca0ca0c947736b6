"""Prints a digest of what the kernels on a CPU give, for a number of threads; numba compiles them for the CPU that the
environment names.

    python -m tests.ops.common.digest THREADS [stock]
"""

import hashlib
import sys
from collections.abc import Callable, Iterator

import numpy as np
import torch

from vllm_batch_invariant.ops.attention import AttentionReduction, AttentionSpec, PagedAttention, PagedCache, attend
from vllm_batch_invariant.ops.hopper import cpu
from vllm_batch_invariant.ops.hopper.tables import recorded
from vllm_batch_invariant.ops.linear import linear
from vllm_batch_invariant.ops.norm import NormReduction, rms_norm
from vllm_batch_invariant.ops.pointwise.cpu import WRITTEN, elementwise
from vllm_batch_invariant.ops.softmax import log_softmax


def computed() -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw)

    for dtype in (torch.bfloat16, torch.float16):
        x, weight = normal(31, 1100).to(dtype), normal(170, 1100).to(dtype)
        yield from (linear(x, weight), linear(x[:1], weight), rms_norm(x, None, 1e-6))
    yield log_softmax(8 * normal(20, 3000), -1)
    for name in WRITTEN[:-2]:
        yield elementwise(name, 8 * normal(3, 9000))
    pages, table = normal(2, 4, 2, 16, 64), torch.arange(4, dtype=torch.int32)[None]
    one = torch.tensor([60], dtype=torch.int32)
    cache, starts = PagedCache(pages[0], pages[1], table), torch.tensor([0, 40], dtype=torch.int32)
    query, spec = normal(40, 4, 64), AttentionSpec(0.125)
    yield attend(PagedAttention(query, cache, one, starts, spec, AttentionReduction.of_device("cpu", "numba")), "numba")
    yield from map(torch.from_numpy, of_a_hopper(normal))


def of_a_hopper(normal: Callable[..., torch.Tensor]) -> Iterator[np.ndarray]:
    """What a CPU computes again of a GPU's usual arithmetic."""
    tables = recorded()
    x, weight = (normal(*size).bfloat16().float().numpy() for size in ((9, 400), (70, 400)))
    yield cpu.mma(x, weight)
    yield from cpu.rms_norm(x, x[0], 1e-6, x, NormReduction.of_device("cuda", 400, torch.bfloat16))
    yield cpu.silu_and_mul(x, tables)
    yield cpu.exp(x, tables)


def of_stock() -> Iterator[torch.Tensor]:
    """PyTorch's own, for a negative control."""
    x = torch.randn(3, 9000, generator=torch.Generator().manual_seed(0))
    yield from (torch.nn.functional.silu(x), torch.exp(x), torch.tanh(x))


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]))
    found = hashlib.sha256()
    for tensor in computed() if len(sys.argv) == 2 else of_stock():
        found.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    print(found.hexdigest())

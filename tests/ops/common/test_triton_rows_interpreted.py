"""The sums of rows that the GPU's kernels share, in Triton's interpreter, on the CPU."""

import pytest
import torch
import triton
import triton.language as tl

from vllm_batch_invariant.ops.common.triton_rows import row_sum, row_sums

ONE_THREAD = 1
"""No addition is left to Triton's own sum."""


@triton.jit
def sums_kernel(x_ptr, out_ptr, m: tl.constexpr, n: tl.constexpr, threads: tl.constexpr):
    offs_m = tl.arange(0, m)
    x = tl.load(x_ptr + offs_m[:, None] * n + tl.arange(0, n)[None, :])  # [m, n]
    tl.store(out_ptr + offs_m, row_sums(x, threads))


@triton.jit
def sum_kernel(x_ptr, out_ptr, n: tl.constexpr, threads: tl.constexpr):
    tl.store(out_ptr, row_sum(tl.load(x_ptr + tl.arange(0, n)), threads))


def written_out(x: torch.Tensor) -> torch.Tensor:
    """[M, N] -> [M]: the additions of ``row_sums`` one by one."""
    for _ in range(3):
        if x.shape[1] > 1:
            x = x[:, 0::2] + x[:, 1::2]
    while x.shape[1] > 1:
        half = x.shape[1] // 2
        x = x[:, :half] + x[:, half:]
    return x[:, 0]


@pytest.mark.parametrize("length", [1, 2, 8, 16, 1024])
def test_sums_of_rows_are_added_in_the_order_that_is_written(length):
    x = torch.randn(4, length, generator=torch.Generator().manual_seed(length)) * 1000
    out = torch.empty(4)
    sums_kernel[(1,)](x, out, 4, length, ONE_THREAD)
    assert torch.equal(out, written_out(x))
    sum_kernel[(1,)](x[0], out, length, ONE_THREAD)
    assert torch.equal(out[0], written_out(x)[0])
    if length == 1024:
        assert not torch.equal(out[:1], written_out(x.flip(1).roll(3, 1))[:1]), "another order has other bits"

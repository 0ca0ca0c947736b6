"""Runs the GPU's softmax kernels in Triton's interpreter, on the CPU; a program of its own, because Triton reads the
setting when it is imported.

usage: TRITON_INTERPRET=1 python -m tests.ops.softmax.interpreted_softmax
"""

import math
from itertools import product

import torch

from tests.assertions import assert_near, assert_same_bits
from tests.ops.interpreted_checks import run_all
from vllm_batch_invariant.ops.softmax import cuda as softmax
from vllm_batch_invariant.ops.softmax import reference as exact
from vllm_batch_invariant.ops.softmax.reduction import LONGEST_WHOLE, SHORTEST_CHUNK, SoftmaxReduction

HALF = torch.float16
"""The interpreter truncates to bf16."""
LONG = LONGEST_WHOLE + 1
FUNCTIONS = ("softmax", "log_softmax")


def draw(rows: int, length: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.randn(rows, length, generator=torch.Generator().manual_seed(length)) * 4).to(dtype)


def check_rows() -> None:
    for length, dtype in product((1, 77, LONG - 1, LONG), (torch.float32, HALF)):
        x = draw(2, length, dtype)
        for name in FUNCTIONS:
            function = getattr(softmax, name)
            whole = function(x, -1)
            if length > 1:
                assert_near(whole, getattr(exact, name)(x, -1), factor=2)
            assert_same_bits(function(x.t()[:, 1:], 0), whole.t()[:, 1:], f"{name} of {length}")
            if dtype == HALF:
                wide = function(x, -1, dtype=torch.float32)
                assert_same_bits(wide, function(x.float(), -1), f"{name} of {length}, widened")


def check_special_values() -> None:
    for length in (40, LONG):
        x = draw(7, length)
        x[0, : length // 2] = -torch.inf  # whole chunks among them
        x[1] = -torch.inf
        x[2, 3] = torch.inf
        x[3, length - 1] = torch.nan
        x[4, 7] = 1e4
        x[5, 1:] = -torch.inf
        x[6] = torch.inf
        for name in FUNCTIONS:
            ours, stock = getattr(softmax, name)(x, -1), getattr(torch, name)(x, -1)
            assert_same_bits(ours.isnan(), stock.isnan(), f"{name} of {length}")
            torch.testing.assert_close(ours, stock, equal_nan=True, rtol=1e-5, atol=1e-6)


def check_gradients() -> None:
    for length in (77, LONG):
        x, grad = draw(2, length), draw(2, length + 1)[:, :length].contiguous()
        for name in FUNCTIONS:
            wide = x.double().requires_grad_()
            getattr(torch, name)(wide, -1).backward(grad.double())
            backward, output = getattr(softmax, f"{name}_backward"), getattr(softmax, name)(x, -1)
            ours = backward(grad, output, -1, torch.float32)
            # The sum of the gradients, which is not near 0, times a probability of the same relative error.
            assert_near(ours, wide.grad, factor=10)
            assert_same_bits(backward(grad[1:2], output[1:2], -1, torch.float32), ours[1:2])


def check_reductions() -> None:
    for length in (1, 31, 4096, LONG - 1, LONG, 151_936, 262_144, 262_145, 10_000_000, 10**9):
        reduction = SoftmaxReduction.of_device("cuda", length, torch.float32)
        whole = length <= LONGEST_WHOLE
        assert reduction.block >= length if whole else SHORTEST_CHUNK <= reduction.block <= LONGEST_WHOLE
        assert 32 * reduction.num_warps <= reduction.block == 2 ** int(math.log2(reduction.block))
    assert SoftmaxReduction.of_device("cuda", 151_936, torch.float32).block == SHORTEST_CHUNK


CHECKS = {
    "rows": check_rows,
    "special values": check_special_values,
    "gradients": check_gradients,
    "reductions": check_reductions,
}


if __name__ == "__main__":
    run_all(CHECKS)

"""The fault of ``injected`` on a GPU: a kernel, which the dispatcher does not see."""

import torch
import triton
import triton.language as tl


@triton.jit
def _nudge_kernel(numbers, last, stride):
    place = numbers + tl.program_id(0).to(tl.int64) * stride + last
    tl.store(place, tl.load(place) + 1)


def nudge(numbers: torch.Tensor) -> None:
    """Add 1 to the last of each row of integers."""
    _nudge_kernel[(len(numbers),)](numbers, numbers.shape[1] - 1, numbers.stride(0))

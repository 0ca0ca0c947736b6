"""The kernel of ``max(x, 0) ** 2`` in Triton's interpreter, on the CPU."""

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops.relu_squared import cpu, cuda

pytestmark = pytest.mark.interpreted


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1024), (2, 1500), (0, 7)])
def test_results_are_those_of_a_cpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = 4 * torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert_same_bits(cuda.relu_squared(x), cpu.relu_squared(x))

"""Exact arithmetic on a GPU has the bits of the CPU's, in every launch of :mod:`.on_gpu`."""

import pytest
import torch

from tests.ops.exact import on_gpu
from vllm_batch_invariant.ops.exact import cpu, cuda

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of infinities and NaN in numpy


@pytest.mark.parametrize("case", on_gpu.CASES)
def test_every_launcher_has_the_bits_of_the_cpu(case: str) -> None:
    differ = {what: count for what, *both in on_gpu.CASES[case]() if (count := on_gpu.differing(*both))}
    assert not differ


def test_another_segment_of_the_same_product_is_seen() -> None:
    """The comparison can fail: grids of other parts of K round other bits off."""
    x, weight = on_gpu.draws(20, 512), on_gpu.draws(96, 512, seed=1)
    right = cpu.linear(x, cpu.prepare(weight, 8))
    assert on_gpu.differing(cuda.linear(x.cuda(), cuda.prepare(weight.cuda(), 8)), right) == 0
    assert on_gpu.differing(cuda.linear(x.cuda(), cuda.prepare(weight.cuda(), 1)), right) > 0
    assert on_gpu.differing(torch.nn.functional.linear(x.cuda(), weight.cuda()), right) > 0

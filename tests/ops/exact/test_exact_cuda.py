"""Exact arithmetic on a GPU has the bits of the CPU's, in every launch of :mod:`.on_gpu`."""

from collections.abc import Callable

import pytest
import torch

from tests.ops.exact import on_gpu
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.exact import cpu, cuda, definition

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


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("m", [1, 8, 40, 300])
def test_layers_whose_launches_overlap_have_the_bits_of_those_that_wait(m: int, shared: bool) -> None:
    """Every product reads what the kernels before have just written, in turn and as a CUDA graph."""
    if not Gpu.of(0).has_wgmma:
        pytest.skip("only a Hopper's products begin before their activations are there")
    k, parts = 1024, definition.segments(1024, shared)
    weights = [cuda.prepare(on_gpu.draws(k, k, seed=seed, scale=k**-0.5).cuda(), parts) for seed in range(3)]
    x = on_gpu.draws(m, k, seed=9).cuda()

    def waits(rows: torch.Tensor, weight: cuda.ExactWeight) -> torch.Tensor:
        torch.cuda.synchronize()
        held = cuda.quantize(rows, parts, activations=True)
        torch.cuda.synchronize()
        return cuda.product(held, weight, None, cuda.hopper_schedule(m, k, parts, Gpu.of(0).num_sms))

    def chain(layer: Callable[[torch.Tensor, cuda.ExactWeight], torch.Tensor]) -> list[torch.Tensor]:
        found = [x]
        for number in range(60):
            found.append(layer(found[-1], weights[number % 3]))
        return found

    right, found = chain(waits), chain(cuda.linear)
    assert len({one.cpu().float().sum().item() for one in right}) == len(right)
    assert all(torch.equal(*both) for both in zip(found, right, strict=True))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = chain(cuda.linear)
    for _ in range(20):
        for one in captured[1:]:
            one.fill_(7.0)
        graph.replay()
        assert all(torch.equal(*both) for both in zip(captured, right, strict=True))

"""GEMMs whose K is added in slices: by the GEMMs that serve others, which know nothing of it."""

from types import SimpleNamespace

import pytest
import torch

from tests.assertions import assert_near, assert_same_bits
from tests.fakes.cublaslt import sequential_k
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import linear as operation
from vllm_batch_invariant.ops.all_reduce import add_ranks
from vllm_batch_invariant.ops.all_reduce import cpu as all_reduce_cpu
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.linear import LinearReduction, cpu, linear, reference, torch_op

pytest.importorskip("triton")

from vllm_batch_invariant.ops.linear import autotune, triton_gemm
from vllm_batch_invariant.ops.linear.autotune import Autotuner, TunedSchedule
from vllm_batch_invariant.ops.linear.problem import GemmProblem, problem_of
from vllm_batch_invariant.ops.linear.schedule import NARROW_TILES, narrow_tiles
from vllm_batch_invariant.ops.linear.spec import MatmulSpec, spec_of

HOPPER = Gpu("Hopper", 132, 232_448, True, 60 << 20, True)
M, N, K = 24, 40, 128


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def tree(a: torch.Tensor, b: torch.Tensor, count: int) -> torch.Tensor:
    """The definition, of sums that add K upwards."""
    parts = [sequential_k(*of_slice) for of_slice in zip(a.chunk(count, 1), b.chunk(count), strict=True)]
    return add_ranks(torch.stack(parts), tree=True)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices are added by PyTorch, and Triton's kernels are a loop."""

    def add(parts: torch.Tensor, tree: bool, out: torch.Tensor | None = None) -> torch.Tensor:
        total = add_on_cpu(parts, tree)
        return total if out is None else out.copy_(total)

    def mm(a, b, bias=None, out=None) -> torch.Tensor:
        total = sequential_k(a, b, bias)
        return total if out is None else out.copy_(total)

    add_on_cpu = all_reduce_cpu.add_ranks
    monkeypatch.setattr(all_reduce_cpu, "add_ranks", add)
    monkeypatch.setattr(triton_gemm, "mm", mm)
    monkeypatch.setattr(triton_gemm, "mm_ptr", mm)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_on_a_cpu_it_is_what_the_engine_computes(dtype: torch.dtype) -> None:
    x, weight, bias = draw(3, 5, K, dtype=dtype), draw(N, K, dtype=dtype), draw(N, dtype=dtype)
    for count in (2, 4):
        engine = cpu.prepared_linear(x, cpu.prepare_weight(weight), bias, count)
        assert_same_bits(linear(x, weight, bias, count), engine)
        assert_same_bits(torch_op.linear(x, weight, None, spec_of(False, count).name) + bias, engine)
        assert_near(engine, reference.linear(x, weight, bias), 3)
    operation.prepare(weight, 8, spec_of(False, 4))
    assert not torch.equal(linear(x, weight, bias, 4), linear(x, weight, bias))


@pytest.mark.parametrize("count", [3, 16])
def test_what_cannot_be_cut_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match=rf"power of two of slices of equal length, got {count} of K = 24"):
        linear(draw(2, 24), draw(8, 24), k_slices=count)


def test_a_device_that_adds_no_slices_is_refused() -> None:
    with pytest.raises(NotCovered, match="linear on device 'meta'"):
        linear(draw(2, 32).to("meta"), draw(8, 32).to("meta"), k_slices=2)


def test_a_problem_in_slices_is_another_problem(cublaslt: SimpleNamespace) -> None:
    a, weight = draw(M, K), draw(N, K)
    found = problem_of(a, weight.t(), None, spec_of(False, 2))
    assert str(found) == f"N={N} K={K} bfloat16 in 2 slices"
    assert str(found.k_slice) == f"N={N} K={K // 2} bfloat16"
    assert found.reduction == LinearReduction.of_device("cuda", N, K, torch.bfloat16, 2) != found.k_slice.reduction
    assert problem_of(a, weight.t(), None, spec_of(False, 4)) is not None
    for shorter in (72, 24):  # a slice is not aligned, or too short: Triton alone
        operands = a[:, :shorter].contiguous(), weight[:, :shorter].contiguous().t(), None
        assert problem_of(*operands, spec_of(False, 2)) is None


@pytest.mark.usefixtures("on_cpu")
@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("m", [1, 3, M])
def test_what_serves_a_slice_serves_the_tree(m: int, count: int, dispatch: SimpleNamespace) -> None:
    a, weight = draw(m, K), draw(N, K)
    wanted, spec = tree(a, weight.t(), count), MatmulSpec(k_slices=count)
    assert_same_bits(dispatch.cuda.matmul(a, weight.t(), spec), wanted)
    assert not dispatch.tuned, "by Triton"
    dispatch.cuda.prepare(weight, 40, spec, (3,))
    before = len(dispatch.library.launches)
    assert_same_bits(dispatch.cuda.matmul(a, weight.t(), spec), wanted)
    assert dispatch.library.launches[before:] == [m] * count
    assert_same_bits(dispatch.cuda.mm(a, weight.t()), sequential_k(a, weight.t()))
    assert not torch.equal(sequential_k(a, weight.t()), wanted)


class OnCpu(Autotuner):
    def _copies(self) -> int:
        return 2


@pytest.fixture
def autotuner(on_cpu: None, cublaslt: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> OnCpu:
    draw_operands = autotune.cancelling_operands
    monkeypatch.setattr(autotune, "cancelling_operands", lambda problem, m, _: draw_operands(problem, m, "cpu"))
    problem = GemmProblem(N, 16 * K, torch.bfloat16, MatmulSpec(k_slices=4), None)
    return OnCpu(problem, cublaslt.Matmul(problem), M)


def test_operands_show_the_slices_and_the_order_of_the_tree(autotuner: OnCpu) -> None:
    a, b = autotuner.a, autotuner.b
    assert_same_bits(autotuner.product, tree(a, b, 4))
    parts = [sequential_k(*of_slice) for of_slice in zip(a.chunk(4, 1), b.chunk(4), strict=True)]
    others = {
        "no slices": sequential_k(a, b),
        "two slices": tree(a, b, 2),
        "a chain of slices": add_ranks(torch.stack(parts)),
        "other neighbours": add_ranks(torch.stack([parts[i] for i in (0, 2, 1, 3)]), tree=True),
    }
    shares = {name: (other != autotuner.product).double().mean().item() for name, other in others.items()}
    assert min(shares.values()) > 0.1, shares
    cancelled, left = ((tree(a, b, 2) != autotuner.product)[:, start::2].double().mean() for start in (0, 1))
    assert cancelled > 0.2
    assert left > 0.1


def test_a_schedule_of_slices_is_verified_as_a_tree(autotuner: OnCpu, monkeypatch: pytest.MonkeyPatch) -> None:
    assert autotuner.tune(16, (), None).served_by == "cuBLASLt"
    monkeypatch.setattr(autotune, "sm90_tiles", lambda *_: NARROW_TILES[:1])
    monkeypatch.setattr(autotune, "_uncompiled", set())

    class Clock:
        def time(self, ways, expected, replays) -> list[list[float]]:
            return [[9.0]] * (len(ways) - 1) + [[1.0]]

    def tuned(count: int) -> TunedSchedule:
        def narrow(a, b, bias, out, reduction, tile, overlaps, spec, scales) -> torch.Tensor:
            assert (reduction.k_slices, overlaps) == (4, True)
            return out.copy_(tree(a, b, count))

        monkeypatch.setattr(triton_gemm, "gemm_sm90_swap_ab", narrow)
        return autotuner.tune(16, (), Clock())

    assert tuned(4).served_by == "Gluon"
    assert tuned(2).refused == (NARROW_TILES[0].about,)


def test_a_narrow_tile_ends_a_step_where_a_slice_ends() -> None:
    assert narrow_tiles(1, 896, HOPPER, 256) == narrow_tiles(1, 896, HOPPER)
    assert {tile.block_k for tile in narrow_tiles(1, 896, HOPPER, 384)} == {128}
    assert narrow_tiles(1, 896, HOPPER, 64) == ()
    assert narrow_tiles(128, 4096, HOPPER) == NARROW_TILES[6:]
    assert narrow_tiles(128, 4096, HOPPER, 2048) == NARROW_TILES[4:], "instead of three kernels"

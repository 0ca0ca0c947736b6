"""What is asked of cuBLASLt: the right matrices, in descriptors that exist, by algorithms that do not split K."""

from itertools import product
from types import ModuleType

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.fakes.cublaslt import sequential_k

pytest.importorskip("triton")

from vllm_batch_invariant.ops.linear.problem import problem_of

HALVES = (torch.bfloat16, torch.float16)


def draw(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def multiply(module: ModuleType, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    matmul = module.Matmul(problem_of(a, b, bias))
    out = torch.empty(len(a), b.shape[1], dtype=a.dtype)
    [algorithm] = matmul.algorithms(len(a), 1)
    matmul.run(algorithm, a, b, bias, out)
    return out


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_every_layout_is_described_as_it_is(dtype: torch.dtype, biased: bool, cublaslt: ModuleType) -> None:
    wide_a, wide_b, bias = draw(64, 96, dtype=dtype), draw(96, 48, dtype=dtype), draw(40, dtype=dtype)
    bias = bias if biased else None
    for a_k_major, b_k_major in product((True, False), repeat=2):
        a = wide_a if a_k_major else wide_a.t().contiguous().t()
        b = wide_b.t().contiguous().t() if b_k_major else wide_b
        for m, k in ((64, 96), (16, 80), (8, 16), (1, 96)):
            part_a, part_b = a[:m, :k], b[:k, :40]
            assert_same_bits(multiply(cublaslt, part_a, part_b, bias), sequential_k(part_a, part_b, bias), f"{m} x {k}")


@pytest.mark.parametrize("workspace", [0, 1 << 20])
def test_a_split_is_asked_for_only_with_a_workspace(workspace: int, cublaslt: ModuleType) -> None:
    a, b = draw(8, 96, dtype=torch.bfloat16), draw(40, 96, dtype=torch.bfloat16).t()
    matmul = cublaslt.Matmul(problem_of(a, b, None))
    found = matmul.algorithms(8, 4, workspace)
    assert [algorithm.split for algorithm in found] == ([1, 3] if workspace else [1])
    assert found[0].about == "tile 64x64, cluster 1x1x1"
    assert len(found[0].opaque) == 64
    split = matmul.algorithms(8, 4, 1 << 20)[1]
    out, room = torch.empty(8, 40, dtype=torch.bfloat16), torch.zeros(1 << 20, dtype=torch.uint8)
    with pytest.raises(cublaslt.Error):
        matmul.run(split, a, b, None, out)
    matmul.run(split, a, b, None, out, room)
    assert_same_bits(out, sequential_k(a, b, splits=3))


def test_a_heuristic_that_names_a_split_unasked_is_not_followed(
    cublaslt: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = cublaslt.lt.matmul_algo_get_heuristic

    def careless(*arguments: int) -> None:
        cublaslt.lt.alive[arguments[6]] = dict.fromkeys(cublaslt.lt.MatmulPreferenceAttribute, 1)
        ask(*arguments)

    monkeypatch.setattr(cublaslt.lt, "matmul_algo_get_heuristic", careless)
    a, b = draw(8, 96, dtype=torch.bfloat16), draw(40, 96, dtype=torch.bfloat16).t()
    assert [algorithm.split for algorithm in cublaslt.Matmul(problem_of(a, b, None)).algorithms(8, 4)] == [1]


def test_no_number_of_rows_or_biases_meets_a_descriptor_that_was_destroyed(
    cublaslt: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = draw(40, 96, dtype=torch.bfloat16), draw(40, 96, dtype=torch.bfloat16).t()
    biases = [draw(40, dtype=torch.bfloat16) for _ in a]
    for most in (3, 4, 5, 6):
        monkeypatch.setattr(cublaslt, "_MOST_DESCRIPTORS", most)
        before = len(cublaslt.lt.alive)
        matmul = cublaslt.Matmul(problem_of(a, b, biases[0]))
        for m, bias in enumerate(biases, 1):
            [algorithm] = matmul.algorithms(m, 1)
            out = torch.empty(m, 40, dtype=torch.bfloat16)
            matmul.run(algorithm, a[:m], b, bias, out)
            assert_same_bits(out, sequential_k(a[:m], b, bias), f"{m} rows")
        assert len(cublaslt.lt.alive) <= before + 2 * most, "what is thrown away is destroyed"


def test_a_problem_that_the_heuristic_does_not_know_has_no_algorithm(
    cublaslt: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: int) -> None:
        raise cublaslt.Error("not supported")

    monkeypatch.setattr(cublaslt.lt, "matmul_algo_get_heuristic", unknown)
    a, b = draw(8, 96, dtype=torch.bfloat16), draw(40, 96, dtype=torch.bfloat16).t()
    before = len(cublaslt.lt.alive)
    matmul = cublaslt.Matmul(problem_of(a, b, None))
    assert matmul.algorithms(8, 4) == []
    layouts_and_operation = 4
    assert len(cublaslt.lt.alive) == before + layouts_and_operation, "the preference is destroyed"

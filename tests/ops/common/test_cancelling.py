"""Operands that show the order of a sum."""

import math

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops.common.cancelling import cancelling

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("k", [2, 16, 17, 300, 4096])
def test_the_exact_product_is_zero(k: int, dtype: torch.dtype) -> None:
    x, weight = cancelling(3, 5, k, dtype, "cpu")
    assert x.shape == (3, k)
    assert weight.shape == (5, k)
    for row in x.double():
        for column in weight.double():
            assert math.fsum((row * column).tolist()) == 0


@pytest.mark.parametrize("dtype", HALVES)
def test_terms_are_of_size_one_and_their_negatives_are_far_apart(dtype: torch.dtype) -> None:
    x, weight = cancelling(4, 6, 4096, dtype, "cpu")
    assert (x != 0).double().mean() > 0.99
    assert 0.9 < x.double().std() < 1.1
    assert 0.9 < weight.double().std() < 1.1
    assert len(torch.cat([x, weight]).unique(dim=0)) == 10
    halves = x[:, :2048].double() @ weight[:, :2048].double().t()
    assert halves.abs().mean() > 10, "part of K does not cancel"


def test_a_seed_gives_operands_of_its_own() -> None:
    first, again, other = (cancelling(4, 6, 64, torch.bfloat16, "cpu", seed) for seed in (0, 0, 1))
    assert_same_bits(first[0], again[0])
    assert_same_bits(first[1], again[1])
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_a_split_moves_nearly_all_elements_where_it_moves_few_of_a_random_product(parts: int) -> None:
    generator = torch.Generator().manual_seed(0)
    random = [torch.randn(size, 4096, generator=generator).bfloat16() for size in (4, 300)]

    def moved(x: torch.Tensor, weight: torch.Tensor) -> float:
        terms = (x.float()[:, None] * weight.float()).permute(2, 0, 1).contiguous()  # exact
        split = sum(in_order(part) for part in terms.tensor_split(parts))
        return (split.bfloat16() != in_order(terms).bfloat16()).double().mean().item()

    def in_order(terms: torch.Tensor) -> torch.Tensor:
        total = torch.zeros_like(terms[0])
        for term in terms:
            total += term
        return total

    assert moved(*cancelling(4, 300, 4096, torch.bfloat16, "cpu")) > 0.9
    assert moved(*random) < 0.05

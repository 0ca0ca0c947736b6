"""The tests' own reduction in Triton's interpreter, beside the one that it stands for."""

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

from tests.assertions import assert_same_bits
from tests.interpreted_calls import element_by_element, reduced_by_slices


@triton.jit
def _later_weighs_less(a, b):
    return a + b / 3


@triton.jit
def _larger_of_pairs(a, i, b, j):
    return tl.where(a >= b, a, b), tl.where(a >= b, i, j)


@triton.jit
def _kernel(
    x_ptr, sums_ptr, best_ptr, place_ptr, of_all_ptr, rows: tl.constexpr, columns: tl.constexpr, axis: tl.constexpr
):
    offs = tl.arange(0, rows)[:, None] * columns + tl.arange(0, columns)[None]
    x = tl.load(x_ptr + offs)
    sums = tl.reduce(x, axis, _later_weighs_less, keep_dims=True)
    best, place = tl.reduce((x, offs), axis, _larger_of_pairs)
    out = tl.arange(0, rows if axis else columns)
    tl.store(sums_ptr + (out[:, None] if axis else out[None]), sums)
    tl.store(best_ptr + out, best)
    tl.store(place_ptr + out, place)
    tl.store(of_all_ptr, tl.reduce(x, None, _later_weighs_less))


@pytest.mark.parametrize("axis", [0, 1])
def test_a_reduction_by_slices_is_that_of_each_element(axis: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)).half()
    size = x.shape[1 - axis]
    given = []
    for way in (reduced_by_slices, element_by_element):
        monkeypatch.setattr(interpreter.ReduceOps, "generic_reduce", way)
        out = [torch.zeros(size).half(), torch.zeros(size).half(), torch.zeros(size).int(), torch.zeros(1).half()]
        _kernel[(1,)](x, *out, *x.shape, axis)
        given.append(out)
    for ours, theirs in zip(*given, strict=True):
        assert_same_bits(ours, theirs)
    assert len(given[0][0].unique()) == size

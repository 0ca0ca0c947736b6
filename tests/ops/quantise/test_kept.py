"""Codes that a norm or an activation on a GPU writes beside its rows: those that the rows are quantised to, which who
quantises the rows next finds.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.ops.quantise import E4M3, QuantiseReduction, quantise
from vllm_batch_invariant.ops.quantise.kept import kept

LENGTHS = 128, 256, 1000, 2048, 2880, 4096, 8192
ROWS = 1, 3, 9


@pytest.fixture(autouse=True)
def on_a_gpu(device) -> None:
    if device.name == "cpu":
        pytest.skip("a CPU's kernels keep no codes")


def of(dtype: torch.dtype) -> QuantiseReduction:
    return QuantiseReduction.of_dtype(dtype, E4M3, 128)


def assert_kept(out: torch.Tensor, expected: torch.Tensor, codes: QuantiseReduction) -> None:
    """The rows are those of a kernel without codes, and so are what a copy of them is quantised to."""
    assert_same_bits(out, expected)
    view = out.view(-1, out.shape[-1])
    found, alone = kept(view, codes), quantise(expected.clone().view_as(view), codes=E4M3, group=128)
    assert found is not None
    assert quantise(view, codes=E4M3, group=128)[0].data_ptr() == found[0].data_ptr()
    for one, other in zip(found, alone, strict=True):
        assert one.dtype == other.dtype
        assert_same_bits(*(each.view(torch.uint8) if each.dtype == E4M3 else each for each in (one, other)))


def dtype_of(device) -> torch.dtype:
    """The interpreter truncates to bf16."""
    return torch.float16 if device.is_interpreted else torch.bfloat16


def strange(x: torch.Tensor) -> torch.Tensor:
    """With a group of zeros, an outlier, and rows that are not finite."""
    x[0, : min(128, x.shape[1])] = 0
    x[-1, -1] = 3000
    if len(x) > 3:
        x[1, 0], x[2, -1] = torch.nan, torch.inf
    return x


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("has_residual", [False, True])
def test_a_norm_keeps_the_codes_of_its_rows(device, length, has_residual):
    norm, dtype = device.module("norm"), dtype_of(device)
    weight = device.draw(length, dtype=dtype, seed=1)
    for rows in ROWS:
        x = strange(device.draw(rows, length, dtype=dtype, seed=rows))
        residual = device.draw(rows, length, dtype=dtype, seed=2) if has_residual else None
        given: tuple[Any, ...] = (x, weight, 1e-6, residual, None)
        made, alone = norm.rms_norm(*given, codes=of(dtype)), norm.rms_norm(*given)
        if has_residual:
            assert_same_bits(made[1], alone[1])
            made, alone = made[0], alone[0]
        assert kept(alone, of(dtype)) is None
        assert_kept(made, alone, of(dtype))


@pytest.mark.parametrize("length", [1, 100, 128, 1000, 1408, 3072])
def test_an_activation_keeps_the_codes_of_what_it_gives(device, length):
    silu, dtype = device.module("silu"), dtype_of(device)
    for rows in ROWS:
        x = strange(2 * device.draw(rows, 2 * length, dtype=dtype, seed=rows))
        assert_kept(silu.silu_and_mul(x, codes=of(dtype)), silu.silu_and_mul(x), of(dtype))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[:1],
        lambda x: x[:, :128].contiguous(),
        lambda x: x.clone(),
        lambda x: x.t().contiguous().t(),
        lambda x: x.view(1, -1),
    ],
    ids=["a row", "columns", "a copy", "columns first", "another length"],
)
def test_of_other_rows_nothing_is_found(device, read: Callable[[torch.Tensor], torch.Tensor]):
    dtype = dtype_of(device)
    x = device.draw(2, 512, dtype=dtype)
    made = device.module("silu").silu_and_mul(x, codes=of(dtype))
    assert kept(made, of(dtype)) is not None
    assert kept(made, QuantiseReduction.of_dtype(dtype, E4M3)) is None
    assert kept(read(made), of(dtype)) is None
    codes = quantise(made, codes=E4M3, group=128)[0]
    assert quantise(read(made), codes=E4M3, group=128)[0].data_ptr() != codes.data_ptr()


@pytest.mark.parametrize("shape", [(0, 512), (2, 0, 512), (1, 3, 200), (2, 3, 512)], ids=str)
def test_rows_are_found_in_any_shape(device, shape: tuple[int, ...]):
    """Also none, and scales whose rows lie side by side."""
    *rows, length = shape
    x = device.draw(*(max(row, 1) for row in rows), 2 * length, dtype=dtype_of(device))[: rows[0]]
    x = x[:, : rows[1]].contiguous() if len(rows) > 1 else x
    made = device.module("silu").silu_and_mul(x, codes=of(x.dtype))
    for view in (made, made.view(1, *shape), made.view(math.prod(rows), length)):
        codes, scales = quantise(view, codes=E4M3, group=128)
        assert codes.shape == view.shape
        assert scales.shape == (*view.shape[:-1], -(-length // 128))
        assert_same_bits(scales, quantise(view.clone(), codes=E4M3, group=128)[1])


def test_codes_of_whole_rows_are_not_kept(device):
    """A program of an activation has no whole row; and rows of a norm may be longer than its tile."""
    dtype, whole = dtype_of(device), QuantiseReduction.of_dtype(dtype_of(device), E4M3)
    x = device.draw(2, 512, dtype=dtype)
    assert kept(device.module("silu").silu_and_mul(x, codes=whole), whole) is None
    norm = device.module("norm")
    for length in (64, 16_640):
        rows = device.draw(1, length, dtype=dtype)
        assert kept(norm.rms_norm(rows, None, 1e-6, None, None, codes=of(dtype)), of(dtype)) is None

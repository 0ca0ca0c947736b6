"""Elementwise functions: an element has the same bits wherever in a tensor it lies."""

import pytest
import torch

from tests.assertions import DTYPES, assert_same_bits
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.ops.pointwise import BINARY, UNARY
from vllm_batch_invariant.ops.pointwise.cpu import padded_size

EXTRA = {"pow.Tensor_Scalar": (3.3,), "softplus_backward": (1.0, 20.0), "elu": (1.0, 1.0, 1.0)}
STARTS_AND_ROWS = [(start, rows) for start in (0, 1, 3) for rows in (1, 2, 3, 5, 7, 64, 100, 297)]


def apply(name: str, x: torch.Tensor) -> torch.Tensor:
    base, _, overload = name.partition(".")
    function = getattr(getattr(torch.ops.aten, base), overload or "default")
    return function(*[x] * (2 if name in BINARY else 1), *EXTRA.get(name, ()))


def positive(rows: int, length: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, length, generator=torch.Generator().manual_seed(0)).abs() * 3 + 0.01).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_an_element_has_the_same_bits_at_every_place(name: str, dtype: torch.dtype) -> None:
    x = positive(300, 777, dtype)
    x = x / (1 + x) if name == "atanh" else x
    with batch_invariant_mode():
        whole = apply(name, x)
        for start, rows in STARTS_AND_ROWS:
            part = apply(name, x[start : start + rows].contiguous())
            assert_same_bits(part, whole[start : start + rows], f"rows {start} to {start + rows}")
        for rows in (64, 100, 128):  # a column, whose elements lie apart; of 64 and 128 no vector is filled up
            assert_same_bits(apply(name, x[:rows, 5]), whole[:rows, 5], f"a column of {rows}")
    stock = apply(name, x.float()).to(dtype) if name == "special_i0e" else apply(name, x)  # whose tail is less exact
    torch.testing.assert_close(whole, stock)


@pytest.mark.parametrize(
    ("name", "dtype"), [("silu", torch.float32), ("sigmoid", torch.float32), ("rsqrt", torch.bfloat16)]
)
def test_stock_functions_fail_the_same_sweep(name: str, dtype: torch.dtype) -> None:
    x = positive(300, 777, dtype)
    whole = apply(name, x)
    assert any(
        not torch.equal(apply(name, x[s : s + rows].contiguous()), whole[s : s + rows]) for s, rows in STARTS_AND_ROWS
    )


def test_every_thread_gets_whole_vectors() -> None:
    for threads in (1, 2, 3, 7, 64):
        for elements in (1, 63, 64, 65, 32768, 32769, 100_001, 10_000_019):
            size = padded_size(elements, threads)
            used = min(threads, -(-size // 32768))
            share = -(-size // used)
            assert size >= elements
            assert share % 64 == 0
            assert size % 64 == 0
            assert size - elements < 64 * (threads + 1)


def test_strided_and_empty_tensors_keep_their_shape() -> None:
    x = positive(6, 8, torch.float32)
    with batch_invariant_mode():
        assert_same_bits(torch.nn.functional.silu(x[:, ::2]), torch.nn.functional.silu(x)[:, ::2])
        assert torch.nn.functional.silu(x[:0]).shape == (0, 8)
        assert torch.sigmoid(torch.arange(3)).dtype == torch.float32

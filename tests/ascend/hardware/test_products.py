"""Products: a row has the same bits alone and in any batch, in every variant."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from tests.ascend.hardware.sweep import COUNTS, ROWS, assert_rows_keep_their_bits, draw
from tests.assertions import DTYPES, assert_same_bits
from vllm_batch_invariant import batch_invariant_mode
from vllm_batch_invariant.ops.common.cancelling import cancelling
from vllm_batch_invariant.ops.linear import bmm, linear, mm, prepare
from vllm_batch_invariant.ops.linear.spec import spec_of

Tensor = torch.Tensor

SHAPES = ((768, 4096), (100, 300), (1, 512), (17, 1))
"""(N, K): narrow and deep, where a library would split K, odd, a single column, a single term."""
WIDE_AND_DEEP = ((896, 4864), (2560, 2048))
MANY_COUNTS = (*COUNTS, 1000, 2047, 2048, 2049, 4095, 4096)
KINDS = ("random", "cancelling")

VARIANTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "@": lambda x, w, b: x @ w.t(),
    "matmul": lambda x, w, b: torch.matmul(x, w.t()),
    "matmul, 3-d": lambda x, w, b: torch.matmul(x[:, None], w.t())[:, 0],
    "matmul, out": lambda x, w, b: torch.matmul(x, w.t(), out=x.new_zeros(len(x), len(w))),
    "mm": lambda x, w, b: torch.mm(x, w.t()),
    "mm, out": lambda x, w, b: torch.mm(x, w.t(), out=x.new_zeros(len(x), len(w))),
    "addmm": lambda x, w, b: torch.addmm(b, x, w.t()),
    "addmm, scaled": lambda x, w, b: torch.addmm(b, x, w.t(), beta=0.5, alpha=2.0),
    "bmm": lambda x, w, b: torch.bmm(x[None], w.t()[None])[0],
    "bmm, an entry a row": lambda x, w, b: torch.bmm(x[:, None], w.t().expand(len(x), -1, -1))[:, 0],
    "baddbmm": lambda x, w, b: torch.baddbmm(b, x[None], w.t()[None])[0],
    "baddbmm, an entry a row": lambda x, w, b: torch.baddbmm(b, x[:, None], w.t().expand(len(x), -1, -1))[:, 0],
    "linear": lambda x, w, b: F.linear(x, w),
    "linear, bias": lambda x, w, b: F.linear(x, w, b),
    "linear, 3-d, bias": lambda x, w, b: F.linear(x[:, None], w, b)[:, 0],
    "einsum": lambda x, w, b: torch.einsum("mk,nk->mn", x, w),
    "matrix @ vector": lambda x, w, b: x @ w[0],
}


def operands(kind: str, rows: int, columns: int, depth: int, dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """x [rows, depth], weight [columns, depth] and bias [columns]: random ones, or such whose product is rounding error
    and nothing else, with a bias of its size.
    """
    bias = draw(columns, seed=2, device=device)
    if kind == "random":
        x, weight = (draw(n, depth, dtype=dtype, device=device, seed=n) for n in (rows, columns))
        return x, weight, bias.to(dtype)
    x, weight = (tensor.to(device) for tensor in cancelling(rows, columns, depth, dtype, "cpu"))
    return x, weight, (bias * 2**-24 * depth).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_row_has_the_same_bits_in_any_batch_in_every_variant(variant, dtype, device):
    for kind in KINDS:
        x, weight, bias = operands(kind, 130, 96, 640, dtype, device)
        with batch_invariant_mode(), torch.no_grad():
            assert_rows_keep_their_bits(lambda x, w=weight, b=bias: VARIANTS[variant](x, w, b), x)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), SHAPES)
def test_a_row_has_the_same_bits_in_any_batch_for_every_shape_of_weight(columns, depth, dtype, biased, device):
    for kind in KINDS if depth > 1 else KINDS[:1]:
        x, weight, bias = operands(kind, ROWS, columns, depth, dtype, device)
        prepare(weight, ROWS, spec_of(biased))
        assert_rows_keep_their_bits(lambda x, w=weight, b=bias if biased else None: linear(x, w, b), x)


@pytest.mark.npu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), WIDE_AND_DEEP)
def test_a_row_has_the_same_bits_alone_and_among_thousands(columns, depth, dtype, npu):
    for kind in KINDS:
        x, weight, bias = operands(kind, 4097, columns, depth, dtype, npu)
        assert_rows_keep_their_bits(lambda x, w=weight, b=bias: linear(x, w, b), x, counts=MANY_COUNTS)


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_entry_of_a_batched_product_has_the_bits_of_a_product(dtype, device):
    a, b = draw(70, 21, 48, dtype=dtype, device=device), draw(70, 48, 33, dtype=dtype, device=device, seed=1)
    assert_rows_keep_their_bits(bmm, a, b)
    assert_rows_keep_their_bits(lambda rows: bmm(rows.transpose(0, 1), b).transpose(0, 1), a.transpose(0, 1))
    whole = bmm(a, b)
    for entry in (0, 4, 69):
        assert_same_bits(mm(a[entry], b[entry]), whole[entry], f"entry {entry}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_strides_move_no_bit(dtype, device):
    x, weight, bias = operands("cancelling", 130, 96, 640, dtype, device)
    every_second, by_columns = x.repeat_interleave(2, 1)[:, ::2], weight.t().contiguous().t()
    expected = linear(x, weight, bias)
    for rows in (130, 1, 17):
        for name, form in {"x": (every_second, weight), "weight": (x, by_columns)}.items():
            assert_same_bits(
                linear(form[0][:rows], form[1], bias), expected[:rows], f"{rows} rows, {name} with strides"
            )


def test_neighbours_of_nan_and_infinity_do_not_reach_a_row(device):
    x, weight, bias = operands("random", 40, 128, 256, torch.bfloat16, device)
    clean = linear(x, weight, bias)[::2]
    x[1::2] = torch.nan
    x[3] = torch.inf
    assert_same_bits(linear(x, weight, bias)[::2], clean)

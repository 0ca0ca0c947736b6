"""GEMMs on a CPU: right, and with the same bits for a row whatever stands above, below or beside it."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.assertions import DTYPES, ROW_COUNTS, assert_near, assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops import linear as operation
from vllm_batch_invariant.ops.all_reduce import add_ranks
from vllm_batch_invariant.ops.dispatch import implementation
from vllm_batch_invariant.ops.linear import (
    LinearReduction,
    MatmulSpec,
    bmm,
    cpu,
    cpu_kernel,
    gated_linear,
    linear,
    matmul,
    mm,
    reference,
)
from vllm_batch_invariant.ops.linear.spec import BIASED, EPILOGUES, GATED
from vllm_batch_invariant.ops.silu import silu_and_mul

SHAPES = ((256, 768), (768, 256), (100, 300), (1, 512), (3, 77), (1024, 1024))
"""(N, K): wide, narrow, odd, a single column."""
EVERY = (*map(MatmulSpec, EPILOGUES), MatmulSpec(k_slices=4))
"""Of a weight that is stored itself; the others have their bits (tests/ops/formats)."""


def operands(m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(m * 7919 + n * 31 + k)
    x = torch.randn(m, k, generator=generator).to(dtype)
    weight = torch.randn(n, k, generator=generator).to(dtype)
    return x, weight, torch.randn(n, generator=generator).to(dtype)


def of_spec(spec: MatmulSpec, m: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, tuple]:
    """x, and the other arguments of a matmul that has N columns, or 2 * N before its epilogue."""
    x, weight, bias = operands(m, 2 * n if spec.epilogue.gated else n, k - k % spec.k_slices, dtype)
    return x, (weight, spec, bias if spec.epilogue.has_bias else None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_a_row_has_the_same_bits_at_every_batch_size(spec: MatmulSpec, n: int, k: int, dtype: torch.dtype) -> None:
    x, rest = of_spec(spec, 1000, n, k, dtype)
    whole = matmul(x, *rest)
    for m in ROW_COUNTS:
        assert_same_bits(matmul(x[:m], *rest), whole[:m], f"{m} rows")
        assert_same_bits(matmul(x[1000 - m :], *rest), whole[1000 - m :], f"last {m} rows")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_a_row_has_the_same_bits_at_every_position(spec: MatmulSpec, dtype: torch.dtype) -> None:
    x, rest = of_spec(spec, 257, 384, 640, dtype)
    whole = matmul(x, *rest)
    for seed in range(5):
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        assert_same_bits(matmul(x[order], *rest), whole[order], f"permutation {seed}")


@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_neighbours_of_nan_and_infinity_do_not_reach_a_row(spec: MatmulSpec) -> None:
    x, rest = of_spec(spec, 40, 128, 256)
    clean = matmul(x, *rest)
    x[1::2] = float("nan")
    x[3] = float("inf")
    assert_same_bits(matmul(x, *rest)[::2], clean[::2])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_the_number_of_threads_is_the_same_for_every_batch_size(spec: MatmulSpec, count: int, threads) -> None:
    threads(count)
    x, rest = of_spec(spec, 300, 512, 768)
    whole = matmul(x, *rest)
    for m in (1, 2, 3, 16, 17, 33, 100, 299):
        assert_same_bits(matmul(x[:m], *rest), whole[:m], f"{m} rows, {count} threads")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("n", "k"), SHAPES)
@pytest.mark.parametrize("spec", EVERY, ids=str)
def test_results_are_near_the_float64_reference(spec: MatmulSpec, n: int, k: int, dtype: torch.dtype) -> None:
    x, rest = of_spec(spec, 37, n, k, dtype)
    assert_near(matmul(x, *rest), reference.matmul(x, *rest), 4)


def test_a_spelling_has_the_bits_of_the_matmul_that_it_stands_for() -> None:
    x, weight, bias = operands(5, 64, 96)
    assert_same_bits(linear(x, weight), matmul(x, weight))
    assert_same_bits(linear(x, weight, bias), matmul(x, weight, BIASED, bias))
    assert_same_bits(linear(x, weight, bias, k_slices=4), matmul(x, weight, MatmulSpec(k_slices=4)) + bias)
    assert_same_bits(mm(x, weight.t(), bias), matmul(x, weight, BIASED, bias))
    assert_same_bits(gated_linear(x, weight), silu_and_mul(linear(x, weight)))
    assert gated_linear(x.view(5, 1, 96), weight).shape == (5, 1, 32)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 70), st.integers(0, 90), st.integers(0, 90), st.booleans(), st.booleans())
def test_any_shape_and_layout_is_right_and_invariant(m: int, n: int, k: int, turned_a: bool, turned_b: bool) -> None:
    generator = torch.Generator().manual_seed(m + 100 * n + 10000 * k)
    a = torch.randn((k, m) if turned_a else (m, k), generator=generator)
    b = torch.randn((n, k) if turned_b else (k, n), generator=generator)
    a, b = a.t() if turned_a else a, b.t() if turned_b else b
    out = mm(a, b)
    assert out.shape == (m, n)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), atol=1e-4, rtol=1e-4)
    if m > 1:
        assert_same_bits(mm(a[m // 2 :], b), out[m // 2 :])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_row_has_the_same_bits_at_every_place_of_a_tile_whatever_n_is(dtype: torch.dtype) -> None:
    x, weight, _ = operands(67, 33, 40, dtype)
    for n in range(1, 34):
        whole = linear(x, weight[:n])
        for place in (1, 2, 31, 50):
            assert_same_bits(linear(x.roll(place, 0), weight[:n]), whole.roll(place, 0), f"N={n} moved by {place}")


def test_a_strided_or_misaligned_operand_gives_the_bits_of_a_packed_one() -> None:
    x, weight, _ = operands(20, 65, 130)
    packed = linear(x, weight)
    assert_same_bits(linear(torch.cat([x, x], 1)[:, :130], weight), packed)
    shifted = torch.empty(65 * 130 + 1)[1:].view(65, 130).copy_(weight)
    assert_same_bits(linear(x, shifted), packed)


def test_a_bmm_does_not_depend_on_the_number_of_entries() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(9, 21, 48, generator=generator), torch.randn(9, 48, 33, generator=generator)
    whole = bmm(a, b)
    for batch in range(1, 10):
        assert_same_bits(bmm(a[:batch], b[:batch]), whole[:batch])
    assert_same_bits(whole[4], mm(a[4], b[4]))
    assert_same_bits(bmm(a[:, :3], b), whole[:, :3])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_an_element_is_one_chain_of_fused_multiply_adds(dtype: torch.dtype) -> None:
    for m, n, k in ((1, 1, 1), (3, 70, 33), (29, 33, 150)) if dtype != torch.float64 else ((2, 18, 33),):
        x, weight, _ = operands(m, n, k, dtype)
        defined = reference.sums_in_order(x, weight)
        assert_same_bits(cpu.accumulate(x, weight.t()), defined, f"{m} x {n} x {k}")
        assert_same_bits(linear(x, weight), defined.to(dtype))
    assert not torch.equal(cpu.accumulate(x, weight.t()), (x.double() @ weight.double().t()).to(defined.dtype))


def test_long_k_is_one_chain_for_any_number_of_rows() -> None:
    x, weight, _ = operands(40, 40, 3 * cpu_kernel.BLOCK_K + 5)
    defined = reference.sums_in_order(x[:2], weight)
    for m in (2, 40):
        assert_same_bits(linear(x[:m], weight)[:2], defined)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_every_number_of_a_dtype_is_multiplied_as_it_is(dtype: torch.dtype) -> None:
    """Subnormal numbers, infinities and NaN among them."""
    words = torch.arange(-(2**15), 2**15, dtype=torch.int32)
    numbers = words.to(torch.int16).view(dtype) if dtype.itemsize == 2 else (words * 65537).view(dtype)
    found = linear(torch.ones(3, 1, dtype=dtype), numbers[:, None])
    expected = torch.where(numbers == 0, 0, numbers)  # a chain begins with +0
    for row in found:
        assert torch.equal(row.isnan(), numbers.isnan())
        assert_same_bits(row[~row.isnan()], expected[~numbers.isnan()])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_panels_have_the_weight_and_no_more_bits(dtype: torch.dtype) -> None:
    for n, k in ((64, 48), (33, 7), (1, 1)):
        _, weight, _ = operands(1, n, k, dtype)
        panels = cpu.prepare_weight(weight)
        assert_same_bits(panels.weight(), weight)
        assert_same_bits(cpu.prepare_weight(torch.cat([weight, weight], 1)[:, :k]).weight(), weight)
        assert_same_bits(cpu.prepare_weight(weight.t().contiguous().t()).weight(), weight)
        assert panels.data.dtype == dtype
        assert panels.data.numel() < (n + 32) * k


def test_a_prepared_weight_gives_the_bits_of_the_weight() -> None:
    for dtype in DTYPES:
        x, weight, bias = operands(19, 96, 200, dtype)
        assert_same_bits(cpu.prepared_linear(x, cpu.prepare_weight(weight), bias), linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_k_in_slices_has_the_same_bits_on_any_number_of_workers(dtype: torch.dtype) -> None:
    x, weight, bias = operands(19, 96, 256, dtype)
    prepared = cpu.prepare_weight(weight)
    whole = cpu.prepared_linear(x, prepared, None, k_slices=8)
    for workers in (2, 4, 8):
        shares = zip(x.chunk(workers, 1), weight.chunk(workers, 1), strict=True)
        sums = [
            cpu.prepared_linear(of_x, cpu.prepare_weight(of_weight), None, k_slices=8 // workers)
            for of_x, of_weight in shares
        ]
        assert_same_bits(add_ranks(torch.stack(sums), tree=True), whole, f"{workers} workers")
    assert not torch.equal(linear(x, weight), whole)
    for m in (1, 2, 17):
        assert_same_bits(cpu.prepared_linear(x[:m], prepared, None, k_slices=8), whole[:m])
    assert_near(cpu.prepared_linear(x, prepared, bias, 8), reference.linear(x, weight, bias))


def test_stock_matmuls_fail_the_same_sweep() -> None:
    x, weight, _ = operands(1000, 1024, 1024)
    whole = torch.nn.functional.linear(x, weight)
    assert any(not torch.equal(torch.nn.functional.linear(x[:m], weight), whole[:m]) for m in ROW_COUNTS)


def test_empty_results_have_their_shape() -> None:
    assert linear(torch.ones(0, 8), torch.ones(5, 8)).shape == (0, 5)
    assert_same_bits(linear(torch.ones(3, 0), torch.ones(5, 0), torch.ones(5)), torch.ones(3, 5))
    assert linear(torch.ones(3, 8), torch.ones(0, 8)).shape == (3, 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8], ids=str)
def test_other_dtypes_are_refused_by_name(dtype: torch.dtype) -> None:
    x, weight = torch.ones(3, 8).to(dtype), torch.ones(5, 8).to(dtype)
    for call in (
        lambda: linear(x, weight),
        lambda: bmm(x[None], weight.t()[None]),
        lambda: operation.prepare(weight, 64),
    ):
        with pytest.raises(NotCovered, match=f"a matmul in {dtype}"):
            call()
    with pytest.raises(ValueError, match=f"one dtype, got torch.bfloat16 and {dtype}"):
        linear(x.bfloat16(), weight)
    with pytest.raises(ValueError, match=r"one dtype, got torch\.bfloat16 and torch\.float32"):
        linear(x.bfloat16(), weight.bfloat16(), torch.ones(5))


@pytest.mark.parametrize("places", [("cuda:0", "cpu"), ("cuda:0", "cuda:1")])
def test_tensors_on_several_devices_are_refused(places: tuple[str, str]) -> None:
    tensors = [SimpleNamespace(device=torch.device(place), requires_grad=False) for place in places]
    with pytest.raises(RuntimeError, match="needs all tensors on one device"):
        implementation("linear", *tensors)


def test_bad_operands_are_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"got \[\[3, 8\], \[5, 7\]\]"):
        linear(torch.ones(3, 8), torch.ones(5, 7))
    with pytest.raises(ValueError, match=r"a bias is for a spec with one"):
        matmul(torch.ones(3, 8), torch.ones(5, 8), BIASED)
    with pytest.raises(ValueError, match=r"gated_linear takes .* got a weight with 5 rows"):
        matmul(torch.ones(3, 8), torch.ones(5, 8), GATED)
    with pytest.raises(ValueError, match="one dtype"):
        mm(torch.ones(3, 8), torch.ones(8, 5, dtype=torch.float16))
    with pytest.raises(ValueError, match="bmm takes"):
        bmm(torch.ones(3, 8), torch.ones(8, 5))
    with pytest.raises(NotCovered, match="int32"):
        mm(torch.ones(3, 8, dtype=torch.int32), torch.ones(8, 5, dtype=torch.int32))
    with pytest.raises(NotCovered, match="device 'meta'"):
        mm(torch.ones(3, 8, device="meta"), torch.ones(8, 5, device="meta"))
    with pytest.raises(RuntimeError, match="batch_invariant_mode"):
        linear(torch.ones(3, 8), torch.ones(5, 8, requires_grad=True))
    assert LinearReduction.of_device("cpu", 5, 8, torch.bfloat16).accumulate == torch.float32

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
REDUCTION = LinearReduction.of_device("cpu", 100, 300, torch.float32)


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


def test_a_prepared_weight_gives_the_bits_of_the_weight() -> None:
    for dtype in DTYPES:
        x, weight, bias = operands(19, 96, 200, dtype)
        assert_same_bits(cpu.prepared_linear(x, cpu.prepare_weight(weight), bias), linear(x, weight, bias))


@pytest.mark.parametrize("dtype", DTYPES)
def test_k_in_slices_has_the_same_bits_on_any_number_of_workers(dtype: torch.dtype) -> None:
    x, weight, bias = operands(19, 96, 256, dtype)
    prepared = cpu.prepare_parts(weight, None)
    whole = cpu.prepared_linear_of_parts(x, prepared, None, k_slices=8)
    for workers in (2, 4, 8):
        shares = zip(x.chunk(workers, 1), weight.chunk(workers, 1), strict=True)
        sums = [
            cpu.prepared_linear_of_parts(of_x, cpu.prepare_parts(of_weight, None), None, k_slices=8 // workers)
            for of_x, of_weight in shares
        ]
        assert_same_bits(add_ranks(torch.stack(sums), tree=True), whole, f"{workers} workers")
    assert not torch.equal(linear(x, weight), whole)
    for m in (1, 2, 17):
        assert_same_bits(cpu.prepared_linear_of_parts(x[:m], prepared, None, k_slices=8), whole[:m])
    assert_near(cpu.prepared_linear_of_parts(x, prepared, bias, 8), reference.linear(x, weight, bias))


@pytest.mark.parametrize("agree", [True, False])
def test_columns_have_the_bits_of_the_narrowest_part(agree: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a BLAS's columns agree follows the machine; where they do not, they are computed in parts."""
    x, weight, bias = operands(19, 96, 200)
    if not agree:
        monkeypatch.setattr(cpu, "columns_agree", lambda reduction, block_n: False)
    prepared = cpu.prepare_parts(weight, 24)
    assert len(prepared) == (1 if cpu.columns_agree(cpu.LinearReduction.of_device("cpu", 96, 200, x.dtype), 24) else 4)
    parts = [linear(x, part, of_bias) for part, of_bias in zip(weight.split(24), bias.split(24), strict=True)]
    assert_same_bits(cpu.prepared_linear_of_parts(x, prepared, bias), torch.cat(parts, 1))


def test_a_size_of_tiles_that_moves_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    stock, usual = cpu._blas, cpu.verified_block_ms(REDUCTION)

    def varies_from_64_rows(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        halves = stock(a[:, ::2].contiguous(), b[::2].contiguous()) + stock(
            a[:, 1::2].contiguous(), b[1::2].contiguous()
        )
        return halves if len(a) >= 64 else stock(a, b)

    monkeypatch.setattr(cpu, "_blas", varies_from_64_rows)
    cpu.verified_block_ms.cache_clear()
    assert cpu.verified_block_ms(REDUCTION) == tuple(size for size in usual if size < 64)
    cpu.verified_block_ms.cache_clear()


def test_a_blas_is_refused_whose_bits_follow_the_place_in_the_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = cpu._blas

    def varies_with_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = stock(a, b)
        out[0] = torch.nextafter(out[0], torch.tensor(torch.inf))
        return out

    monkeypatch.setattr(cpu, "_blas", varies_with_place)
    cpu.verified_block_ms.cache_clear()
    with pytest.raises(RuntimeError, match="not possible with it"):
        cpu.verified_block_ms(REDUCTION)
    cpu.verified_block_ms.cache_clear()


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

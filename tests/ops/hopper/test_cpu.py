"""What is computed fast on a CPU has the bits of the definition of a Hopper's arithmetic."""

import numpy as np
import pytest
import torch

from scripts.hopper_bits import operands
from tests.ops.hopper.cases import numbers, same
from tests.ops.hopper.test_definition import KINDS, ideal
from vllm_batch_invariant.ops.exact.definition import bf16, fp32, to_bits
from vllm_batch_invariant.ops.hopper import cpu, decoder, definition, sampling
from vllm_batch_invariant.ops.norm.reduction import NormReduction


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("m", "n", "k"), [(7, 33, 96), (300, 5, 40), (5, 16, 1040)])
def test_products_have_the_bits_of_the_definition(kind: str, m: int, n: int, k: int) -> None:
    rng = np.random.default_rng(m)
    [(a, b)] = [(a, b) for name, a, b in operands(rng, m, n, k) if name == kind]
    c = (rng.standard_normal((m, n)) * np.exp2(rng.integers(-40, 40, (m, n)))).astype(fp32)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in (None, c):
            assert same(cpu.mma(a, b, start), definition.mma(a, b, start))


def test_products_are_cut_and_not_rounded() -> None:
    a, b = numbers(1, 30, 64), numbers(2, 30, 64)
    assert not same(cpu.mma(a, b), (a.astype(np.float64) @ b.T.astype(np.float64)).astype(fp32))


def test_functions_have_the_bits_of_the_definition() -> None:
    rng = np.random.default_rng(0)
    x = (np.exp2(rng.uniform(-140, 9, (64, 1000))) * rng.choice((-1.0, 1.0), (64, 1000))).astype(fp32)
    x[0, :9] = 0, -0.0, np.inf, -np.inf, np.nan, -126, -126.00001, 128, 1e-40
    with np.errstate(all="ignore"):
        assert same(cpu.exp(x, ideal()), definition.exp(x, ideal()))
        assert same(cpu.silu_and_mul(bf16(x), ideal()), definition.silu_and_mul(bf16(x), ideal()))
        assert same(cpu.gelu_and_mul(bf16(x), ideal()), definition.gelu_and_mul(bf16(x), ideal()))


@pytest.mark.parametrize("adds_one", [False, True])
@pytest.mark.parametrize("shape", [(9, 64), (5, 3, 128), (30, 256), (7, 576), (3, 4096), (2, 5120)])
def test_norms_have_the_bits_of_the_definition(shape: tuple[int, ...], adds_one: bool) -> None:
    x, residual, weight = numbers(1, *shape), numbers(2, *shape), numbers(3, shape[-1])
    reduction = NormReduction.of_device("cuda", shape[-1], torch.bfloat16)
    for given in ((weight, 1e-6, residual), (weight, 1e-5, None), *[(None, 1e-6, residual)] * (not adds_one)):
        found, right = (one.rms_norm(x, *given, reduction, adds_one) for one in (cpu, definition))
        assert same(found[0], right[0])
        assert same(found[1], right[1])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("m", "n", "k", "k_slices"), [(300, 37, 520, 1), (5, 16, 512, 4), (1, 5000, 64, 1)])
def test_a_layer_writes_its_columns_and_no_others(m: int, n: int, k: int, k_slices: int) -> None:
    x, weight, bias = numbers(1, m, k), numbers(2, n, k), None if k_slices > 1 else numbers(3, n)
    found, right = np.full((2, m, n + 9), fp32(7))
    cpu.linear(x, to_bits(weight), bias, k_slices, found, 4)
    decoder.linear(x, to_bits(weight), bias, k_slices, right, 4)
    assert same(found, right)
    assert same(found[:, 4:-5], definition.linear(x, weight, bias, k_slices))
    assert (found[:, :4] == 7).all()
    assert (found[:, -5:] == 7).all()


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("peaks", [1, 8])
@pytest.mark.parametrize(
    ("rows", "keys", "heads", "kv_heads", "size"),
    [(1, 1, 2, 1, 64), (70, 300, 4, 2, 64), (300, 300, 6, 3, 128), (1, 2500, 4, 1, 128)],
)
def test_attention_has_the_bits_of_the_definition(
    rows: int, keys: int, heads: int, kv_heads: int, size: int, peaks: int
) -> None:
    q = bf16(numbers(1, rows, heads, size) * fp32(peaks))
    k, v = numbers(2, keys, kv_heads, size), numbers(3, keys, kv_heads, size)
    found = cpu.attention(q, k, v, size**-0.5, ideal())
    assert same(found, definition.attention(q, k, v, size**-0.5, ideal()))
    if keys > 1:
        assert not same(found, definition.attention(q, k[::-1], v[::-1], size**-0.5, ideal()))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("rows", "keys", "size", "window", "soft_cap"),
    [(300, 300, 64, 50, None), (40, 700, 256, 100, None), (90, 300, 64, None, 5.0), (30, 300, 128, 70, 3.0)],
)
def test_attention_with_a_window_and_a_soft_cap_has_the_bits_of_the_definition(
    rows: int, keys: int, size: int, window: int | None, soft_cap: float | None
) -> None:
    q, k, v = bf16(numbers(1, rows, 4, size) * fp32(3)), numbers(2, keys, 2, size), numbers(3, keys, 2, size)
    found, right = (one.attention(q, k, v, size**-0.5, ideal(), window, soft_cap) for one in (cpu, definition))
    assert same(found, right)
    assert not same(found, definition.attention(q, k, v, size**-0.5, ideal()))


@pytest.mark.parametrize("count", [0, 1, 5, 99, 100, 200])
def test_the_largest_of_equal_numbers_are_the_first(count: int) -> None:
    x = np.random.default_rng(count).integers(0, 9, 100).astype(fp32)
    x[::7], x[::11] = -np.inf, np.inf
    for some in (x, np.where(x == 3, fp32(np.nan), x)):
        assert np.array_equal(sampling.largest(some, count), np.argsort(-some, kind="stable")[:count])

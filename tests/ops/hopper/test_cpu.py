"""What is computed fast on a CPU has the bits of the definition of a Hopper's arithmetic."""

import numpy as np
import pytest
import torch

from scripts.hopper_bits import operands
from tests.ops.hopper.cases import numbers, same
from tests.ops.hopper.test_definition import KINDS, ideal
from vllm_batch_invariant.ops.exact.definition import bf16, fp32
from vllm_batch_invariant.ops.hopper import cpu, definition


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

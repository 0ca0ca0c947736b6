"""Arithmetic in the browser gives numpy's bits: rounding, sums in every order that a page has, and random numbers."""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

ml_dtypes = pytest.importorskip("ml_dtypes")

DTYPES = {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16)}
RANDOM = np.random.default_rng(0)


@pytest.fixture
def compute(opened: Callable[..., Any]) -> Callable[..., Any]:
    """Evaluates an expression of the modules' names and of ``given``, in the browser."""
    page = opened("assets/licences.txt")  # any page of this origin

    def compute(expression: str, given: object = None) -> Any:
        return page.evaluate(
            f"""async (given) => {{
                const floats = await import("/src/floats.js"), numbers = await import("/src/numbers.js");
                const {{ FORMATS, rounded, encoded, sumOf, blockedSum, lanesSum, partialSums, distance }} = floats;
                const as = (words) => new Float64Array(new BigUint64Array(words.map(BigInt)).buffer);
                return {expression};
            }}""",
            given,
        )

    return compute


def words(numbers: Sequence[float] | np.ndarray) -> list[str]:
    """Bits of float64, in digits: what no step on the way to the browser can change."""
    return [str(word) for word in np.asarray(numbers, np.float64).view(np.uint64)]


def bits(numbers: np.ndarray) -> list[int]:
    return numbers.view(f"u{numbers.itemsize}").tolist()


def patterns(name: str, count: int) -> np.ndarray:
    """Finite numbers of a format with random bits, a third of them subnormal."""
    dtype = DTYPES[name]
    unsigned = np.dtype(f"u{dtype.itemsize}")
    found = RANDOM.integers(0, 1 << 8 * dtype.itemsize, count, dtype=np.uint64).astype(unsigned)
    fraction = np.finfo(dtype).nmant if name != "bf16" else 7
    keep = (1 << fraction) - 1 | 1 << (8 * dtype.itemsize - 1)
    found[::3] &= unsigned.type(keep)
    numbers = found.view(dtype)
    with np.errstate(invalid="ignore"):  # of NaN that signal
        return numbers[np.isfinite(numbers.astype(np.float64))]


def doubles(name: str) -> np.ndarray:
    """Numbers to round: between neighbours of the format, exactly half-way, a bit beside that, and around its ends."""
    near = patterns(name, 2000).astype(np.float64)
    step = np.abs(patterns(name, 2000).astype(np.float64)[: len(near)])
    largest = float(ml_dtypes.finfo(DTYPES[name]).max)
    least = float(ml_dtypes.finfo(DTYPES[name]).smallest_subnormal)
    upwards = np.nextafter(near.astype(DTYPES[name]), DTYPES[name].type(math.inf)).astype(np.float64)
    half = near + (upwards - near) / 2
    ends = [0.0, -0.0, math.inf, -math.inf, largest, -largest, least, least / 2, -least / 2, least * 1.5, 1e300, -1e300]
    ends += [math.nextafter(least / 2, 1), largest * (1 + 2.0**-30), 5e-324]
    found = np.concatenate(
        [near, half, np.nextafter(half, math.inf), np.nextafter(half, -math.inf), near[: len(step)] * 1.1]
    )
    return np.concatenate([found[np.isfinite(found)], ends])


def nearest(x: float, name: str) -> float:
    """By exact arithmetic: the nearest number of the format, ties to even."""
    info = ml_dtypes.finfo(DTYPES[name])
    if not math.isfinite(x) or x == 0:
        return x
    exponent = max(math.frexp(x)[1] - 1, info.minexp)
    unit = Fraction(2) ** (exponent - info.nmant)
    result = round(Fraction(x) / unit) * unit
    if abs(result) >= Fraction(2) ** info.maxexp:
        return math.copysign(math.inf, x)
    return math.copysign(float(result), x)


@pytest.mark.parametrize("name", DTYPES)
def test_a_number_is_rounded_to_the_nearest_once(name: str, compute: Callable[..., Any]) -> None:
    given = doubles(name)
    found = compute(f"Array.from(as(given), (x) => encoded(rounded(x, FORMATS.{name}), FORMATS.{name}))", words(given))
    expected = np.array([nearest(float(x), name) for x in given], np.float64).astype(DTYPES[name])
    assert found == bits(expected)
    if name != "bf16":  # numpy rounds float64 to bfloat16 by way of float32
        with np.errstate(over="ignore"):
            assert bits(expected) == bits(given.astype(DTYPES[name]))


@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_the_browsers_own_rounding_has_the_same_bits(name: str, compute: Callable[..., Any]) -> None:
    own = {"fp32": "Math.fround", "fp16": "(Math.f16round ?? ((x) => rounded(x, FORMATS.fp16)))"}[name]
    assert compute(f"as(given).every((x) => Object.is({own}(x), rounded(x, FORMATS.{name})))", words(doubles(name)))


@pytest.mark.parametrize("name", DTYPES)
def test_every_partial_sum_has_numpys_bits(name: str, compute: Callable[..., Any]) -> None:
    terms = patterns(name, 3000)
    terms = terms[np.abs(terms.astype(np.float64)) < float(ml_dtypes.finfo(DTYPES[name]).max) / 64]
    expected = np.empty_like(terms)
    total = DTYPES[name].type(0)
    for place, term in enumerate(terms):
        expected[place] = total = DTYPES[name].type(total + term)
    found = compute(
        f"partialSums(as(given), FORMATS.{name}).map((x) => encoded(x, FORMATS.{name}))",
        words(terms.astype(np.float64)),
    )
    assert found == bits(expected)


def in_order(terms: np.ndarray) -> np.generic:
    return np.add.accumulate(terms)[-1]


@pytest.mark.parametrize("name", DTYPES)
def test_blocks_and_lanes_add_as_numpy_does(name: str, compute: Callable[..., Any]) -> None:
    terms = (2 * RANDOM.random(4096, np.float32) - 1).astype(DTYPES[name])
    given = words(terms.astype(np.float64))
    for block in (64, 256):
        expected = in_order(np.array([in_order(part) for part in terms.reshape(-1, block)]))
        found = compute(f"encoded(blockedSum(as(given), {block}, FORMATS.{name}), FORMATS.{name})", given)
        assert [found] == bits(np.array([expected], DTYPES[name]))
    lanes = np.add.accumulate(terms.reshape(-1, 64))[-1]
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    found = compute(f"encoded(lanesSum(as(given), 64, FORMATS.{name}), FORMATS.{name})", given)
    assert [found] == bits(lanes)


def test_the_distance_to_the_exact_sum_is_exact(compute: Callable[..., Any]) -> None:
    terms = patterns("fp32", 500).astype(np.float64)
    exact = sum(map(Fraction, terms.tolist()))
    for total in (float(exact), 0.0, math.nextafter(float(exact), 0), 5e-324):
        found = compute(
            "distance(as(given.total)[0], floats.exactSum(as(given.terms)))",
            {"terms": words(terms), "total": words([total])},
        )
        assert found == pytest.approx(float(Fraction(total) - exact), rel=1e-15, abs=0)


def test_random_numbers_are_those_of_the_generator_that_pytorch_uses(compute: Callable[..., Any]) -> None:
    """torch.rand takes the low 24 bits of each word; numpy's RandomState is the same MT19937."""
    drawn = np.random.RandomState(5).randint(0, 1 << 32, 2000, dtype=np.uint64) % (1 << 24)
    expected = drawn / 2.0**23 - 1
    assert compute("Array.from(numbers.uniform(2000, 5, Math.fround))") == expected.tolist()

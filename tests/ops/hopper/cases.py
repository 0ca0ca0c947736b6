"""Operands and comparisons of tests of a Hopper's arithmetic."""

from fractions import Fraction

import numpy as np

from vllm_batch_invariant.ops.exact.definition import Floats, bf16, fp32


def numbers(seed: int, *shape: int) -> Floats:
    """Standard normal numbers in bf16."""
    return bf16(np.random.default_rng(seed).standard_normal(shape).astype(fp32))


def same(found: Floats, defined: Floats) -> bool:
    """Whether all bits are equal; NaN is NaN."""
    found, defined = (np.ascontiguousarray(one, fp32) for one in (found, defined))
    equal = found.view(np.uint32) == defined.view(np.uint32)
    return found.shape == defined.shape and bool((equal | (np.isnan(found) & np.isnan(defined))).all())


def _exponent(x: np.float32) -> int:
    """Of a number's field; of a subnormal number the smallest."""
    return max(int(np.array(x, fp32).view(np.uint32)) >> 23 & 255, 1) - 127


def _cut(x: Fraction, unit: Fraction) -> Fraction:
    """x as a multiple of a unit, towards 0."""
    whole = abs(x) // unit * unit
    return whole if x >= 0 else -whole


def step_in_fractions(a: Floats, b: Floats, c: np.float32) -> np.float32:
    """One output of one instruction of the tensor core by exact fractions: of finite a [16], b [16] and c."""
    terms = [(Fraction(float(x)) * Fraction(float(y)), _exponent(x) + _exponent(y)) for x, y in zip(a, b, strict=True)]
    terms = [term for term in [*terms, (Fraction(float(c)), _exponent(c))] if term[0]]
    if not terms:
        return fp32(0)
    unit = Fraction(2) ** (max(exponent for _, exponent in terms) - 25)
    total = sum((_cut(term, unit) for term, _ in terms), Fraction(0))
    if not total:
        return fp32(0)
    power = 0  # of the largest power of two that is no larger
    while Fraction(2) ** power > abs(total):
        power -= 1
    while Fraction(2) ** (power + 1) <= abs(total):
        power += 1
    cut = _cut(total, Fraction(2) ** (max(power, -126) - 23))
    largest = Fraction(float(np.finfo(fp32).max))
    return fp32(float(max(min(cut, largest), -largest)))

"""What exact products on a Hopper rest on besides the compiler: sums that fit, and a sum that is rounded once."""

import numpy as np
import pytest

from vllm_batch_invariant.ops.exact import definition
from vllm_batch_invariant.ops.exact.schedule import HOPPER_SCHEDULES, hopper_schedule

SHARED_MEMORY, RESERVED = 233_472, 1024
"""Bytes of a multiprocessor's on a Hopper, and of them each program's besides its own."""
DRAW = np.random.default_rng(1)


def digits(integers: np.ndarray) -> list[np.ndarray]:
    """x2, x1 and x0, as int64."""
    found = []
    for _ in range(2):
        found.append((integers + 128) % 256 - 128)
        integers = (integers - found[-1]) // 256
    return [integers, *found[::-1]]


def by_int32(x: np.ndarray, w: np.ndarray) -> np.ndarray:
    """fp32 of the products of rows as the kernel computes them; every step is asserted to fit an int32."""

    def fits(sums: np.ndarray) -> np.ndarray:
        assert np.abs(sums).max() < 2**31
        return sums

    (x2, x1, x0), (_, w1, w0) = digits(x), digits(w)
    hi, mid, lo = fits(x1 @ w1.T), fits(x1 @ w0.T + x0 @ w1.T), fits(x0 @ w0.T)
    low = fits(lo + ((mid & 255) << 8))
    high, low = fits(hi + (mid >> 8) + (low >> 16)), low & 0xFFFF
    high = fits(high + fits(fits(x2 @ w1.T << 8) + x2 @ w0.T))
    upper, lower = high >> 8, (high & 255) << 16 | low
    assert max(np.abs(upper).max(), lower.max()) <= 2**24
    return upper.astype(np.float32) * np.float32(2**24) + lower.astype(np.float32)


@pytest.mark.parametrize("length", [128, 4096, definition.LARGEST_K])
def test_a_sum_in_two_int32_is_rounded_as_one_in_int64(length):
    """At the bounds of two digits, of small rows whose sums are near 0, and of rows with as many third digits as the
    definition leaves.
    """
    signs = DRAW.choice([-1, 1], length)
    two = np.full(length, definition.TWO_DIGITS)
    w = np.stack([two, -two, signs * two, DRAW.integers(-32_639, 32_640, length)])
    values = DRAW.standard_normal((8, length)).astype(np.float32)
    values[::2, DRAW.integers(0, length, 3)] *= 1e6
    values[1, :] *= np.exp(3 * DRAW.standard_normal(length)).astype(np.float32)
    rows = definition.activations(definition.bf16(values)).integers.reshape(8, length).astype(np.int64)
    assert np.abs(rows).max() > definition.TWO_DIGITS
    x = np.concatenate((w, rows, DRAW.integers(-3, 4, (4, length))))
    assert np.array_equal(by_int32(x, w), (x @ w.T).astype(np.float32))


@pytest.mark.parametrize("tile", HOPPER_SCHEDULES, ids=str)
def test_the_programs_of_a_multiprocessor_fit_its_shared_memory(tile):
    barriers = 1024
    assert tile.ctas_per_sm * (tile.shared_memory + barriers + RESERVED) <= SHARED_MEMORY


def test_every_number_of_rows_has_a_tile_that_is_certified():
    for parts in (1, 8):
        for n in (64, 4096, 151_936):
            found = [hopper_schedule(m, n, parts, 132) for m in range(1, 5000)]
            assert set(found) <= set(HOPPER_SCHEDULES)


def test_tiles_of_segments_are_small_while_all_of_them_run_at_once():
    assert [hopper_schedule(m, 4096, 8, 132).block_m for m in (32, 64, 65)] == [32, 32, 64]
    assert [hopper_schedule(m, 1024, 8, 132).block_m for m in (64, 256, 257)] == [32, 32, 64]
    assert hopper_schedule(64, 4096, 1, 132).block_m == 64

"""Tables of special functions survive their file, and what a file cannot hold is refused."""

import numpy as np
import pytest

from vllm_batch_invariant.ops.exact.definition import fp32
from vllm_batch_invariant.ops.hopper.tables import ENTRIES, Tables, ideal, packed, unpacked


def test_they_survive_a_file() -> None:
    rng, nearest = np.random.default_rng(0), ideal()
    made = Tables(*(one + rng.integers(-2, 2, ENTRIES, np.int32) for one in (nearest.exp2, nearest.rcp)))
    assert unpacked(packed(made)).digest == made.digest != nearest.digest


def test_an_entry_too_far_off_is_refused() -> None:
    nearest = ideal()
    far = nearest.exp2.copy()
    far[7] += 2
    with pytest.raises(ValueError, match="0 to 2 units off"):
        packed(Tables(far, nearest.rcp))


def test_what_they_are_off_is_off_the_nearest_number() -> None:
    some = np.random.default_rng(0).integers(0, ENTRIES, 5000)
    right = np.exp2(some / ENTRIES).astype(fp32).astype(np.float64) * 2.0**23
    assert np.array_equal(ideal().exp2[some], right.astype(np.int32))
    right = (1 / (1 + some / ENTRIES)).astype(fp32).astype(np.float64) * 2.0**24
    assert np.array_equal(ideal().rcp[some], right.astype(np.int32))

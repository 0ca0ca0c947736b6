"""Engines on a GPU whose weights are replaced, and that sleep, have the bits of engines that were started so."""

import pytest

from tests.engine import reload_cuda

pytestmark = pytest.mark.engine


def test_replaced_weights_and_sleep_give_the_bits_of_a_fresh_engine() -> None:
    assert reload_cuda.differences() == []

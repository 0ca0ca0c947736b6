"""Engines on GPUs whose weights are replaced, and that sleep, have the bits of engines that were started so."""

import pytest
import torch

from tests.engine import reload_cuda

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("gpus", reload_cuda.CASES)
def test_replaced_weights_and_sleep_give_the_bits_of_a_fresh_engine(gpus: int) -> None:
    if gpus > torch.cuda.device_count():
        pytest.skip(f"needs {gpus} GPUs")
    assert reload_cuda.differences(reload_cuda.CASES[gpus]) == []

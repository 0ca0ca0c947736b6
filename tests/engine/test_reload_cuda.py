"""Engines on GPUs whose weights are replaced, and that sleep, have the bits of engines that were started so."""

import pytest
import torch

from tests.engine import reload_cuda

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("name", reload_cuda.CASES)
def test_replaced_weights_and_sleep_give_the_bits_of_a_fresh_engine(name: str) -> None:
    cases = reload_cuda.CASES[name]
    gpus = max(case.gpus for case in cases)
    if gpus > torch.cuda.device_count():
        pytest.skip(f"needs {gpus} GPUs")
    assert reload_cuda.differences(cases) == []

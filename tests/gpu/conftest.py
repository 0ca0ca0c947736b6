"""These tests need an NVIDIA GPU; without one they are skipped."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs an NVIDIA GPU")

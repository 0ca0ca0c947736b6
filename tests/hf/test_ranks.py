"""A patched model under DDP and FSDP2 on two ranks keeps the bits that it has in one process."""

from pathlib import Path

import pytest
import torch

from tests.hf.models import DEVICE
from tests.hf.ranks import RANKS, check


@pytest.mark.exhaustive
@pytest.mark.skipif(DEVICE == "cuda" and torch.cuda.device_count() < RANKS, reason="a GPU a rank")
def test_ranks_have_the_bits_of_one_process_and_the_mean_of_their_gradients(tmp_path: Path) -> None:
    torch.multiprocessing.start_processes(check, (str(tmp_path),), RANKS, start_method="spawn")

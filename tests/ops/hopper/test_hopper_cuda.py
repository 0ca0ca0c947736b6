"""A Hopper has the bits that its arithmetic is defined to have: every operation, over operands that show the order."""

import json
from pathlib import Path

import pytest
import torch

from scripts import hopper_bits
from vllm_batch_invariant.ops.hopper.confirmed import OPERATIONS, recorded
from vllm_batch_invariant.ops.hopper.tables import unpacked


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of a Hopper")
    folder = tmp_path_factory.mktemp("hopper")
    hopper_bits.main([str(folder)])
    return folder


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_has_the_bits_of_the_definition(operation: str, compared: Path) -> None:
    found = json.loads((compared / "confirmed.json").read_text())
    assert found["values"][operation] > 0
    assert found["different"][operation] == 0


def test_its_tables_are_those_of_the_package(compared: Path) -> None:
    if not recorded().tables:
        pytest.skip("the package has none")
    assert unpacked((compared / "tables.xz").read_bytes()).digest == recorded().tables

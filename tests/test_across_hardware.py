"""The checkpoint that ``scripts.across_hardware`` makes on every machine alike; its engine is tests/engine's."""

import hashlib
from pathlib import Path

import pytest
import torch

from scripts import across_hardware
from scripts.across_hardware import PortableNormal, make_model

DIGEST = "bf5bdbf462337eeb38ce5e2cd38b2022d08487eb71e71babd10f45c15e9fc46b"
SMALL_DIGEST = "6994e689e8400f99c7183d8eab51c5287474c226d539c629cef8e419763e2d14"


def test_numbers_are_standard_normal_and_those_of_every_machine() -> None:
    drawn = PortableNormal(3)
    first, second = drawn(300, 400), drawn(50_000)
    assert first.shape == (300, 400)
    assert first.dtype == torch.float32
    assert abs(first.mean()) < 0.02
    assert abs(first.std() - 1) < 0.02
    assert not torch.equal(first.flatten()[:50_000], second)
    digest = hashlib.sha256(first.numpy().tobytes() + second.numpy().tobytes()).hexdigest()
    assert digest == DIGEST


def test_a_model_is_made_once(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "small")
    files = sorted(model.glob("*.safetensors"))
    assert hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest() == SMALL_DIGEST
    files[0].write_bytes(b"kept")
    assert (make_model(model, "small") / files[0].name).read_bytes() == b"kept"


def test_any_number_of_threads_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(across_hardware, "_AT_A_TIME", 1000)
    drawn = PortableNormal(3)
    first, second = drawn(300, 400), drawn(50_000)
    assert hashlib.sha256(first.numpy().tobytes() + second.numpy().tobytes()).hexdigest() == DIGEST

"""The checkpoint that ``scripts.across_hardware`` makes on every machine alike; its engine is tests/engine's."""

import hashlib
from pathlib import Path

import torch

from scripts.across_hardware import PortableNormal, make_model

DIGEST = "bf5bdbf462337eeb38ce5e2cd38b2022d08487eb71e71babd10f45c15e9fc46b"
SMALL_DIGEST = "ffbaafac07fd54f1ef705a6c451f711143c1aa5e10f9a02d3e4339daabdd0250"


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
    weights = (model / "model.safetensors").read_bytes()
    assert hashlib.sha256(weights).hexdigest() == SMALL_DIGEST
    (model / "model.safetensors").write_bytes(b"kept")
    assert (make_model(model, "small") / "model.safetensors").read_bytes() == b"kept"

"""Receipts of completions with LoRA adapters: of one adapter's files, which another one's bits do not pass for."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.adapters import written
from tests.engine.engines import run, tokens
from tests.engine.test_adapters import LIMITS, ROOM, pytestmark  # noqa: F401 - where adapters are covered
from vllm_batch_invariant.integration.engine.adapters import digest_of


@pytest.fixture(scope="module")
def found(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("adapters")
    folders = [str(written(folder / name, checkpoint, 8, seed)) for seed, name in enumerate("AB", 1)]

    def ask(engine: Any) -> Any:
        return engine.call("tests.engine.receipts:with_adapter", tokens(40, 1), folders)

    said = run({"model": str(checkpoint), **LIMITS, **ROOM}, [], "1", afterwards=ask).afterwards
    return said | {"digests": [digest_of(one) for one in folders]}


def test_a_receipt_holds_the_digest_of_its_adapter(found: dict[str, Any]) -> None:
    made, without = (json.loads(found[name]) for name in ("receipt", "without"))
    assert made["adapter"] == {"name": "A", "digest": found["digests"][0]}
    assert any(name.startswith("adapters ") for name in made["environment"]["reductions"])
    assert "adapter" not in without
    assert not any(name.startswith("adapters ") for name in without["environment"]["reductions"])


def test_its_adapter_gives_its_bits_and_another_is_found(found: dict[str, Any]) -> None:
    assert found["equal"] == [True, False]
    assert found["of none"]
    first, second = (digest[:12] for digest in found["digests"])
    assert f"adapter: A ({first}) in the receipt and B ({second}) in this engine" in found["said"][1]
    assert "adapter" not in found["said"][0]

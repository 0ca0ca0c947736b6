"""Models that are larger than memory have the weights of the definition, whatever files these are in."""

from pathlib import Path

import pytest

from scripts import large_model
from tests.ops.hopper.cases import same
from vllm_batch_invariant.ops.exact import known_answers
from vllm_batch_invariant.ops.exact.definition import from_bits
from vllm_batch_invariant.verify.receipt.recompute import weights_of


@pytest.mark.parametrize("shard", [1, 1 << 20, 1 << 30])
def test_weights_are_those_of_the_definition(shard: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large_model, "_SHARD", shard)
    sizes = {"vocab_size": 9000, "hidden_size": 64, "num_hidden_layers": 1}  # more rows than are drawn of one seed
    large_model.save(tmp_path, known_answers.configuration(**sizes))
    found, (_, weights) = weights_of(tmp_path), known_answers.checkpoint(**sizes)
    assert len(list(tmp_path.glob("*.safetensors"))) == {1: len(weights), 1 << 20: 2, 1 << 30: 1}[shard]
    assert found.keys() == weights.keys()
    assert all(same(from_bits(found[name]), floats) for name, floats in weights.items())

from types import SimpleNamespace

import pytest
import torch

from benchmarks.quantised_model import SHAPES
from vllm_batch_invariant.verify.demo_model import drawing_of


@pytest.mark.parametrize(
    ("name", "billions", "fields"),
    [
        ("qwen3.5-35b-a3b", 34.7, {"num_experts": 256, "linear_num_value_heads": 32, "head_dim": 256}),
        ("nemotron-h-8b", 8.2, {"mamba_num_heads": 128, "mamba_head_dim": 64, "ssm_state_size": 128, "n_groups": 8}),
    ],
)
def test_a_hybrid_has_the_size_of_the_published_one(name: str, billions: float, fields: dict[str, int]) -> None:
    shape = SHAPES[name]
    weights_of, config_of = drawing_of(shape)
    drawn = weights_of(shape, shape.vocab, lambda *size: torch.zeros(size, device="meta"))
    parameters = sum(weight.numel() for layer in drawn for weight in layer.values())
    assert round(parameters / 1e9, 1) == billions
    config = SimpleNamespace(**config_of(shape, 1, 0))
    assert {field: getattr(config, field) for field in fields} == fields

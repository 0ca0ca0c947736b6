"""The shapes are those of the models' weights on one tensor-parallel worker."""

import pytest

from benchmarks.shapes import WEIGHT_SHAPES, Model, Origin, WeightShape, shapes_of


def shape_of(model: str, workers: int, projection: str) -> WeightShape:
    [found] = [shape for shape in WEIGHT_SHAPES if Origin(model, workers, projection) in shape.origins]
    return found


@pytest.mark.parametrize(
    ("model", "workers", "projection", "features"),
    [
        ("Qwen3-8B", 1, "qkv", (6144, 4096)),
        ("Qwen3-8B", 1, "o", (4096, 4096)),
        ("Qwen3-8B", 1, "gate_up", (24576, 4096)),
        ("Qwen3-8B", 1, "down", (4096, 12288)),
        ("Qwen3-8B", 8, "lm_head", (18992, 4096)),
        ("Llama-3.1-70B", 8, "qkv", (1280, 8192)),
        ("Llama-3.1-70B", 8, "down", (8192, 3584)),
        ("Qwen3-32B", 1, "o", (5120, 8192)),
        ("Qwen2.5-0.5B", 1, "qkv", (1152, 896)),
        ("Qwen2.5-0.5B", 1, "down", (896, 4864)),
        ("Qwen2.5-3B", 1, "qkv", (2560, 2048)),
    ],
)
def test_known_shapes(model: str, workers: int, projection: str, features: tuple[int, int]) -> None:
    shape = shape_of(model, workers, projection)
    assert (shape.out_features, shape.in_features) == features


def test_a_shape_stands_once_with_every_layer_that_has_it() -> None:
    assert len({(shape.out_features, shape.in_features) for shape in WEIGHT_SHAPES}) == len(WEIGHT_SHAPES)
    assert Origin("Llama-3.1-8B", 1, "o") in shape_of("Qwen3-8B", 1, "o").origins


def test_key_value_heads_are_replicated_when_there_are_more_workers() -> None:
    model = Model("small", hidden=1024, heads=16, kv_heads=2, head_size=64, intermediate=4096, vocabulary=1000)
    assert model.projections(8)["qkv"] == ((2 + 1 + 1) * 64, 1024)


def test_the_vocabulary_is_padded() -> None:
    model = Model("small", hidden=1024, heads=16, kv_heads=2, head_size=64, intermediate=4096, vocabulary=1000)
    assert model.projections(4)["lm_head"] == (1024 // 4, 1024)


def test_logits_are_computed_for_fewer_rows() -> None:
    assert shape_of("Qwen3-8B", 1, "lm_head").most_rows == 512
    assert shape_of("Qwen3-8B", 1, "down").most_rows == 8192


def test_shapes_are_found_by_part_of_a_model_name() -> None:
    names = {origin.model for shape in shapes_of(["qwen2.5-3b"]) for origin in shape.origins}
    assert "Qwen2.5-3B" in names
    assert "Qwen2.5-0.5B" not in names
    assert shapes_of(["no such model"]) == ()

"""Checkpoints of random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def random_weights(shapes: Mapping[str, tuple[int, ...]]) -> "dict[str, torch.Tensor]":
    """In bf16, by the names of layers: ones of norms, and matrices [N, K] that leave a row about as large as it is."""
    import torch

    chance = torch.Generator().manual_seed(5)
    weights = {
        f"{name}.weight": torch.ones(shape)
        if len(shape) == 1
        else torch.randn(shape, generator=chance) / shape[1] ** 0.5
        for name, shape in shapes.items()
    }
    return {name: weight.bfloat16() for name, weight in weights.items()}


def write(folder: Path, config: Mapping[str, Any], weights: "Mapping[str, torch.Tensor]") -> Path:
    """Write one to a folder, with its parents, and return that."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return folder

"""The small model of the known answers of exact arithmetic, as files."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_batch_invariant.ops.exact import known_answers


def save_known_model(folder: Path) -> Path:
    """Write its checkpoint into a folder, and return that."""
    config, weights = known_answers.checkpoint()
    (folder / "config.json").write_text(json.dumps(config))
    bf16 = {name: torch.from_numpy(floats).to(torch.bfloat16) for name, floats in weights.items()}
    save_file(bf16, folder / "model.safetensors", metadata={"format": "pt"})
    return folder

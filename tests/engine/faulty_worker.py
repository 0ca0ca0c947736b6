"""A worker whose numbers follow how many rows a step has: run in the engine's process."""

from functools import partial
from typing import Any

import torch

MOST_ROWS = 16
"""Of a step whose numbers the fault leaves alone."""


def counts_rows(llm: Any, rank: int, path: str) -> None:
    """From now on a layer of one worker gives twice as much where a step has more than :data:`MOST_ROWS` rows."""
    llm.apply_model(partial(_plant, rank, path))


def _plant(rank: int, path: str, model: torch.nn.Module) -> None:
    if torch.distributed.get_rank() != rank:
        return
    layer = model.get_submodule(path)
    forward = layer.forward

    def doubled(x: torch.Tensor) -> Any:
        return forward(x * 2 if len(x) > MOST_ROWS else x)

    layer.forward = doubled

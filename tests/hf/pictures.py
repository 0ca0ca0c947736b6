"""Prompts with pictures for a trainer and an engine, and checkpoints of models that see them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from tests.engine import images
from tests.hf.models import padded
from vllm_batch_invariant.verify.harness.requests import tokens

MODELS = {"Qwen2.5-VL": images.qwen2_5_vl, "Qwen3-VL": images.qwen3_vl}
"""Configurations of two layers, and of encoders with three blocks."""
WORDS = range(5, 3999)
"""Tokens that are no picture's."""
Grid = tuple[int, int]
LARGE, OBLONG, SMALL, LEAST, STRIP = (20, 22), (12, 16), (4, 4), (2, 2), (2, 30)
"""Rows and columns of patches: of several windows and splits, and less than one."""


@dataclass(frozen=True)
class Seen:
    """One sequence.

    Attributes:
        tokens: of the prompt and behind it.
        pictures: the grid and the seed of each.
        logprobs: [len(tokens) - 1] fp32, the engine's, of every token but the first; None where none was asked.
    """

    tokens: list[int]
    pictures: Sequence[tuple[Grid, int]]
    logprobs: torch.Tensor | None = None


def prompt(seed: int, before: int, grids: Sequence[Grid], after: int = 5) -> tuple[list[int], list[tuple[Grid, int]]]:
    """Words, and a picture of each grid with words behind it: as the engine is asked, with a token for a picture."""
    words = tokens(before, seed, WORDS)
    for place in range(len(grids)):
        words += [images.START, images.IMAGE, images.END, *tokens(after, seed + 50 + place, WORDS)]
    return words, [(grid, 100 * seed + place) for place, grid in enumerate(grids)]


def opened(asked: tuple[list[int], list[tuple[Grid, int]]]) -> Seen:
    """The same as a trainer has it: with a token for each patch, merged."""
    words, pictures = asked
    grids, found = iter(pictures), []
    for word in words:
        (height, width), _ = next(grids) if word == images.IMAGE else ((2, 2), 0)
        found += [word] * (height * width // 4)
    return Seen(found, pictures)


PROMPTS = [prompt(1, 60, [LARGE], 20), prompt(2, 7, [SMALL, OBLONG, LEAST]), prompt(3, 40, []), prompt(4, 1, [STRIP])]


class Checkpoint:
    """A model's, and what makes pixels for it.

    Args:
        name: in :data:`MODELS`.
        dtype: of its weights.
        folder: where it is saved.
    """

    def __init__(self, name: str, dtype: torch.dtype, folder: Path) -> None:
        self.folder, self.dtype, config = folder, dtype, MODELS[name]()
        images.save(config, dtype, folder)
        self.processor = AutoImageProcessor.from_pretrained(folder)
        self.patch = config.vision_config.patch_size

    def load(self) -> Any:
        """The model as Transformers has it."""
        return AutoModelForImageTextToText.from_pretrained(self.folder, dtype=self.dtype).eval()

    def pixels(self, *sequences: Seen) -> dict[str, torch.Tensor]:
        """Of all pictures, as the image processor returns them."""
        pictures = [picture for one in sequences for picture in one.pictures]
        if not pictures:
            return {}
        drawn = [Image.fromarray(images.picture(self.patch, grid, seed)) for grid, seed in pictures]
        return dict(self.processor(images=drawn, return_tensors="pt"))


def of_images(tokens: torch.Tensor) -> torch.Tensor:
    """``mm_token_type_ids`` of tokens [rows, columns]."""
    return (tokens == images.IMAGE).int()


def ways(sequences: Sequence[Seen]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Tokens and mask of one batch, padded on each side and on both."""
    parts = [torch.tensor(one.tokens) for one in sequences]
    longest = max(map(len, parts))
    return {
        "right": padded(parts, (0,) * len(parts), longest),
        "left": padded(parts, tuple(longest - len(part) for part in parts), longest),
        "both": padded(parts, tuple(range(3, 3 + len(parts))), longest + 20),
    }


def packed(sequences: Sequence[Seen]) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and position_ids [1, tokens] of all sequences in one row."""
    positions = torch.cat([torch.arange(len(one.tokens)) for one in sequences])
    return torch.tensor([[token for one in sequences for token in one.tokens]]), positions[None]

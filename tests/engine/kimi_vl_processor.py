"""A processor of Kimi-VL's images, which a checkpoint brings, because no package has one: images of whole squares of
merged patches stay as they are, larger ones are made smaller, and what is missing of a square is black.
"""

import math
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin


class KimiVLImageProcessor(BaseImageProcessor):
    """Cuts images into patches, row by row."""

    model_input_names = ["pixel_values", "image_grid_hws"]  # noqa: RUF012 (as Transformers has it)

    def __init__(
        self,
        patch_size: int = 14,
        in_token_limit: int = 4096,
        merge_kernel_size: tuple[int, int] = (2, 2),
        image_mean: tuple[float, ...] = (0.5, 0.5, 0.5),
        image_std: tuple[float, ...] = (0.5, 0.5, 0.5),
        **others: Any,
    ) -> None:
        super().__init__(**others)
        self.patch_size, self.in_token_limit, self.merge_kernel_size = patch_size, in_token_limit, merge_kernel_size
        self.image_mean, self.image_std = image_mean, image_std

    def preprocess(self, images: Any, return_tensors: str | None = None, **others: Any) -> BatchFeature:
        images = images if isinstance(images, list | tuple) else [images]
        found = [self._patches(Image.fromarray(one) if isinstance(one, np.ndarray) else one) for one in images]
        pixels, grids = torch.cat([patches for patches, _ in found]), torch.tensor([grid for _, grid in found])
        return BatchFeature({"pixel_values": pixels, "image_grid_hws": grids}, tensor_type=return_tensors)

    def __call__(self, images: Any, **named: Any) -> BatchFeature:
        return self.preprocess(images, **named)

    def _patches(self, image: Image.Image) -> tuple[torch.Tensor, tuple[int, int]]:
        """[patches, 3, side, side] in fp32, and how many rows and columns there are."""
        side, image = self.patch_size, image.convert("RGB")
        if (count := (image.width // side) * (image.height // side)) > self.in_token_limit:
            scale = math.sqrt(self.in_token_limit / count)
            image = image.resize((int(image.width * scale), int(image.height * scale)), Image.Resampling.BICUBIC)
        merged = [side * step for step in self.merge_kernel_size]
        height, width = (-(-one // step) * step for one, step in zip((image.height, image.width), merged, strict=True))
        filled = Image.new("RGB", (width, height))
        filled.paste(image)
        pixels = torch.from_numpy(np.array(filled)).permute(2, 0, 1).float() / 255
        mean, std = (torch.tensor(one)[:, None, None] for one in (self.image_mean, self.image_std))
        cut = ((pixels - mean) / std).unflatten(2, (-1, side)).unflatten(1, (-1, side))
        return cut.permute(1, 3, 0, 2, 4).flatten(0, 1), (height // side, width // side)


class KimiVLProcessor(ProcessorMixin):
    """Writes as many tokens for an image as its encoder gives rows."""

    attributes = ["image_processor", "tokenizer"]  # noqa: RUF012
    image_processor_class = "AutoImageProcessor"
    tokenizer_class = "AutoTokenizer"
    image_token = "<|media_pad|>"

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **_: Any) -> None:
        super().__init__(image_processor, tokenizer, chat_template=chat_template)

    def __call__(
        self, images: Any = None, text: Any = None, return_tensors: str | None = None, **others: Any
    ) -> BatchFeature:
        seen = self.image_processor(images) if images is not None else {}
        texts, merged = (
            [text] if isinstance(text, str) else list(text),
            math.prod(self.image_processor.merge_kernel_size),
        )
        for grid in seen.get("image_grid_hws", ()):
            number = next(number for number, one in enumerate(texts) if self.image_token in one)
            texts[number] = texts[number].replace(self.image_token, "<>" * (int(grid.prod()) // merged), 1)
        written = self.tokenizer([one.replace("<>", self.image_token) for one in texts], return_tensors=return_tensors)
        return BatchFeature({**written, **seen})

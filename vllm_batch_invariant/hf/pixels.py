"""The pixels that an engine's encoder is given: vLLM sends bytes to the worker and normalises them there, by other
operations than Transformers' image processors, whose numbers differ in their last bits.
"""

from typing import Any

import torch

from ..errors import NotCovered

_OFF = 0.05
"""How far from a whole byte a number may be that stands for one; a processor's in fp32 are within 1e-4."""


class PixelNorm:
    """How bytes become the encoder's numbers, of an image processor of Transformers', or a processor that has one.

    Attributes:
        mean: of each channel, of numbers from 0 to 1.
        std: as ``mean``.
        factor: of a byte.
    """

    def __init__(self, image_processor: Any) -> None:
        image_processor = getattr(image_processor, "image_processor", image_processor)
        normalises, rescales = image_processor.do_normalize, image_processor.do_rescale
        self.mean = list(image_processor.image_mean) if normalises else [0.0] * 3
        self.std = list(image_processor.image_std) if normalises else [1.0] * 3
        self.factor = float(image_processor.rescale_factor) if rescales else 1.0

    def __call__(self, pixel_values: torch.Tensor) -> torch.Tensor:
        """[patches, channels * size] fp32, as the worker has them before they get the encoder's dtype.

        Args:
            pixel_values: [patches, channels * size], the image processor's: fp32, or bytes where it was told not to
                normalise.

        Raises:
            NotCovered: numbers that stand for no bytes.
        """
        device, parts = pixel_values.device, pixel_values.unflatten(1, (len(self.mean), -1))
        mean, std = (torch.tensor(values, dtype=torch.float32, device=device) for values in (self.mean, self.std))
        if pixel_values.dtype != torch.uint8:
            parts = self._bytes(parts, pixel_values.dtype)
        scaled = parts * (self.factor / std).view(1, -1, 1)
        return (scaled + (-mean / std).view(1, -1, 1)).flatten(1)

    def _bytes(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        mean, std = (
            torch.tensor(values, dtype=torch.float64, device=parts.device).view(1, -1, 1)
            for values in (self.mean, self.std)
        )
        exact = (parts.double() * std + mean) / self.factor
        whole = exact.round()
        are_bytes = ((exact - whole).abs() < _OFF) & (whole >= 0) & (whole <= 255)
        if dtype != torch.float32 or not bool(are_bytes.all()):
            raise NotCovered(
                f"pixel_values in {dtype} that are no bytes by the trainer's image processor",
                "the engine normalises bytes, which have to be found again",
                "pass what the processor that patch was given returns, in fp32",
            )
        return whole.to(torch.uint8)

"""A torchvision that can be imported, with what image processors call of it, by PyTorch.

Image processors of transformers import torchvision, and vLLM's Qwen2.5-VL and Qwen3-VL import those. No wheel of it on
PyPI fits PyTorch's CPU builds. A model that is served as text calls none of it. For one that is given images, a picture
becomes a tensor, is scaled and resized; to decode one and the rest raises.
"""

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

_FILES = {
    "__init__.py": '__version__ = "0.28.0"\n',
    "io.py": """
class ImageReadMode:
    RGB = 0


def decode_image(*given, **named):
    raise RuntimeError("an image was decoded")
""",
    "transforms/__init__.py": """
import enum


class InterpolationMode(enum.Enum):
    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class ToTensor:
    def __call__(self, picture):
        from .functional import pil_to_tensor

        return pil_to_tensor(picture).float().div(255)


class Normalize:
    def __init__(self, mean, std):
        self.mean, self.std = mean, std

    def __call__(self, image):
        from .functional import normalize

        return normalize(image, self.mean, self.std)


class Lambda:
    def __init__(self, function):
        self.function = function

    def __call__(self, image):
        return self.function(image)


class Resize:
    def __init__(self, size, interpolation=InterpolationMode.BILINEAR):
        self.size, self.interpolation = size, interpolation

    def __call__(self, picture):
        from PIL import Image

        height, width = self.size
        return picture.resize((width, height), Image.Resampling[self.interpolation.name])


class Compose:
    def __init__(self, transforms):
        self.transforms = transforms

    def __call__(self, image):
        for one in self.transforms:
            image = one(image)
        return image
""",
    "transforms/functional.py": """
import numpy as np
import torch


def pil_to_tensor(picture):
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def to_tensor(picture):
    return pil_to_tensor(picture).float().div(255)


def to_pil_image(*given, **named):
    raise RuntimeError("a picture was made of a tensor")


def grayscale_to_rgb(image):
    if image.shape[-3] != 3:
        raise RuntimeError("an image was given colours")
    return image


def resize(image, size, interpolation=None, antialias=True):
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    mode = getattr(interpolation, "value", "bilinear")
    floats = image.reshape(-1, *image.shape[-3:]).float()
    made = torch.nn.functional.interpolate(floats, size=tuple(size), mode=mode, antialias=antialias)
    if image.dtype == torch.uint8:
        made = made.round_().clamp_(0, 255)
    return made.to(image.dtype).reshape(*image.shape[:-2], *size)


def pad(image, padding, fill=0):
    left, top, right, bottom = padding
    [value] = set(fill) if isinstance(fill, list) else {fill}  # of all colours
    return torch.nn.functional.pad(image, (left, right, top, bottom), value=value)


def normalize(image, mean, std, inplace=False):
    mean, std = (torch.tensor(one, dtype=image.dtype)[:, None, None] for one in (mean, std))
    return (image - mean) / std
""",
    "transforms/v2/__init__.py": "",
    "transforms/v2/functional.py": """
from .. import InterpolationMode
from ..functional import grayscale_to_rgb, normalize, pad, pil_to_tensor, resize
""",
}


def where_missing(folder: Path) -> list[str]:
    """Folders to put on the path of a process that loads such a model: one with the fake if there is no torchvision."""
    if find_spec("torchvision"):
        return []
    for name, source in _FILES.items():
        file = folder / "torchvision" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(source)
    return [str(folder)]


def import_beside(folder: Path, name: str) -> ModuleType:
    """A module of vLLM's that asks for a torchvision, which nothing that is imported later finds."""
    before, path = {*sys.modules}, [*sys.path]
    sys.path[:0] = where_missing(folder)
    try:
        return import_module(name)
    finally:
        faked, sys.path[:] = sys.path != path, path
        for one in {*sys.modules} - before if faked else ():
            if one.partition(".")[0] == "torchvision":
                del sys.modules[one]

"""A torchvision that can be imported and does nothing.

Image processors of transformers import torchvision, and vLLM's Qwen2.5-VL and Qwen3-VL import those. No wheel of it on
PyPI fits PyTorch's CPU builds. A model that is served as text calls none of it; what is called here raises.
"""

from importlib.util import find_spec
from pathlib import Path

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
""",
    "transforms/functional.py": """
def pil_to_tensor(*given, **named):
    raise RuntimeError("an image was converted")
""",
    "transforms/v2/__init__.py": "",
    "transforms/v2/functional.py": "from .. import InterpolationMode\n",
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

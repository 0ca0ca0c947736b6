"""A num2words that can be imported: SmolVLM's processor asks for it, and calls it to tell of the frames of a video."""

from importlib.util import find_spec
from pathlib import Path

_SOURCE = """
def num2words(*given, **named):
    raise RuntimeError("a number was written in words")
"""


def where_missing(folder: Path) -> list[str]:
    """Folders to put on the path of a process that loads such a model: one with the fake if there is no num2words."""
    if find_spec("num2words"):
        return []
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "num2words.py").write_text(_SOURCE)
    return [str(folder)]

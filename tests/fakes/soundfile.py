"""A soundfile that reads WAV of 16 bits by Python's own module: vLLM decodes what a server is sent by it."""

from importlib.util import find_spec
from pathlib import Path

_SOURCE = """
import wave

import numpy as np


class LibsndfileError(RuntimeError):
    code = 1


def available_formats():
    return {"WAV": "WAV (Microsoft)"}


class SoundFile:
    def __init__(self, file):
        try:
            self._file = wave.open(file)
        except (wave.Error, EOFError) as error:
            raise LibsndfileError(str(error)) from error
        self.samplerate, self.frames = self._file.getframerate(), self._file.getnframes()
        self.channels = self._file.getnchannels()

    def __enter__(self):
        return self

    def __exit__(self, *reason):
        self._file.close()

    def read(self, dtype, always_2d):
        samples = np.frombuffer(self._file.readframes(self.frames), np.int16)
        return (samples / 32768).astype(dtype)
"""


def where_missing(folder: Path) -> list[str]:
    """Folders to put on the path of a server of audio: one with the fake if there is no soundfile."""
    if find_spec("soundfile"):
        return []
    (folder / "soundfile.py").write_text(_SOURCE)
    return [str(folder)]

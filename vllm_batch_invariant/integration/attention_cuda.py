"""The attention backend on CUDA."""

from . import seams
from .attention import FixedSplits


class Backend(FixedSplits, seams.CUDA_BACKEND.get()):
    """A backend of its own, with the cache of vLLM's Triton backend."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

"""The attention backend on the CPU."""

from . import seams
from .attention import FixedSplits


class Backend(FixedSplits, seams.CPU_BACKEND.get()):
    """In the place of vLLM's CPU backend, which its CPU platform chooses whatever is asked for."""

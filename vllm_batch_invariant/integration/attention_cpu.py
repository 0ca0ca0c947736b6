"""The attention backend on the CPU."""

from . import patch_points
from .attention import FixedSplitBackendMixin


class Backend(FixedSplitBackendMixin, patch_points.CPU_BACKEND.get()):
    """In the place of vLLM's CPU backend, which its CPU platform chooses whatever is asked for."""

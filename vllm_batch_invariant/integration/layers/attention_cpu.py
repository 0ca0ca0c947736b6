"""The attention backend on the CPU."""

from typing import Any

from ..reviews import patch_points
from .attention import ExactAttention, FixedSplitBackendMixin

_Base: Any = patch_points.CPU_BACKEND.get()


class Backend(FixedSplitBackendMixin, _Base):
    """In the place of vLLM's CPU backend, which its CPU platform chooses whatever is asked for."""


class ExactBackend(Backend):
    """The same in exact arithmetic."""

    @staticmethod
    def get_impl_cls() -> type[ExactAttention]:
        return ExactAttention

"""The attention backend on the CPU."""

from typing import Any, ClassVar

from vllm.v1.attention.backend import AttentionType

from ..reviews import patch_points
from .attention import ExactAttention, FixedSplitAttention, FixedSplitBackendMixin


class CpuFixedSplitAttention(FixedSplitAttention):
    """One attention layer of a decoder or of an encoder, or of a decoder over what an encoder gave."""

    attn_types: ClassVar[tuple[str, ...]] = (
        AttentionType.DECODER,
        AttentionType.ENCODER_ONLY,
        AttentionType.ENCODER_DECODER,
    )
    serves_encoders: ClassVar[tuple[str, ...]] = ("numba",)


_Base: Any = patch_points.CPU_BACKEND.get()


class Backend(FixedSplitBackendMixin, _Base):
    """In the place of vLLM's CPU backend, which its CPU platform chooses whatever is asked for."""

    @staticmethod
    def get_impl_cls() -> type[FixedSplitAttention]:
        return CpuFixedSplitAttention


class ExactBackend(Backend):
    """The same in exact arithmetic."""

    @staticmethod
    def get_impl_cls() -> type[FixedSplitAttention]:
        return ExactAttention

"""The attention backend on the CPU."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionType

from ...ops.attention import PagedCache
from ..reviews import patch_points
from .attention import ExactAttention, FixedSplitAttention, FixedSplitBackendMixin, Metadata


class CpuFixedSplitAttention(FixedSplitAttention):
    """One attention layer of a decoder or of an encoder, or of a decoder over what an encoder gave."""

    attn_types: ClassVar[tuple[str, ...]] = (
        AttentionType.DECODER,
        AttentionType.ENCODER_ONLY,
        AttentionType.ENCODER_DECODER,
    )
    serves_encoders: ClassVar[tuple[str, ...]] = ("numba",)

    def _attend(
        self, layer: torch.nn.Module, query: torch.Tensor, cache: PagedCache, batch: Metadata, out: torch.Tensor
    ) -> None:
        """The first of a step's layers that ask alike checks its lengths and pages, and plans for all of them."""
        if self.implementation not in ("auto", "numba"):
            super()._attend(layer, query, cache, batch, out)
            return
        from ...ops.attention.cpu import Plan, paged_attention

        call, planned_as = self._call(query, cache, batch), (*self.planned_as, self.num_kv_heads)
        plan = batch.plans.get(planned_as)
        call.check(values=plan is None)
        if plan is None:
            plan = batch.plans[planned_as] = Plan.of(call)
        paged_attention(call, out, plan)


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

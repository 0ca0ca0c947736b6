"""The backend of latent attention on CUDA."""

import torch

from ...ops.attention import AttentionReduction
from ..reviews import patch_points
from .attention import FixedSplitAttention, MetadataBuilder
from .attention_cuda import PAGE_SIZE, PlannedMetadataBuilder
from .attention_latent import LatentAttention, LatentBackendBase


class CudaLatentAttention(LatentAttention):
    """One layer of latent attention, whose cache is written by vLLM's kernel: a copy, row by row."""

    reduction = AttentionReduction.of_device("cuda")

    def do_kv_cache_update(  # type: ignore[override]  # vLLM's layers of latent attention give it other arguments
        self,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        kv_cache_dtype: str,
        k_scale: torch.Tensor,
        *others: object,
    ) -> None:
        """Write the step's latent vectors and turned keys to their pages. A negative slot is padding."""
        if kv_cache.numel():
            write = patch_points.WRITE_LATENT_CACHE.get()
            write(kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten(), kv_cache_dtype, k_scale)


class LatentBackend(LatentBackendBase):
    """In the place of vLLM's Triton backend of latent attention."""

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """A page that the tensor memory accelerator copies as one tile."""
        return max(default_block_size, PAGE_SIZE)

    @staticmethod
    def get_impl_cls() -> type[FixedSplitAttention]:
        return CudaLatentAttention

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return PlannedMetadataBuilder

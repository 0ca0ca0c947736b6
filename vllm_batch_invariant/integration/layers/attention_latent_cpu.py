"""The backend of latent attention on the CPU."""

from .attention import FixedSplitAttention
from .attention_latent import LatentAttention, LatentBackendBase


class LatentBackend(LatentBackendBase):
    """In the place of those that vLLM's CPU platform chooses."""

    @staticmethod
    def get_impl_cls() -> type[FixedSplitAttention]:
        return LatentAttention

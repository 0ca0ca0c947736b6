"""Multi-head latent attention of vLLM's layers (DeepSeek's): the cache has a latent vector of each token, and a key is
that vector and what rotary embedding has turned. Every row, of prefill as of decode, has each head's query multiplied
with that head's W_UK, attends over the cache as one KV head, and has the result multiplied with W_UV. So a row's bits
do not follow how its request was cut: vLLM makes keys and values of each head for long chunks, and these for short
ones.

Both matrices are parts of the layer's weight, read where it lies: what replaces the weight replaces them.
"""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import MultipleOf

from ...errors import NotCovered
from ...ops.attention import PagedCache
from ...ops.linear import bmm
from ..coverage import LATENT_PAGES, LATENT_SIZES
from ..reviews import patch_points
from ..reviews.schemes import FP8_CACHES
from .attention import FixedSplitAttention, FixedSplitBackendMixin, Metadata, pages_of, refuse_quantised


class LatentAttention(FixedSplitAttention):
    """One layer of latent attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        indexer: object | None = None,
        **unknown: object,  # what the layer is made of, which it keeps
    ) -> None:
        if indexer is not None or unknown.get("topk_indices_buffer") is not None:
            raise NotCovered(
                "latent attention to keys that an indexer chooses", "it has kernels of its own", "serve another model"
            )
        if kv_cache_dtype in FP8_CACHES:
            raise NotCovered(
                f"latent attention with a KV cache in {kv_cache_dtype}", "it has not been run", "leave it out"
            )
        self.latent_size, self.unturned_size, self.turned_size = kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim
        self.v_head_dim = v_head_dim
        if (kv_lora_rank, qk_rope_head_dim) not in LATENT_SIZES:
            raise NotCovered(
                f"latent attention with vectors of {kv_lora_rank} and {qk_rope_head_dim} turned elements",
                f"{' and '.join(f'{size} and {tail}' for size, tail in LATENT_SIZES)} have been run",
                "serve another model",
            )
        super().__init__(
            num_heads,
            head_size,
            scale,
            num_kv_heads,
            alibi_slopes,
            sliding_window,
            kv_cache_dtype,
            logits_soft_cap,
            attn_type,
            kv_sharing_target_layer_name,
        )

    @property
    def head_sizes(self) -> tuple[int, ...]:
        return (self.latent_size + self.turned_size,)

    @property
    def tail(self) -> int:
        return self.turned_size

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the step's rows over their requests' pages; a warm-up passes no metadata.

        Args:
            layer: vLLM's, with ``kv_b_proj``, whose weight is [heads * (unturned + value size), latent size].
            query: [tokens, heads, unturned + turned size].
            key: unused.
            value: unused.
            kv_cache: [pages, page, latent + turned size].
            attn_metadata: of the step.
            output: [tokens, heads * value size].
            output_scale: None.
            output_block_scale: None.
        """
        refuse_quantised(output_scale, output_block_scale)
        if attn_metadata is None:
            return output.fill_(0)
        rows = attn_metadata.num_actual_tokens
        sizes = self.unturned_size, self.v_head_dim
        w_uk, w_uv = layer.kv_b_proj.weight.view(self.num_heads, sum(sizes), self.latent_size).split(sizes, dim=1)
        latent = query.new_empty((rows, self.num_heads, self.latent_size))
        cache = self._cache_of_step(layer, kv_cache, attn_metadata)
        self._attend(layer, self.absorbed(query[:rows], w_uk), cache, attn_metadata, latent)
        values = bmm(latent.transpose(0, 1), w_uv.transpose(1, 2)).transpose(0, 1)
        output[:rows].view(rows, self.num_heads, self.v_head_dim).copy_(values)
        return output

    def absorbed(self, query: torch.Tensor, w_uk: torch.Tensor) -> torch.Tensor:
        """Queries [tokens, heads, latent + turned size] of the cache's keys, of those of each head's own keys and W_UK
        [heads, unturned size, latent size].
        """
        unturned, turned = query.split([self.unturned_size, self.turned_size], dim=-1)
        made = query.new_empty((*query.shape[:2], self.head_size))
        made[..., : self.latent_size] = bmm(unturned.transpose(0, 1), w_uk).transpose(0, 1)
        made[..., self.latent_size :] = turned
        return made

    def _cache_of_step(self, layer: torch.nn.Module, kv_cache: torch.Tensor, batch: Metadata) -> PagedCache:
        return PagedCache.latent(pages_of(kv_cache), self.latent_size, batch.block_table)

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
        """Write the step's latent vectors and turned keys to their pages, before anything reads them. A negative slot
        is padding.
        """
        slots = slot_mapping.flatten()
        written = slots >= 0
        at = slots[written].long()
        rows = torch.cat([kv_c_normed, k_pe.view(len(k_pe), -1)], dim=-1)[: len(slots)][written]
        pages = pages_of(kv_cache)
        pages[at // pages.shape[2], 0, at % pages.shape[2]] = rows


_Base: Any = patch_points.LATENT_BACKEND.get() if patch_points.LATENT_BACKEND.is_there() else object


class LatentBackendBase(FixedSplitBackendMixin, _Base):
    """What a backend of latent attention says of itself; its cache's layout it takes from vLLM's."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        return sorted({size + tail for size, tail in LATENT_SIZES})

    @staticmethod
    def get_supported_kernel_block_sizes(*spec: object) -> list[int | MultipleOf]:  # of any
        return [MultipleOf(LATENT_PAGES)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        return spec

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

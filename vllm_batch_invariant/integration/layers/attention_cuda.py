"""The attention backend on CUDA: a step is planned once on the GPU, and small steps are CUDA graphs."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import CrossAttentionSpec

from ... import envs
from ...ops.attention import NO_RANGE, AttentionReduction, PagedCache
from ...ops.common.kv_cache import E4M3, CacheSlots
from ..engine.cuda_graphs import most_tokens, verify_lengths
from ..reviews import patch_points
from .attention import (
    ExactAttention,
    FixedSplitAttention,
    FixedSplitBackendMixin,
    Metadata,
    MetadataBuilder,
    cache_of,
    reads_another_cache,
    split_cache,
)
from .code_fusion import codes_of

PAGE_SIZE = AttentionReduction.of_device("cuda").key_tile
"""Keys in a page unless the user says otherwise: a tile of them."""


def uses_triton() -> bool:
    """Whether the Triton kernel serves attention, rather than FlexAttention."""
    return envs.ATTENTION.read() in ("auto", "triton")


class PlannedMetadataBuilder(MetadataBuilder):
    """Plans each step in memory that it keeps, so that CUDA graphs find the next plan where they found the last."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_draft_decode_metadata_update: ClassVar[bool] = True
    """An EAGLE head has one graph for all drafts but the first, and DFlash one for all."""
    _ranges: torch.Tensor | None = None
    """Where a CUDA graph of a model with images reads those of tokens: a graph is of steps with and without."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._spec, self._config, self._device = kv_cache_spec, vllm_config, device
        self.verify = verify_lengths(vllm_config)
        """The tokens of each request in steps whose requests all have as many, which have CUDA graphs of their own."""
        self._layers = [vllm_config.compilation_config.static_forward_context[name] for name in layer_names]
        layers = [layer.impl for layer in self._layers]
        self._of_codes = [layer for layer in self._layers if layer.impl.holds_codes]
        self._sees_ranges = not self._of_encoder and getattr(vllm_config.model_config, "is_mm_prefix_lm", False)
        self._planners = {
            planned_as: self._planner([layer for layer in layers if layer.planned_as == planned_as])
            for planned_as in dict.fromkeys(layer.planned_as for layer in layers)
        }
        if self._sees_ranges:
            self._no_range = torch.tensor([NO_RANGE], dtype=torch.int32, device=device)
            self._ranges = self._no_range.repeat(self._sizes(layers)[2], 1)

    def _planner(self, layers: list[Any]) -> Any:
        """For layers with as many query heads and one window."""
        from ...ops.attention.certificate import certify
        from ...ops.attention.plan import Planner

        shape, requests, tokens, keys = self._sizes(layers)
        if self._of_encoder:  # Triton's kernel alone serves it; a sequence comes whole, by one kind of blocks
            return Planner(shape, self._device, requests, tokens, max_keys=tokens, plain=False)
        kinds = tuple(dict.fromkeys(layer.spec for layer in layers))
        page, verify = self._spec.block_size, max(self.verify, default=1)
        certificate = certify(shape, self._device, page, kinds, verify, self._sees_ranges)
        sizes, window = (requests, tokens, keys), kinds[0].sliding_window if kinds[0].causal else None
        return Planner(shape, self._device, *sizes, kernels=certificate.kernels, window=window)

    def _sizes(self, layers: list[Any]) -> tuple[Any, int, int, int]:
        """The shape of layers with as many query heads, and the most requests, tokens and keys of a step."""
        from ...ops.attention.shapes import AttentionShape

        spec, model, scheduler = self._spec, self._config.model_config, self._config.scheduler_config
        longest = model.max_model_len
        if isinstance(spec, CrossAttentionSpec):
            longest = getattr(model.hf_config, "max_source_positions", longest)
        holds_codes = layers[0].holds_codes
        tail = layers[0].tail
        shape = AttentionShape(
            layers[0].num_heads,
            spec.num_kv_heads,
            spec.head_size - tail,
            model.dtype if holds_codes else spec.dtype,
            AttentionReduction.of_device("cuda"),
            E4M3 if holds_codes else None,
            layers[0].scales_tokens,
            tail,
        )
        keys = scheduler.max_num_seqs * longest
        if blocks := self._config.cache_config.num_gpu_blocks:
            keys = min(keys, blocks * spec.block_size)
        # A draft model reads what was sampled beside the tokens of a step.
        tokens = scheduler.max_num_batched_tokens + scheduler.max_num_seqs * max(self.verify, default=0)
        requests = scheduler.max_num_seqs
        if chunk := getattr(spec, "attention_chunk_size", None):  # a request is one for each of its chunks
            requests = 2 * requests + tokens // chunk
        return shape, requests, tokens, keys

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        for layer in self._of_codes:  # where a CUDA graph reads them, whatever weights have come since
            layer.impl.scales_of(layer)
        batch = super().build(common_prefix_len, common_attn_metadata, fast_build)
        requests, tokens = len(batch.seq_lens), batch.num_actual_tokens
        most = most_tokens(requests, tokens, common_attn_metadata.max_query_len, self.verify)
        return replace(batch, plans=self._plan(batch, most), ranges=self._kept(batch.ranges, tokens, most))

    def _kept(self, ranges: torch.Tensor | None, tokens: int, most: int) -> torch.Tensor | None:
        """Ranges of a step in the place of the last ones; of a step of decode there are none."""
        if self._ranges is None or most == 1:
            return None
        kept = self._ranges[:tokens]
        return kept.copy_(self._no_range if ranges is None else ranges.pin_memory(), non_blocking=True)

    def update_draft_decode_metadata(self, metadata: Metadata) -> None:
        """Plan a drafter's next step within its CUDA graph: every request has as many tokens, one or a block."""
        self._plan(metadata, most=-(-metadata.num_actual_tokens // len(metadata.seq_lens)))

    def _plan(self, batch: Metadata, most: int) -> dict[tuple[int | None, ...], Any]:
        """The plans of a batch whose requests have ``most`` tokens or fewer, in the place of the last ones."""
        has_ranges = self._ranges is not None and most > 1
        return {
            layers: planner.plan(batch.query_start_loc, batch.seq_lens, batch.num_actual_tokens, most, has_ranges)
            for layers, planner in self._planners.items()
            if layers[-1] is batch.causal or self._sees_all  # a drafter's may be beside the model's
        }


class ExactMetadataBuilder(PlannedMetadataBuilder):
    """The same in exact arithmetic."""

    def _planner(self, layers: list[Any]) -> Any:
        from ...ops.exact.cuda import ExactPlanner

        shape, requests, tokens, keys = self._sizes(layers)
        return ExactPlanner(shape, self._device, requests, tokens, keys)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        for layer in self._layers:  # before a graph is captured, whose memory would not stay theirs
            layer.impl.cache_in(cache_of(layer))
        return super().build(common_prefix_len, common_attn_metadata, fast_build)


class CudaFixedSplitAttention(FixedSplitAttention):
    """One attention layer, whose cache is written by vLLM's kernel: a copy, row by row. Codes are written by ours."""

    reduction = AttentionReduction.of_device("cuda", envs.ATTENTION.read())
    attn_types: ClassVar[tuple[str, ...]] = (
        AttentionType.DECODER,
        AttentionType.ENCODER_ONLY,
        AttentionType.ENCODER_DECODER,
    )
    serves_encoders: ClassVar[tuple[str, ...]] = ("triton",)

    @property
    def writes_codes(self) -> bool:
        """Whether its kernels can write codes of what they give."""
        return uses_triton()

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values to their pages, before anything reads them. A negative slot is padding."""
        if self.holds_codes or self.is_of_encoder:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
            return
        caches = [cache.transpose(1, 2) for cache in split_cache(kv_cache)]
        scales = layer._k_scale, layer._v_scale
        patch_points.WRITE_CACHE.get()(key, value, *caches, slot_mapping, self.kv_cache_dtype, *scales)

    def _attend(
        self, layer: torch.nn.Module, query: torch.Tensor, cache: PagedCache, batch: Metadata, out: torch.Tensor
    ) -> None:
        codes = codes_of(layer)
        if codes is None:
            super()._attend(layer, query, cache, batch, out)
            return
        from ...ops.attention.cuda import paged_attention

        paged_attention(self._call(query, cache, batch), out, batch.plans[self.planned_as], codes)

    def slots_of_step(self, layer: torch.nn.Module) -> CacheSlots | None:
        if self.is_of_encoder or reads_another_cache(layer) or self.scales_tokens:  # which no operation fuses
            return None
        _, _, kv_cache, slots = patch_points.ATTENTION_CONTEXT.get()(layer.layer_name)
        return None if slots is None else self._slots(layer, kv_cache, slots)


class ExactCudaAttention(ExactAttention):
    """One attention layer in exact arithmetic, whose cache holds keys and values on their grids, in as many bytes."""

    _cache: Any = None

    def cache_in(self, kv_cache: torch.Tensor) -> Any:
        """The :class:`...ops.exact.cuda.Cache` in an engine's memory; its exponents have memory of their own, which
        stays as long as the engine's does.
        """
        held = self._cache
        if held is None or held.digits.data_ptr() != kv_cache.data_ptr() or len(held.digits) != len(kv_cache):
            from ...ops.exact.cuda import Cache

            held = self._cache = Cache.in_memory_of(kv_cache)
        return held

    def do_kv_cache_update(
        self,
        layer: torch.nn.Module,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Write the step's keys and values to their pages, before anything reads them. A negative slot is padding."""
        self.cache_in(kv_cache).write(key, value, slot_mapping)

    def _cache_of_step(self, layer: torch.nn.Module, kv_cache: torch.Tensor, batch: Metadata) -> PagedCache:
        cache = super()._cache_of_step(layer, kv_cache, batch)
        return replace(cache, stored=self.cache_in(kv_cache))

    def _attend(
        self, layer: torch.nn.Module, query: torch.Tensor, cache: PagedCache, batch: Metadata, out: torch.Tensor
    ) -> None:
        from ...ops.exact.cuda import paged_attention

        paged_attention(self._call(query, cache, batch), out, batch.plans[self.planned_as])


_Base: Any = patch_points.CUDA_BACKEND.get()


class Backend(FixedSplitBackendMixin, _Base):
    """A backend of its own, with the cache of vLLM's Triton backend."""

    @staticmethod
    def get_supported_kernel_block_sizes(*spec: object) -> list[int | MultipleOf]:
        """Those of vLLM's Triton backend; FlexAttention takes whole tiles of keys from a page."""
        original = patch_points.CUDA_BACKEND.get().get_supported_kernel_block_sizes(*spec)
        return original if uses_triton() else [MultipleOf(PAGE_SIZE)]

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        return super().supports_block_size(block_size) and (uses_triton() or (block_size or 0) % PAGE_SIZE == 0)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """A page that the tensor memory accelerator copies as one tile."""
        return max(default_block_size, PAGE_SIZE)

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FixedSplitAttention]:
        return CudaFixedSplitAttention

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        if uses_triton():
            return PlannedMetadataBuilder
        from .attention_flex import FlexMetadataBuilder

        return FlexMetadataBuilder


class ExactBackend(Backend):
    """The same in exact arithmetic, which has no FlexAttention."""

    @staticmethod
    def get_impl_cls() -> type[FixedSplitAttention]:
        return ExactCudaAttention

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return ExactMetadataBuilder

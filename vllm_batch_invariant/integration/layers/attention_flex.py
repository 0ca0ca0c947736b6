"""FlexAttention on CUDA: a step's block masks are written on the GPU, and steps of decode are CUDA graphs."""

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionCGSupport

from ...ops.attention import AttentionReduction
from ..engine.cuda_graphs import most_tokens
from .attention import Metadata, MetadataBuilder, key_cache_of


class FlexMetadataBuilder(MetadataBuilder):
    """Plans each step; one of decode in memory that it keeps, so that CUDA graphs find the next plan where they found
    the last.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._spec, self._layer_names, self._config, self._device = kv_cache_spec, layer_names, vllm_config, device
        self._planners: dict[int, Any] = {}

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Metadata:
        batch = super().build(common_prefix_len, common_attn_metadata, fast_build)
        lengths = common_attn_metadata.seq_lens_cpu_upper_bound
        # Exact without speculative decoding, which is refused beside FlexAttention.
        on_host = None if lengths is None else (common_attn_metadata.query_start_loc_cpu.numpy(), lengths.numpy())
        decode = most_tokens(len(batch.seq_lens), batch.num_actual_tokens, common_attn_metadata.max_query_len) == 1
        planner = self._planner()
        plan = planner.plan(batch.query_start_loc, batch.seq_lens, batch.block_table, decode, on_host)
        return replace(batch, plans={(planner.shape.heads, window): plan for window in self._windows()})

    def _windows(self) -> list[int | None]:
        """Of the layers."""
        layers = self._config.compilation_config.static_forward_context
        return [layers[name].impl.spec.sliding_window for name in self._layer_names]

    def _planner(self) -> Any:
        """Made when the cache is there; another for another cache, such as one with which memory is measured."""
        from ...ops.attention.flex.plan import KeyLayout, Planner, tile_of
        from ...ops.attention.shapes import AttentionShape

        layers = [self._config.compilation_config.static_forward_context[name] for name in self._layer_names]
        cache = key_cache_of(layers[0])
        if cache.data_ptr() not in self._planners:
            model, scheduler = self._config.model_config, self._config.scheduler_config
            shape = AttentionShape(
                model.get_num_attention_heads(self._config.parallel_config),
                self._spec.num_kv_heads,
                self._spec.head_size,
                self._spec.dtype,
                AttentionReduction.of_device("cuda", "flex"),
            )
            layout = KeyLayout.of(cache, tile_of(shape).block_n)
            shared = self._config.cache_config.enable_prefix_caching
            self._planners[cache.data_ptr()] = Planner(
                shape,
                layout,
                self._device,
                scheduler.max_num_seqs,
                model.max_model_len,
                self._windows(),
                None if shared else layout.num_pages * layout.page_size,
            )
        return self._planners[cache.data_ptr()]

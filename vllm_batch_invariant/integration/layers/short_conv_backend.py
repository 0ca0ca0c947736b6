"""What a layer of a short convolution is told of a step, in the place of vLLM's backend for it."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ...ops.causal_conv import ConvStates
from ..reviews import patch_points

_Base: Any = patch_points.SHORT_CONV_BACKEND.get()
_BaseBuilder: Any = patch_points.SHORT_CONV_BUILDER.get()
_BaseMetadata: Any = patch_points.SHORT_CONV_METADATA.get()


@dataclass
class Metadata(_BaseMetadata):
    """Of a step, for the layers of one group. The fields of vLLM's split requests into prefills and decodes, which the
    operation does not need.

    Attributes:
        starts: [requests + 1] int32.
        context_lens: [requests] int32.
        pages: [requests] int32, where their states are.
        longest: the most new tokens of a request.
    """

    starts: Any = None
    context_lens: Any = None
    pages: Any = None
    longest: int = 0

    def states_of(self, held: torch.Tensor) -> ConvStates:
        """Of a layer with states [pages, rows, channels]."""
        return ConvStates(held, self.pages, self.starts, self.context_lens, self.longest)


class Builder(_BaseBuilder):
    """Writes a step to memory that it keeps, so that CUDA graphs find the next one where they found the last."""

    metadata_cls = Metadata
    supports_update_block_table: ClassVar[bool] = False
    needs_causal_conv1d_metadata: ClassVar[bool] = False

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._mode = vllm_config.cache_config.mamba_cache_mode
        requests = vllm_config.scheduler_config.max_num_seqs
        self._starts = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self._context_lens, self._pages = self._starts[1:].clone(), self._starts[1:].clone()

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False, **named: Any
    ) -> Metadata:
        made = super().build(common_prefix_len, common_attn_metadata, fast_build, **named)
        step = common_attn_metadata
        # Where a request's state is follows the tokens that it has, if pages are kept for other requests.
        pages = patch_points.MAMBA_PAGES.get()(step.block_table_tensor, step.seq_lens, self.kv_cache_spec, self._mode)
        held = (self._starts, step.query_start_loc), (self._context_lens, step.compute_num_computed_tokens())
        starts, context_lens, pages = (
            kept[: len(new)].copy_(new, non_blocking=True) for kept, new in (*held, (self._pages, pages[:, 0]))
        )
        return replace(made, starts=starts, context_lens=context_lens, pages=pages, longest=int(step.max_query_len))


class Backend(_Base):
    """In the place of vLLM's."""

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

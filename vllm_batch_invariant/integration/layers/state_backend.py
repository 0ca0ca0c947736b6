"""What a layer with a state of each request is told of a step, whatever vLLM's backend for it is."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ...errors import NotCovered
from ..reviews import patch_points


@dataclass
class StateStep:
    """Of a step, for the layers of one group.

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

    def states_of(self, held: torch.Tensor, kind: Any) -> Any:
        """What an operation is given of a layer with states [pages, ...]; ``kind`` is the operation's class for it."""
        return kind(held, self.pages, self.starts, self.context_lens, self.longest)


def step_of_layer(name: str) -> StateStep | None:
    """What the layer of a name is told of the step that is computed; None in one that measures memory or compiles
    kernels of attention: no states are there, and what is computed is thrown away.
    """
    told = patch_points.FORWARD_CONTEXT.get()().attn_metadata
    return None if told is None else told.get(name)


def with_one_page(spec: Any) -> Any:
    """vLLM's specification of a layer's pages, without a page for each draft, as one page has what a step with rejected
    drafts leaves, and without one for a state within a step of prefill.

    Raises:
        NotCovered: as many drafts as a page has tokens beside a prefix cache: the next step may begin in a page between
            that of the last one and its own, and vLLM has none there.
    """
    drafts, page = spec.num_speculative_blocks, spec.block_size
    if spec.mamba_cache_mode != "none" and drafts >= page:
        raise NotCovered(
            f"{drafts} drafts beside a prefix cache with pages of {page} tokens",
            "their states may need a page that vLLM has left out",
            f"pass at most {page - 1} num_speculative_tokens, or --no-enable-prefix-caching",
        )
    return replace(spec, num_speculative_blocks=0, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)


class StateStepBuilder:
    """Writes a step to memory that it keeps, so that CUDA graphs find the next one where they found the last. The first
    base of a class beside vLLM's builder, whose split into prefills and decodes the operations do not need.
    """

    kv_cache_spec: Any

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]  # of vLLM's
        self._mode = vllm_config.cache_config.mamba_cache_mode
        requests = vllm_config.scheduler_config.max_num_seqs
        self._starts = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        self._context_lens, self._pages = self._starts[1:].clone(), self._starts[1:].clone()

    def step_of(self, step: Any) -> dict[str, Any]:
        """The attributes of :class:`StateStep`, of what vLLM tells its backends."""
        # Where a request's state is follows the tokens that it has, if pages are kept for other requests.
        pages = patch_points.MAMBA_PAGES.get()(step.block_table_tensor, step.seq_lens, self.kv_cache_spec, self._mode)
        held = (self._starts, step.query_start_loc), (self._context_lens, step.compute_num_computed_tokens())
        starts, context_lens, pages = (
            kept[: len(new)].copy_(new, non_blocking=True) for kept, new in (*held, (self._pages, pages[:, 0]))
        )
        longest = int(step.max_query_len)
        return {"starts": starts, "context_lens": context_lens, "pages": pages, "longest": longest}


class StateBackend:
    """The first base of a class beside vLLM's backend.

    Attributes:
        builder: of the steps.
    """

    builder: ClassVar[type[StateStepBuilder]]

    @classmethod
    def get_builder_cls(cls) -> type[StateStepBuilder]:
        return cls.builder

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        return True

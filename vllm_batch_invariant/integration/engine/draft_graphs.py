"""CUDA graphs for a draft model in vLLM's second model runner, which launches its layers from the host.

    first   the rows of a step and a sampled token of each request -> its first draft    T tokens of R requests
    next    its last draft -> one more                                                   R tokens of R requests

A graph holds all of it: slots, the plan of attention, layers, logits, the draft. So the host launches k graphs for k
drafts, and between them nothing. Requests that a graph has and a step has not are padding: their index is -1, they have
no keys, and their token is 0. A step that no graph has room for is left to vLLM's methods. Drafts decide no bits.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ..reviews import patch_points, sources
from .cuda_graphs import is_verify, put, verify_lengths

logger = logging.getLogger("vllm.batch_invariant")

_SIZES = (1, 2, 4, 8, *(size for power in range(4, 12) for size in (2**power, 3 * 2 ** (power - 1))))
"""Where ranges of rows end that have one schedule of a GEMM: between them a graph more saves little."""


def install() -> None:
    """Give vLLM's drafter of that kind graphs, if there is one and it is as expected."""
    if not patch_points.DRAFT_MODEL.is_there():
        return
    drafter = patch_points.DRAFT_MODEL.get()
    if drafter.capture is capture:
        return
    if sources.unread("drafter", sources.installed):
        logger.info("%s is not the one known here: draft models run without CUDA graphs.", drafter.__name__)
        return
    drafter.prefill_cudagraph_manager = drafter.decode_cudagraph_manager = None
    drafter.init_cudagraph_manager, drafter.capture = init_cudagraph_manager, capture
    drafter._prefill = first_by_graph(drafter._prefill)
    drafter._multi_step_decode = next_by_graphs(drafter._multi_step_decode)


def draft_lengths(vllm_config: Any) -> tuple[int, ...]:
    """The tokens of a request that a draft model reads after a verify step: one more than the model has read."""
    return tuple(1 + length for length in verify_lengths(vllm_config))


def first_graphs(largest: int, most_requests: int, lengths: tuple[int, ...]) -> list[Any]:
    """Graphs of first drafts: behind verify steps, and behind any other mix.

    Args:
        largest: tokens of a graph.
        most_requests: of a step.
        lengths: of :func:`draft_lengths`.
    """
    found = [
        _graph(count * length, count, length)
        for length in lengths
        for count in _sizes(most_requests)
        if count * length <= largest
    ]
    mixes = ((tokens, min(tokens // 2, most_requests)) for tokens in _sizes(largest) if tokens > 1)
    return found + [_graph(tokens, count) for tokens, count in mixes if not is_verify(count, tokens, lengths)]


def next_graphs(largest: int, most_requests: int) -> list[Any]:
    """Graphs of one more draft."""
    return [_graph(count, count, 1) for count in _sizes(min(most_requests, largest))]


def _graph(tokens: int, requests: int, each: int | None = None) -> Any:
    full = patch_points.CUDAGRAPH_MODE.get().FULL
    return patch_points.GRAPH.get()(full, num_tokens=tokens, num_reqs=requests, uniform_token_count=each)


def _sizes(most: int) -> list[int]:
    return [*(size for size in _SIZES if size < most), most]


def init_cudagraph_manager(self: Any, cudagraph_mode: Any) -> None:
    """The drafter's method of that name. vLLM lets go of graphs that it made to see their memory, by these attributes
    and the class.
    """
    self.prefill_cudagraph_manager = self.decode_cudagraph_manager = None
    config, mode = self.vllm_config, patch_points.CUDAGRAPH_MODE.get().FULL
    largest = max(config.compilation_config.cudagraph_capture_sizes or (), default=0)
    if cudagraph_mode != mode or largest < 2 or self.dp_size > 1:
        return
    builders = [one for groups in self.attn_groups for group in groups for one in group.metadata_builders]
    if not all(hasattr(one, "verify") for one in builders):
        return  # another backend, of --speculative-config: it may plan on the host
    lengths = draft_lengths(config)
    for builder in builders:
        builder.verify = lengths
    make = partial(patch_points.GRAPH_MANAGER.get(), config, self.device, mode, 1)
    self.prefill_cudagraph_manager = make()
    put(self.prefill_cudagraph_manager, first_graphs(largest, self.max_num_reqs, lengths))
    if self.num_speculative_steps > 1:
        self.decode_cudagraph_manager = make()
        put(self.decode_cudagraph_manager, next_graphs(largest, self.max_num_reqs))


def capture(self: Any) -> None:
    """The drafter's method of that name: capture the graphs, with padding alone in them."""

    def of_padding(step: Callable[[Any, Any], None], graph: Any, warmup: bool) -> Callable[[Any], None]:
        self.idx_mapping.fill_(-1)
        for zeros in (self.last_token_indices, self.input_buffers.query_start_loc, self.input_buffers.seq_lens):
            zeros.zero_()
        return lambda cudagraph_mode: step(self, graph)

    for manager, step, name in (
        (self.prefill_cudagraph_manager, draft_first, "first drafts"),
        (self.decode_cudagraph_manager, draft_next, "more drafts"),
    ):
        if manager is not None:
            manager.capture(partial(of_padding, step), f"Capturing CUDA graphs of {name}")


def draft_first(self: Any, graph: Any) -> None:
    """What a graph of first drafts does, with what :data:`~.patch_points.DRAFT_INPUTS` has written."""
    requests, tokens = graph.num_reqs, graph.num_tokens
    each = tokens // requests
    starts = np.arange(requests + 1, dtype=np.int32) * each
    starts[-1] = tokens
    self.current_draft_step.zero_()
    positions = self.expanded_positions[:tokens]
    hidden_states = _run_model(
        self, graph, starts, self.expanded_input_ids[:tokens], positions, self.expanded_slot_mappings
    )
    last = self.last_token_indices[:requests]
    self.draft_tokens[:requests, 0] = _draft(self, hidden_states[last], positions[last])


def draft_next(self: Any, graph: Any) -> None:
    """What a graph of one more draft does: each request has its last draft among ``input_ids``, and ``positions`` has
    the place before it.
    """
    requests, buffers, step = graph.num_reqs, self.input_buffers, self.current_draft_step
    step.add_(1)
    positions = buffers.positions[:requests]
    positions.add_(1).clamp_(max=self.max_model_len - 1)
    buffers.seq_lens[:requests] = (positions + 1) * (self.idx_mapping[:requests] >= 0)
    starts = np.arange(requests + 1, dtype=np.int32)
    hidden_states = _run_model(
        self, graph, starts, buffers.input_ids[:requests], positions, self.block_tables.slot_mappings
    )
    tokens = _draft(self, hidden_states, positions)
    buffers.input_ids[:requests] = tokens
    drafts = self.draft_tokens[:requests]
    column = torch.arange(drafts.shape[1], device=drafts.device)
    drafts.copy_(torch.where(column == step, tokens.unsqueeze(1), drafts))


def _run_model(
    self: Any, graph: Any, starts: np.ndarray, input_ids: torch.Tensor, positions: torch.Tensor, slots: torch.Tensor
) -> torch.Tensor:
    """The draft model's hidden states [tokens, hidden size] of the rows of a graph.

    Args:
        self: vLLM's drafter.
        graph: vLLM's description of it.
        starts: [requests + 1] where each request's rows begin, as far as the host decides by it.
        input_ids: [tokens] int32.
        positions: [tokens] int64.
        slots: [groups of layers, more than tokens] int64, where the places of their keys are written.
    """
    requests = graph.num_reqs
    first_rows = self.input_buffers.query_start_loc[: requests + 1]
    slots = self.block_tables.compute_slot_mappings(
        self.idx_mapping[:requests], first_rows, positions, graph.num_tokens, out=slots
    )
    metadata = self._build_attn_metadata(
        num_reqs=requests,
        batch_desc=graph,
        query_start_loc_np=starts,
        seq_lens_cpu_upper_bound=torch.zeros(requests, dtype=torch.int32, device="cpu"),
        step=0,
        slot_mappings=slots,
    )
    by_layer = patch_points.SLOTS_BY_LAYER.get()(slots, self.kv_cache_config)
    return self._run_model(input_ids, positions, metadata, by_layer, None)


def _draft(self: Any, hidden_states: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """[requests] int64, a draft of each; 0 for padding, whose hidden states may be anything."""
    indices = self.idx_mapping[: len(positions)]
    tokens = self.sample_draft(
        hidden_states,
        positions,
        indices,
        self.temperature,
        self.seeds,
        self.current_draft_step,
        self.draft_logits,
    )
    return torch.where(indices >= 0, tokens, 0)


def first_by_graph(launched: Callable[..., None]) -> Callable[..., None]:
    """The drafter's method ``_prefill``, which replays a graph where ``launched`` would launch each operator."""

    def _prefill(
        self: Any,
        input_batch: Any,
        num_rejected: torch.Tensor,
        last_sampled: torch.Tensor,
        num_reqs: int,
        skip_attn: bool,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> None:
        longest = int(input_batch.num_scheduled_tokens.max())
        each = 1 + longest if longest * num_reqs == input_batch.num_tokens else None
        tokens = input_batch.num_tokens + num_reqs
        graph = None if skip_attn else _chosen(self.prefill_cudagraph_manager, num_reqs, tokens, each)
        if graph is None:
            launched(self, input_batch, num_rejected, last_sampled, num_reqs, skip_attn, num_tokens_across_dp)
            return
        patch_points.DRAFT_INPUTS.get()(
            input_buffers=self.input_buffers,
            input_batch=input_batch,
            last_sampled=last_sampled,
            num_rejected=num_rejected,
            expanded_input_ids=self.expanded_input_ids,
            expanded_positions=self.expanded_positions,
            last_token_indices=self.last_token_indices,
            max_num_reqs=self.max_num_reqs,
            max_model_len=self.max_model_len,
        )
        self.prefill_cudagraph_manager.run_fullgraph(graph)

    return _prefill


def next_by_graphs(launched: Callable[..., None]) -> Callable[..., None]:
    """The drafter's method ``_multi_step_decode``, in the same way."""

    def _multi_step_decode(
        self: Any,
        input_batch: Any,
        num_rejected: torch.Tensor,
        num_reqs: int,
        skip_attn: bool,
        num_tokens_across_dp: torch.Tensor | None,
    ) -> None:
        graph = None if skip_attn else _chosen(self.decode_cudagraph_manager, num_reqs, num_reqs, 1)
        if graph is None:
            launched(self, input_batch, num_rejected, num_reqs, skip_attn, num_tokens_across_dp)
            return
        padded, buffers = graph.num_reqs, self.input_buffers
        buffers.positions[:padded] = self.expanded_positions[self.last_token_indices[:padded]]
        buffers.input_ids[:padded] = torch.where(self.idx_mapping[:padded] >= 0, self.draft_tokens[:padded, 0], 0)
        buffers.query_start_loc[: padded + 1] = self.arange_gpu[: padded + 1].clamp(max=num_reqs)
        for _ in range(1, self.num_speculative_steps):
            self.decode_cudagraph_manager.run_fullgraph(graph)

    return _multi_step_decode


def _chosen(manager: Any | None, requests: int, tokens: int, each: int | None) -> Any | None:
    """The graph that a step is replayed in, or None."""
    if manager is None:
        return None
    graph = manager.dispatch(requests, tokens, each, 0)
    return graph if graph.cg_mode == patch_points.CUDAGRAPH_MODE.get().FULL else None

"""Which pages have the states of requests, where drafts are verified beside a prefix cache.

A step writes the page of its last token, a draft's if it has one. vLLM keeps a state behind each draft in a page of its
own, and takes that of the last accepted one to the next page, or to the page that others may find, when that is full;
its kernels that do so are for GPUs. Here one page has the states behind all drafts of a step, which are read by
position: it is taken whole, and may be taken to the page before it, too, where drafts over the end of that one were
rejected.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from ..reviews import patch_points


def install() -> None:
    """Replace how vLLM's first model runner moves states from page to page. A vLLM that lacks one of the places has no
    states beside drafts.
    """
    moves, keeps = patch_points.MOVE_STATES, patch_points.KEEP_STATES
    if moves.is_there() and keeps.is_there():
        moves.put(moving_whole_pages(moves.get()))
        keeps.put(keep_full_pages)


def moving_whole_pages(preprocess: Callable[..., None]) -> Callable[..., None]:
    """vLLM's function that takes states to the pages of a step, as it does so without drafts: they have one page."""

    @wraps(preprocess)
    def move(*args: Any, align_ctx: object = None, **named: Any) -> None:  # of vLLM's kernels
        preprocess(*args, **named)

    return move


def keep_full_pages(
    *,
    bufs: Any,
    num_reqs: int,
    num_accepted_tokens_gpu: torch.Tensor,
    num_accepted_tokens_cpu_tensor: torch.Tensor,
    input_batch: Any,
    kv_cache_config: Any,
    forward_context: dict[str, Any],
    **_: object,
) -> None:
    """In the place of vLLM's function behind a verify step: copy the page of a request whose accepted tokens have
    filled the one before it, as that is found by others.

    Args:
        bufs: vLLM's, with what it knows of the step.
        num_reqs: of the step.
        num_accepted_tokens_gpu: [requests] tokens that the step gave each.
        num_accepted_tokens_cpu_tensor: [requests], by which vLLM finds the state of the last accepted draft; becomes 1,
            for which it takes a page whole.
        input_batch: with the numbers of pages.
        kv_cache_config: vLLM's, with the layers of each group.
        forward_context: layers by name.
    """
    step = bufs.postprocess_align
    buffers = (
        *(step.num_computed_tokens_buf, step.num_scheduled_tokens_buf, step.num_draft_tokens_buf),
        step.mamba_state_idx_buf,
    )
    computed, scheduled, drafts, written = (buffer.cpu[:num_reqs].long() for buffer in buffers)
    sure = computed + scheduled - drafts
    full = (sure + num_accepted_tokens_gpu[:num_reqs] - 1) // step.block_size
    rows = ((full * step.block_size >= sure) & (full - 1 != written)).nonzero().flatten()
    for group in step.mamba_group_ids if len(rows) else ():
        pages = input_batch.block_table[group].get_device_tensor(num_reqs)[rows].long()
        source, to = (pages.gather(1, column[rows, None]).flatten() for column in (written, full - 1))
        for name in kv_cache_config.kv_cache_groups[group].layer_names:
            for states in forward_context[name].kv_cache:
                states[to] = states[source]
    num_accepted_tokens_cpu_tensor[:num_reqs] = 1

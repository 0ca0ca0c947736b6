"""Pages that the prefix cache takes for written and nobody has written.

vLLM has the pages that a step will fill found by others as soon as it schedules the step. With priorities a request may
be preempted in the same pass, behind one that comes later in it: its step is not computed, and its pages, which were
given back, are still found: by itself when it comes back, and by others that begin alike.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from ..reviews import patch_points


def install() -> None:
    """Have the scheduler forget them."""
    scheduler: Any = patch_points.SCHEDULER.get()
    scheduler._preempt_request = forgetting_unwritten_pages(scheduler._preempt_request)


def forgetting_unwritten_pages(preempt: Callable[..., None]) -> Callable[..., None]:
    """vLLM's method, by which a request gives its pages back."""

    @wraps(preempt)
    def _preempt_request(self: Any, request: Any, *args: Any, **named: Any) -> None:
        for of_layers in self.kv_cache_manager.coordinator.single_type_managers:
            pages = of_layers.req_to_blocks.get(request.request_id, ())
            for page in pages[request.num_computed_tokens // of_layers.block_size :]:
                if page.block_hash is not None:
                    of_layers.block_pool._maybe_evict_cached_block(page)
        preempt(self, request, *args, **named)

    return _preempt_request

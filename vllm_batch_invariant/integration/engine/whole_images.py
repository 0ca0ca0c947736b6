"""Steps that end in no image, and in no frame of a video, whose tokens see each other (Gemma 3 and 4): its first ones
would not see those of a later step.

vLLM takes care of that with ``--disable-chunked-mm-input``, but for an image that begins where a step does, or before
it, as behind a hit of the prefix cache that ends inside.
"""

from collections.abc import Iterable
from functools import wraps
from typing import Any

from ..reviews import patch_points


def install() -> None:
    """Have the scheduler end a step before an image that does not fit, where a model needs it."""
    scheduler: Any = patch_points.SCHEDULER.get()
    schedule_items = getattr(scheduler, "_try_schedule_encoder_inputs", None)
    if schedule_items is None:  # an older vLLM, with which images are refused
        return

    @wraps(schedule_items)
    def _try_schedule_encoder_inputs(
        self: Any, request: Any, num_computed_tokens: int, num_new_tokens: int, *others: Any, **named: Any
    ) -> Any:
        if getattr(self.vllm_config.model_config, "is_mm_prefix_lm", False):
            num_new_tokens = tokens_of_step(request.mm_features or (), num_computed_tokens, num_new_tokens)
        return schedule_items(self, request, num_computed_tokens, num_new_tokens, *others, **named)

    scheduler._try_schedule_encoder_inputs = _try_schedule_encoder_inputs


def tokens_of_step(items: Iterable[Any], computed: int, new: int) -> int:
    """How many of ``new`` tokens behind ``computed`` ones a step may have: all, or those before the image that it would
    end in.

    Args:
        items: vLLM's, of the request.
        computed: tokens of earlier steps, or of the prefix cache.
        new: tokens that fit.
    """
    for item in items:
        for first, last in item.mm_position.extract_embeds_range() if item.modality != "audio" else ():
            if first < computed + new <= last:
                return max(0, first - computed)
    return new

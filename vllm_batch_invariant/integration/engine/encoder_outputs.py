"""What an encoder gave, on its way to the decoder's cross attention.

A decoder writes it to the pages of the requests of a step, one after the other as they lie in the batch. vLLM's first
model runner encodes in the order in which they were scheduled. That is another where a request that was preempted comes
back beside a new one: each would be answered about the other's audio.
"""

from functools import wraps
from typing import Any

from ..reviews import patch_points


def install_in_worker() -> None:
    """Have the first model runner encode in the order of its batch."""
    runner: Any = patch_points.MODEL_RUNNER.get()
    encode = runner._execute_mm_encoder

    @wraps(encode)
    def _execute_mm_encoder(self: Any, scheduler_output: Any) -> Any:
        if self.model_config.is_encoder_decoder:
            asked, places = scheduler_output.scheduled_encoder_inputs, self.input_batch.req_id_to_index
            scheduler_output.scheduled_encoder_inputs = {name: asked[name] for name in sorted(asked, key=places.get)}
        return encode(self, scheduler_output)

    runner._execute_mm_encoder = _execute_mm_encoder

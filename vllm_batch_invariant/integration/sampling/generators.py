"""Generators of seeded requests, which a step that samples nothing for them leaves alone.

While a prompt is computed in chunks, vLLM's first model runner samples from the last row of every chunk and then turns
the request's generator back by the 4 numbers that a GPU takes from it; a generator of the CPU cannot be turned back.
"""

from typing import Any

import numpy as np

from ..reviews import patch_points
from ..side_table import beside


def install() -> None:
    """Take such generators out of the batch from before it samples until its tokens are kept."""
    runner = patch_points.MODEL_RUNNER.get()
    sample, keep = runner._sample, runner._bookkeeping_sync

    def sample_with_those_needed(self: Any, *args: Any, **named: Any) -> Any:
        batch = self.input_batch
        discarded = np.nonzero(self.discard_request_mask.np[: batch.num_reqs])[0].tolist()
        beside(self).resting = {row: batch.generators.pop(row) for row in discarded if row in batch.generators}
        return sample(self, *args, **named)

    def keep_and_bring_back(self: Any, *args: Any, **named: Any) -> Any:
        kept = keep(self, *args, **named)
        self.input_batch.generators.update(beside(self).resting)
        return kept

    runner._sample = sample_with_those_needed
    runner._bookkeeping_sync = keep_and_bring_back

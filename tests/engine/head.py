"""Run in a worker: an output head whose sums follow the number of rows."""

from typing import Any

import torch
import torch.nn.functional as F

from vllm_batch_invariant.integration.reviews import patch_points


def in_two_parts_for_many_rows(llm: Any) -> None:
    """Have a head in fp32 add K in two parts for more than four rows."""
    processor = patch_points.LOGITS_PROCESSOR.get()
    original = processor._apply_head

    def apply(self: Any, lm_head: Any, hidden: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if len(hidden) <= 4:
            return original(self, lm_head, hidden, bias)
        parts = zip(hidden.float().chunk(2, -1), lm_head.weight.float().chunk(2, -1), strict=True)
        return sum(F.linear(x, weight) for x, weight in parts)

    processor._apply_head = apply

"""A parser of thoughts for vLLM's --reasoning-parser-plugin, and faults of where it has a grammar begin."""

from typing import Any

from vllm.reasoning import ReasoningParserManager
from vllm.reasoning.basic_parsers import BaseThinkingReasoningParser

from vllm_batch_invariant.integration.reviews import patch_points

START, END = "def", "self"
"""Tokens of the demo's tokenizer."""


@ReasoningParserManager.register_module("last_mark")
class LastMark(BaseThinkingReasoningParser):
    """A thought has ended if the last mark of the whole answer is the end of one."""

    start_token, end_token = START, END

    def is_reasoning_end_streaming(self, input_ids: Any, delta_ids: Any) -> bool:
        return self.is_reasoning_end(input_ids)


def end_as_vllm_says(_llm: Any) -> None:
    """Have vLLM's own function say where among the tokens of a step a thought ends."""
    manager: Any = patch_points.STRUCTURED_OUTPUTS.get()
    manager._get_constraint_bounds = manager._get_constraint_bounds.__wrapped__


def end_with_the_step(_llm: Any) -> None:
    """Have a thought that ends within a step end with its last token."""
    manager: Any = patch_points.STRUCTURED_OUTPUTS.get()
    before = manager._get_constraint_bounds

    def _get_constraint_bounds(self: Any, request: Any, spec_tokens: Any, spec_tokens_committed: bool = False) -> Any:
        bounds = before(self, request, spec_tokens, spec_tokens_committed)
        last = max(1, len(spec_tokens))
        return type(bounds)(last, last) if 0 < bounds.grammar_start <= last else bounds

    manager._get_constraint_bounds = _get_constraint_bounds

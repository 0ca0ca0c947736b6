"""Requests beside speculative decoding that count the tokens of a thought: those with a thinking budget are refused,
and where it has not run those whose grammar begins behind a thought. A parser of thoughts decides nothing of others.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

from ... import envs
from .. import reviews
from ..reviews import patch_points
from ..sampling import grammars


def install() -> None:
    """Hook into the front end of this process."""
    processor = patch_points.INPUT_PROCESSOR.get()
    processor.process_inputs = checked(processor.process_inputs)


def checked(process_inputs: Callable[..., Any]) -> Callable[..., Any]:
    """vLLM's method of the front end, which refuses such requests.

    It then raises:
        VLLMValidationError: vLLM's, of which a server tells the client.
    """

    @wraps(process_inputs)
    def process_and_check(self: Any, *args: Any, **named: Any) -> Any:
        request = process_inputs(self, *args, **named)
        if problem := objection(request.sampling_params, self.vllm_config):
            raise patch_points.VALIDATION_ERROR.get()(f"batch-invariant mode does not cover {problem}")
        return request

    return process_and_check


def objection(params: Any, config: Any) -> str:
    """What of a request is not covered beside drafts, and what to do; empty if it is.

    Args:
        params: vLLM's ``SamplingParams``; None of a request that is pooled.
        config: vLLM's configuration.
    """
    if params is None or config.speculative_config is None:
        return ""
    if getattr(params, "thinking_token_budget", None) is not None:
        return (
            "a thinking budget beside speculative decoding: where the answer must stop thinking is counted with the "
            "drafts; leave thinking_token_budget out, or start the server without --speculative-config"
        )
    settings = config.structured_outputs_config
    is_behind = settings.reasoning_parser and not settings.enable_in_reasoning
    if params.structured_outputs is None or not is_behind or _has_run(config.device_config.device_type):
        return ""
    return (
        "a grammar behind thoughts beside speculative decoding: where it begins has been compared on a CPU with vLLM "
        "0.32 alone; leave the grammar out, or start the server without --speculative-config"
    )


def _has_run(device_type: str) -> bool:
    """Whether engines have found the beginning of a grammar among drafts as among single tokens."""
    ran, version = reviews.ran().grammars_behind_thoughts, patch_points.installed_version()
    has_run = device_type in ran and version.startswith(ran[device_type])
    is_mended = grammars.counts_thoughts_by_token(patch_points.STRUCTURED_OUTPUTS.get())
    return has_run or (is_mended and envs.starts_untried())

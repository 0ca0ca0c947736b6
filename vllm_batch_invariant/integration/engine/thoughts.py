"""Requests beside speculative decoding that count the tokens of a thought: those with a thinking budget are refused,
and where it has not run those whose grammar begins behind a thought. A parser of thoughts decides nothing of others.
"""

from typing import Any

from ... import envs
from .. import reviews
from ..reviews import patch_points
from ..sampling import grammars
from . import refusals


def install() -> None:
    """Hook into the front end of this process."""
    processor = patch_points.INPUT_PROCESSOR.get()
    processor.process_inputs = refusals.of_requests(processor.process_inputs, problem)


def problem(request: Any, config: Any) -> str:
    """The line by which a request of vLLM's is refused; empty if it is not."""
    found = objection(request.sampling_params, config)
    return found and f"batch-invariant mode does not cover {found}"


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

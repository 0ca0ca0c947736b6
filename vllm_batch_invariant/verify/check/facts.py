"""What a check tries: every fact with the rung of the contract that promises it."""

from .certificates import CASES
from .presets import Preset

AGAIN, SAME_BATCH = ("run", "the same request again"), ("run", "the same batch again")
CONCURRENT = ("batch", "in any company")
PLACE = ("batch", "at any place in the batch")
CONCURRENT_LENGTHS = ("batch", "beside a prompt of any length")
SEEDED = ("batch", "seeded sampling in company")
PROMPT_LOGPROBS = ("batch", "logprobs of the prompt in company")
WARM = ("schedule", "from a warm prefix cache")
CHUNKS = ("schedule", "prefill in small chunks")
PREEMPTED = ("schedule", "preemption")
RESTARTED = ("schedule", "after a restart with other limits")
OTHER_CHUNKS = ("schedule", "other chunks, other pages, async scheduling")
OF_OPERATIONS = tuple(CASES.items())


def cases_of_engines(size: Preset) -> list[tuple[str, str]]:
    """(rung, fact) of everything that engines of one setting are put through."""
    cases = [*OF_OPERATIONS, AGAIN, SAME_BATCH, CONCURRENT, PLACE, CONCURRENT_LENGTHS, SEEDED, PROMPT_LOGPROBS]
    cases += [WARM, CHUNKS, PREEMPTED, RESTARTED]
    return cases + [OTHER_CHUNKS] * (size.engines > 1)


def cases_of_a_server() -> list[tuple[str, str]]:
    """(rung, fact) of everything that can be provoked over HTTP."""
    return [AGAIN, CONCURRENT, CONCURRENT_LENGTHS, SEEDED, WARM]

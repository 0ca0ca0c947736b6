"""What a check tries: every fact with the rung of the contract that promises it."""

from .certificates import FACTS
from .presets import Size

AGAIN, SAME_BATCH = ("run", "the same request again"), ("run", "the same batch again")
COMPANY = ("batch", "in any company")
PLACE = ("batch", "at any place in the batch")
NEIGHBOUR = ("batch", "beside a prompt of any length")
SEEDED = ("batch", "seeded sampling in company")
PROMPT_LOGPROBS = ("batch", "logprobs of the prompt in company")
WARM = ("schedule", "from a warm prefix cache")
CHUNKS = ("schedule", "prefill in small chunks")
PREEMPTED = ("schedule", "preemption")
RESTARTED = ("schedule", "after a restart with other limits")
OTHER_CHUNKS = ("schedule", "other chunks, other pages, async scheduling")
OF_OPERATIONS = tuple(FACTS.items())


def planned_for_engines(size: Size) -> list[tuple[str, str]]:
    """(rung, fact) of everything that engines of one setting are put through."""
    facts = [*OF_OPERATIONS, AGAIN, SAME_BATCH, COMPANY, PLACE, NEIGHBOUR, SEEDED, PROMPT_LOGPROBS]
    facts += [WARM, CHUNKS, PREEMPTED, RESTARTED]
    return facts + [OTHER_CHUNKS] * (size.engines > 1)


def planned_for_a_server() -> list[tuple[str, str]]:
    """(rung, fact) of everything that can be provoked over HTTP."""
    return [AGAIN, COMPANY, NEIGHBOUR, SEEDED, WARM]

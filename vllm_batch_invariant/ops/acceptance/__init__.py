"""How many drafts of a verify step are accepted: as many as are what was sampled, counted from the first.

    accepted = the largest a with inputs[1 : a + 1] == sampled[:a]    the answer grows by sampled[: a + 1]

Row j of a request was fed token ``inputs[j]``, and ``sampled[j]`` is what follows it: the first row's input is known
already, each other's is a draft.
"""

import torch

from ..dispatch import implementation

__all__ = ["NO_TOKEN", "accept"]

NO_TOKEN = -1
"""Behind the tokens of a request."""


def accept(
    sampled: torch.Tensor, inputs: torch.Tensor, starts: torch.Tensor, width: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens that each request gets of a verify step. Integers are compared: nothing here can move a bit.

    Args:
        sampled: [rows] integers, the rows of a request after each other.
        inputs: [rows] integers; a negative one is a draft that is not to be accepted.
        starts: [requests + 1] int32, the first row of each request, and the number of rows. Every request has one.
        width: the most rows of a request, or more.

    Returns:
        [requests, width] int64, :data:`NO_TOKEN` behind a request's tokens, and [requests] int32 of 1 to ``width``.

    Raises:
        NotCovered: a device without an implementation.
    """
    return implementation("acceptance", sampled, inputs, starts).accept(sampled, inputs, starts, width)

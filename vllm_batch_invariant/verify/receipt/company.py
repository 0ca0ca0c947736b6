"""The requests that run beside a completion while it is computed again."""

import random
from dataclasses import dataclass

from ..outcome import NoTestError
from .record import Receipt, Sampling

_LONGEST = 400
"""Tokens of the longest prompt: some prefill beside the completion is wanted, and not much waiting for it."""


@dataclass(frozen=True)
class ConcurrentRequest:
    """One of them."""

    token_ids: tuple[int, ...]
    sampling: Sampling


class ConcurrentRequests:
    """Requests of all lengths, made of the tokens of the receipt itself, which every engine that can serve it knows.

    Attributes:
        size: how many are to be there at a time.
    """

    def __init__(self, receipt: Receipt, prompt: tuple[int, ...], context: int, size: int) -> None:
        self.size = size
        self._random = random.Random(receipt.sha256)
        self._tokens = (*prompt, *receipt.completion.token_ids)
        self._room = context - 1
        self._stay = len(receipt.completion.token_ids)

    def request(self) -> ConcurrentRequest:
        """The next one."""
        length = self._random.randint(1, max(1, min(_LONGEST, self._room // 2)))
        stay = self._random.randint(2, max(2, min(self._stay + 16, self._room - length)))
        sampling = Sampling(max_tokens=stay, ignore_eos=True, logprobs=0)
        return ConcurrentRequest(tuple(self._random.choices(self._tokens, k=length)), sampling)

    def require(self, beside: int) -> None:
        """Refuse a run that was no test.

        Raises:
            NoTestError: others were sent, and none ran at the same time.
        """
        if self.size and not beside:
            raise NoTestError(
                f"not a test: none of the {self.size} other requests ran at the same time; does the engine run one "
                "request at a time? A company of 0 computes the completion alone"
            )

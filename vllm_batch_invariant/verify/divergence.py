"""Compare answers to one request, bit for bit: how many there are, and where each leaves the first."""

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from .printable import printable


@dataclass(frozen=True)
class GeneratedToken:
    """One generated token, its logprob, and the candidates the server listed beside it."""

    token: str
    logprob: float
    top: tuple[tuple[str, float], ...] = ()
    ranks: tuple[int, ...] = ()
    """Of the candidates in their order; empty where the server does not say."""

    def bits(self) -> bytes:
        """The token, every candidate in the order in which it is listed, the exact bits of their logprobs, ranks."""
        listed = b"".join(
            token.encode() + b"\0" + struct.pack("<d", logprob)
            for token, logprob in ((self.token, self.logprob), *self.top)
        )
        return listed + struct.pack(f"<{len(self.ranks)}q", *self.ranks)


@dataclass(frozen=True)
class Answer:
    """What the server answered: its text, its tokens and the bits of the logprobs at each position."""

    text: str
    tokens: tuple[str, ...]
    bits: tuple[bytes, ...]

    @classmethod
    def of(cls, text: str, steps: Sequence[GeneratedToken]) -> "Answer":
        """The answer that these steps make."""
        return cls(text, tuple(step.token for step in steps), tuple(step.bits() for step in steps))


@dataclass(frozen=True)
class Divergence:
    """The position at which an answer first differs from sample 0, with both tokens and both continuations."""

    sample: int
    position: int
    expected: str
    got: str
    expected_text: str
    got_text: str

    @property
    def tokens(self) -> str:
        """Both tokens, in one printable line."""
        return printable(f"{self.got} instead of {self.expected}")

    @property
    def texts(self) -> tuple[str, str]:
        """How both texts go on, got and expected, quoted."""
        return printable(repr(self.got_text)), printable(repr(self.expected_text))

    def __str__(self) -> str:
        texts = " ({} instead of {})".format(*self.texts) if self.got_text or self.expected_text else ""
        return f"{self.tokens}{texts}"


@dataclass(frozen=True)
class AnswerComparison:
    """All answers against sample 0; `earliest` and the counters by position are about tokens or about logprobs."""

    samples: int
    completions: int
    logprob_sequences: int
    earliest_token: Divergence | None
    earliest_logprob: Divergence | None
    token_positions: dict[int, int]
    logprob_positions: dict[int, int]

    @property
    def identical(self) -> bool:
        """Whether there is one completion and one logprob sequence."""
        return self.completions == 1 and self.logprob_sequences == 1


def first_difference(left: Sequence[object], right: Sequence[object]) -> int | None:
    """The first position at which the sequences differ, one being shorter included; None where they are equal."""
    missing = object()
    for position, (a, b) in enumerate(zip_longest(left, right, fillvalue=missing)):
        if a != b:
            return position
    return None


def compare_answers(answers: Sequence[Answer]) -> AnswerComparison:
    """Compare every answer with the first."""
    reference = answers[0]
    token_divergences, logprob_divergences = [], []
    for sample, answer in enumerate(answers):
        for divergences, left, right in (
            (token_divergences, reference.tokens, answer.tokens),
            (logprob_divergences, reference.bits, answer.bits),
        ):
            position = first_difference(left, right)
            if position is not None:
                divergences.append((position, sample))

    def earliest(divergences: list[tuple[int, int]]) -> Divergence | None:
        if not divergences:
            return None
        position, sample = min(divergences)
        return _divergence(reference, answers[sample], sample, position)

    return AnswerComparison(
        samples=len(answers),
        completions=len({(answer.text, answer.tokens) for answer in answers}),
        logprob_sequences=len({answer.bits for answer in answers}),
        earliest_token=earliest(token_divergences),
        earliest_logprob=earliest(logprob_divergences),
        token_positions=dict(sorted(Counter(position for position, _ in token_divergences).items())),
        logprob_positions=dict(sorted(Counter(position for position, _ in logprob_divergences).items())),
    )


def _divergence(reference: Answer, answer: Answer, sample: int, position: int) -> Divergence:
    def token(side: Answer) -> str:
        return side.tokens[position] if position < len(side.tokens) else "<end>"

    shared = first_difference(reference.text, answer.text)

    def continuation(side: Answer) -> str:
        return "" if shared is None else side.text[shared : shared + 24]

    return Divergence(sample, position, token(reference), token(answer), continuation(reference), continuation(answer))


def binned(positions: dict[int, int], length: int, bins: int = 8) -> list[tuple[int, int, int]]:
    """The counts by position as at most `bins` ranges (first, last, count) over `length` positions."""
    length = max(length, *positions, 1) if positions else max(length, 1)
    width = -(-length // bins)
    return [
        (start, min(start + width, length) - 1, sum(n for p, n in positions.items() if start <= p < start + width))
        for start in range(0, length, width)
    ]

"""Which completion each sample follows at each token: what the map of samples shows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..answers import Answer, compare_answers

MOST_ROWS = 60
COLOURS = 7
"""Completions that have a colour of their own."""


@dataclass(frozen=True)
class Row:
    """Samples with the same bits.

    Attributes:
        labels: how each was requested.
        follows: number of the completion that it follows at each token: the first one with the same tokens up to there.
        token: position of the first token that differs from the first row's; None for none.
        logprob: the same for logprobs, a token's included.
        difference: both tokens there, and how both texts go on.
    """

    labels: tuple[str, ...]
    follows: tuple[int, ...]
    token: int | None
    logprob: int | None
    difference: str

    @property
    def label(self) -> str:
        """The first sample, and how many there are beside it."""
        return self.labels[0] + (f" and {len(self.labels) - 1} more" if len(self.labels) > 1 else "")

    @property
    def only_logprobs(self) -> int:
        """The tokens from the first other logprob on that are the same as the first row's."""
        if self.logprob is None:
            return 0
        return (len(self.follows) if self.token is None else self.token) - self.logprob

    @property
    def runs(self) -> tuple[tuple[int, int, int], ...]:
        """(completion, first token, tokens) of each stretch of one completion."""
        found, start = [], 0
        for completion, positions in groupby(self.follows):
            length = len(tuple(positions))
            found.append((completion, start, length))
            start += length
        return tuple(found)


@dataclass(frozen=True)
class SampleMap:
    """All samples; the other rows have to equal the first."""

    rows: tuple[Row, ...]
    completions: int
    not_shown: int
    """Samples for which there is no room."""

    @property
    def different(self) -> tuple[Row, ...]:
        """Rows with other bits than the first."""
        return tuple(row for row in self.rows if row.logprob is not None)

    @property
    def length(self) -> int:
        """Most tokens of a row."""
        return max(len(row.follows) for row in self.rows)

    @property
    def first_token(self) -> int | None:
        """The first token that differs in any sample."""
        return min((row.token for row in self.rows if row.token is not None), default=None)


def letter(completion: int) -> str:
    """A completion's name: A to Z, then A1 to Z1 and so on."""
    turn, place = divmod(completion, 26)
    return chr(ord("A") + place) + (str(turn) if turn else "")


def map_of(samples: Sequence[tuple[str, Answer]], most_rows: int = MOST_ROWS) -> SampleMap:
    """The map of (label, answer) of at least one sample."""
    follows = _followed([answer.tokens for _, answer in samples])
    reference = samples[0][1]
    grouped: dict[Answer, list[int]] = {}
    for number, (_, answer) in enumerate(samples):
        grouped.setdefault(answer, []).append(number)
    rows = [_row(reference, samples, follows, numbers) for numbers in grouped.values()]
    return SampleMap(
        tuple(rows[:most_rows]),
        len({answer.tokens for _, answer in samples}),
        sum(len(row.labels) for row in rows[most_rows:]),
    )


def _followed(sequences: Iterable[tuple[str, ...]]) -> list[tuple[int, ...]]:
    """For each sequence and position the number of the first distinct sequence with the same beginning."""
    numbers: dict[tuple[str, ...], int] = {}
    # a tree of prefixes: the first sequence at a node owns it
    nodes: dict[tuple[int, str], int] = {}
    owners: list[int] = []
    found = []
    for sequence in sequences:
        number = numbers.setdefault(sequence, len(numbers))
        node, follows = -1, []
        for token in sequence:
            node = nodes.setdefault((node, token), len(owners))
            if node == len(owners):
                owners.append(number)
            follows.append(owners[node])
        found.append(tuple(follows))
    return found


def _row(
    reference: Answer, samples: Sequence[tuple[str, Answer]], follows: list[tuple[int, ...]], numbers: list[int]
) -> Row:
    found = compare_answers([reference, samples[numbers[0]][1]])
    token, logprob = found.earliest_token, found.earliest_logprob
    return Row(
        tuple(samples[number][0] for number in numbers),
        follows[numbers[0]],
        None if token is None else token.position,
        None if logprob is None else logprob.position,
        "" if token is None else str(token),
    )

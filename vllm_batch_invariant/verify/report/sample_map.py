"""Which completion each sample follows at each token: what the map of samples shows."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby

from ..answers import Answer, compare_answers

MOST_ROWS = 60
"""With more samples than that, those with the same bits share a row."""


@dataclass(frozen=True)
class Row:
    """One sample, or several with the same bits.

    Attributes:
        label: how it was asked for.
        samples: how many there are.
        follows: number of the completion that it follows at each token: the first one with the same tokens up to there.
        token: position of the first token that differs from the first row's; None for none.
        logprob: the same for logprobs, a token's included.
        difference: both tokens there, and how both texts go on.
    """

    label: str
    samples: int
    follows: tuple[int, ...]
    token: int | None
    logprob: int | None
    difference: str

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
    """All samples, the first row being the one that others have to equal."""

    rows: tuple[Row, ...]
    completions: int
    not_shown: int
    """Samples for which there was no room."""

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
        """The first token that any sample has otherwise."""
        return min((row.token for row in self.rows if row.token is not None), default=None)


def letter(completion: int) -> str:
    """A completion's name: A to Z, then A1 to Z1 and so on."""
    turn, place = divmod(completion, 26)
    return chr(ord("A") + place) + (str(turn) if turn else "")


def map_of(samples: Sequence[tuple[str, Answer]], most_rows: int = MOST_ROWS) -> SampleMap:
    """The map of (label, answer) of at least one sample."""
    follows = _followed([answer.tokens for _, answer in samples])
    reference = samples[0][1]
    grouped: dict[object, list[int]] = {}
    for number, (_, answer) in enumerate(samples):
        grouped.setdefault(number if len(samples) <= most_rows else answer, []).append(number)
    rows = [_row(reference, samples, follows, numbers) for numbers in grouped.values()]
    return SampleMap(
        tuple(rows[:most_rows]),
        len({answer.tokens for _, answer in samples}),
        sum(row.samples for row in rows[most_rows:]),
    )


def _followed(sequences: Iterable[tuple[str, ...]]) -> list[tuple[int, ...]]:
    """For each sequence and position the number of the first distinct sequence with the same beginning."""
    numbers: dict[tuple[str, ...], int] = {}
    # a tree of beginnings: who came to a node first owns it
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
    label, answer = samples[numbers[0]]
    found = compare_answers([reference, answer])
    token, logprob = found.earliest_token, found.earliest_logprob
    label += f" and {len(numbers) - 1} more" if len(numbers) > 1 else ""
    return Row(
        label,
        len(numbers),
        follows[numbers[0]],
        token and token.position,
        logprob and logprob.position,
        "" if token is None else str(token),
    )

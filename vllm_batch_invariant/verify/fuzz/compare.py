"""Two answers to one request, as :mod:`.engine` describes them, compared in everything that a client sees."""

from collections.abc import Mapping, Sequence
from typing import Any

from ..answers import answer_of, compare_answers, first_difference, number_of

DIGEST = "sha256:"
"""Prefix of the digest of a list that is too long to send, in the place of a logprob."""


def difference(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    """The first difference of two answers in words; empty if they are equal in every bit."""
    if expected == got:
        return ""
    sides = expected["completions"], got["completions"]
    if "dtype" in (*sides[0], *sides[1], {})[0]:
        return of_pooled(*(side[0] if side else {} for side in sides))
    if len(sides[0]) != len(sides[1]):
        return f"{len(sides[1])} completions instead of {len(sides[0])}"
    found = [of_positions("prompt logprobs", expected["prompt_logprobs"], got["prompt_logprobs"], "the prompt's token")]
    for number, (one, other) in enumerate(zip(*sides, strict=True)):
        sample = f" of sample {number}" if len(sides[0]) > 1 else ""
        # a token is chosen from the listed logprobs, so those differ first
        found.append(of_positions("logprobs", one["logprobs"], other["logprobs"], f"token{sample}"))
        at = first_difference(one["tokens"], other["tokens"])
        if at is not None:
            found.append(f"token {at}{sample}: {_at(other['tokens'], at)} instead of {_at(one['tokens'], at)}")
        for name in ("finish_reason", "stop_reason", "text"):
            if one[name] != other[name]:
                found.append(f"{name.replace('_', ' ')}{sample}: {other[name]!r} instead of {one[name]!r}")
    return next(filter(None, found))


def of_pooled(expected: Mapping[str, Any], got: Mapping[str, Any]) -> str:
    """The first value, or row, in which two answers of a pooling model differ."""
    if not expected or not got:
        return "nothing instead of a vector" if expected else "a vector instead of nothing"
    for name in ("dtype", "shape"):
        if expected[name] != got[name]:
            return f"{name}: {got[name]} instead of {expected[name]}"
    if "rows" in expected:
        return f"row {first_difference(expected['rows'], got['rows'])} of {len(expected['rows'])}"
    found = compare_answers([answer_of(expected), answer_of(got)])
    assert found.earliest_logprob is not None  # the bits differ
    return f"{found.unit} {found.earliest_logprob.position} of {expected['shape']}: {found.earliest_logprob}"


def of_positions(what: str, expected: Sequence[Any], got: Sequence[Any], where: str) -> str:
    """The first position whose candidates differ, and whether in values, in ids, in their order or in ranks."""
    at = first_difference(expected, got)
    if at is None:
        return ""
    one, other = _at(expected, at), _at(got, at)
    if not isinstance(one, list) or not isinstance(other, list):
        return f"{what} at {where} {at}: {len(got)} positions instead of {len(expected)}"
    place = first_difference(one, other)
    assert place is not None  # the lists differ
    left, right = _at(one, place), _at(other, place)
    values = {token: value for token, value, _ in one}
    if any(isinstance(side, list) and side[1].startswith(DIGEST) for side in (left, right)):
        kind = "one of the many listed"
    elif any(value != values.get(token, value) for token, value, _ in other):
        kind = "values"
    elif {token for token, *_ in one} != {token for token, *_ in other}:
        kind = "listed ids"
    elif [token for token, *_ in one] != [token for token, *_ in other]:
        kind = "order of listed ids"
    else:
        kind = "ranks"
    return f"{what}: {kind} at {where} {at}, place {place}: {_candidate(right)} instead of {_candidate(left)}"


def _candidate(candidate: Any) -> str:
    if not isinstance(candidate, list):
        return "nothing"
    token, value, rank = candidate
    if value.startswith(DIGEST):
        return f"{token} candidates with the digest {value[:16]}"
    return f"token {token} with {number_of(value)!r} at rank {rank}"


def _at(values: Sequence[Any], place: int) -> Any:
    return values[place] if place < len(values) else "nothing"

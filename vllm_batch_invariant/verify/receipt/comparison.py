"""Compares two completions bit for bit, and the engines that computed them."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ...provenance import flat
from ..answers import first_difference
from ..outcome import NoTestError, Status
from ..printing import count, printable
from .record import (
    UNNAMED,
    Adapter,
    Completion,
    EngineInfo,
    Item,
    Model,
    Pooled,
    PooledReceipt,
    Receipt,
    bits_of,
    number_of,
)

HOW_TO_REPORT = "a server with the mode on describes itself at /v1/batch_invariant"


@dataclass(frozen=True)
class Note:
    """One difference between two engines, or one thing that is unknown of an engine; one printable line as a string."""

    text: str
    promised: bool
    """Whether the contract (docs/contract.md) promises equal bits in spite of it."""

    def __str__(self) -> str:
        said = "bits may be expected equal" if self.promised else "equal bits are not promised"
        return f"{printable(self.text)}: {said}"


@dataclass(frozen=True)
class Difference:
    """The first difference between two completions, or what was pooled; one printable line as a string."""

    position: int | None
    """Of the output token, from 0; the number of tokens if only the finish reason differs; of what was pooled that of
    the value; None where an item of the request differs, so that no token was computed, or the number of values.
    """
    text: str

    def __str__(self) -> str:
        return printable(self.text)


@dataclass(frozen=True)
class Verdict:
    """Whether two completions are equal, and whether the contract promises it. It is true if they are equal."""

    notes: tuple[Note, ...]
    difference: Difference | None
    compared: str
    """How much was compared, in words."""

    def __bool__(self) -> bool:
        return self.difference is None

    @property
    def promised(self) -> bool:
        """Whether the contract promises equal bits."""
        return all(note.promised for note in self.notes)

    @property
    def status(self) -> Status:
        """The exit status of a command that ends with this."""
        return Status.REPRODUCIBLE if self else Status.DIVERGED

    @property
    def result(self) -> str:
        """The last line: whether the bits are equal."""
        return f"equal: {self.compared}" if self else f"differs: {self.difference}"

    def __str__(self) -> str:
        return f"{describe_notes(self.notes)}\n{self.result}"


def as_json(verdict: Verdict) -> dict[str, Any]:
    """A verdict as plain data."""
    return {"equal": bool(verdict), "promised": verdict.promised} | asdict(verdict)


def verdict_of(data: dict[str, Any]) -> Verdict:
    """The verdict that ``asdict`` made plain."""
    difference = data["difference"] and Difference(**data["difference"])
    return Verdict(tuple(Note(**note) for note in data["notes"]), difference, data["compared"])


def describe_notes(notes: tuple[Note, ...]) -> str:
    """The differences between two engines, a line each."""
    return "\n".join(map(str, notes)) or "engines: nothing that decides bits differs: bits may be expected equal"


Kept = Receipt | PooledReceipt
"""A receipt of either kind."""


def compare(
    left: Receipt | PooledReceipt, right: Receipt | PooledReceipt, names: tuple[str, str] = ("the first", "the second")
) -> Verdict:
    """Compare two receipts of one request to one model. Nothing is computed.

    Args:
        names: of the two, in messages.

    Raises:
        NoTestError: receipts of different models or requests.
    """
    if left.of_what != right.of_what:
        kinds = (f"{names[0]} is of {left.of_what}", f"{names[1]} of {right.of_what}")
        raise NoTestError(f"receipts of different requests: {' and '.join(kinds)}")
    if _different_models(left.model, right.model):
        note = _models(left.model, right.model, names)
        assert note is not None
        raise NoTestError(f"receipts of different models: {note.text.removeprefix('model: ')}")
    if other_request := _different_requests(left, right, names):
        raise NoTestError(f"receipts of different {other_request}")
    difference = first_difference_of(_answer(left), _answer(right))
    if difference is not None:
        difference = replace(difference, text=f"{difference}; that is {names[1]} against {names[0]}")
    return Verdict(notes_on(left.info, right.info, names), difference, extent(left))


def _different_requests(left: Kept, right: Kept, names: tuple[str, str]) -> str:
    """In what the requests of two receipts of one kind differ; empty if they are the same."""
    if note := _adapters(left.info.adapter, right.info.adapter, names):
        return f"adapters: {note.text.removeprefix('adapter: ')}"
    if isinstance(left, PooledReceipt) and isinstance(right, PooledReceipt):
        if other := _differing(vars(left.pooling), vars(right.pooling), names, vars(left.pooling)):
            return f"requests: {other}"
        if left.pair and right.pair:
            return "" if left.pair.sha256 == right.pair.sha256 else "pairs of texts"
    if left.prompt and right.prompt and not left.prompt.is_like(right.prompt):
        return f"prompts, of {left.prompt.tokens} and {right.prompt.tokens} tokens"
    if isinstance(left, Receipt) and isinstance(right, Receipt):
        if other_item := difference_of_items(left.items, right.items):
            return f"items: {other_item}; that is {names[1]} against {names[0]}"
        if other := _differing(vars(left.sampling), vars(right.sampling), names, vars(left.sampling)):
            return f"requests: {other}"
    return ""


def _answer(receipt: Kept) -> Completion | Pooled:
    return receipt.completion if isinstance(receipt, Receipt) else receipt.pooled


def verdict_on(
    receipt: Kept, got: Completion | Pooled, notes: tuple[Note, ...], ran: int, at_a_time: int, times: int = 1
) -> Verdict:
    """The verdict on what was computed again, with ``ran`` concurrent requests, so many at a time.

    Args:
        times: how often it was computed, with the same bits.
    """
    many = f", {at_a_time} at a time" if ran > at_a_time else ""
    concurrent = f"with {ran} concurrent request{'s' * (ran != 1)}{many}" if ran else "alone"
    often = f" {times} times" if times > 1 else ""
    difference = first_difference_of(_answer(receipt), got)
    return Verdict(notes, difference, f"{extent(receipt)}, computed again{often} {concurrent}")


def difference_of_items(expected: Sequence[Item], got: Sequence[Item]) -> Difference | None:
    """The first item of a request that differs, and its first tensor that does; None if all are the same."""
    if [item.kind for item in expected] != [item.kind for item in got]:
        return Difference(None, f"the items are {_kinds(got)} instead of {_kinds(expected)}")
    for number, (one, other) in enumerate(zip(expected, got, strict=True)):
        for name in [*one.tensors, *(name for name in other.tensors if name not in one.tensors)]:
            if one.tensors.get(name) != other.tensors.get(name):
                said = f"{name} is {other.tensors.get(name, 'not there')} instead of {one.tensors.get(name, 'none')}"
                return Difference(None, f"item {number} ({one.kind}): {said}")
        if (one.at, one.tokens) != (other.at, other.tokens):
            said = f"{other.tokens} tokens from {other.at} on instead of {one.tokens} from {one.at} on"
            return Difference(None, f"item {number} ({one.kind}): it has {said}")
    return None


def _kinds(items: Sequence[Item]) -> str:
    return ", ".join(item.kind for item in items) or "none"


def notes_on(left: EngineInfo, right: EngineInfo, names: tuple[str, str]) -> tuple[Note, ...]:
    """One note for each of model, mode, device, versions, settings and reductions in which two engines differ."""
    notes = [_models(left.model, right.model, names), _adapters(left.adapter, right.adapter, names)]
    both = left.environment, right.environment
    silent = [name for name, environment in zip(names, both, strict=True) if environment.is_silent]
    if silent:
        notes.append(Note(f"unknown engine: {' and '.join(silent)} ({HOW_TO_REPORT})", promised=False))
    off = [name for name, environment in zip(names, both, strict=True) if environment.mode is False]
    if off:
        notes.append(Note(f"mode: off in {' and '.join(off)}, whose bits follow the batch", promised=False))
    for section in ("device", "versions", "engine", "reductions"):
        left_side, right_side = (flat(getattr(environment, section)) for environment in both)
        if not (left_side or right_side or silent or off):
            notes.append(Note(f"{section}: unknown in both", promised=False))
        whole = both[0].exact_format and both[0].exact_format == both[1].exact_format
        known = left_side.keys() & right_side.keys() if silent or off else left_side.keys() | right_side.keys()
        differing = _differing(left_side, right_side, names, known)
        promised = bool(whole) and section in ("device", "versions")  # the format alone decides the bits
        notes.append(Note(f"{section}: {differing}", promised) if differing else None)
    return tuple(note for note in notes if note is not None)


def first_difference_of(expected: Completion | Pooled, got: Completion | Pooled) -> Difference | None:
    """The first difference of ``got`` from ``expected``, a token, a bit of a logprob or of what was pooled; None if
    they are equal.
    """
    if isinstance(expected, Pooled) or isinstance(got, Pooled):
        assert isinstance(expected, Pooled)
        assert isinstance(got, Pooled)
        return _difference_of_pooled(expected, got)
    tokens = first_difference(expected.token_ids, got.token_ids)
    position = first_difference(_positions(expected), _positions(got))
    if position is None:
        if expected.finish_reason == got.finish_reason:
            return None
        reasons = f"it ended by {got.finish_reason!r} instead of {expected.finish_reason!r}"
        return Difference(len(expected.token_ids), f"all tokens and logprobs are the same, but {reasons}")
    if position == tokens:
        return Difference(
            position, f"token {position} is {_token(got, position)} instead of {_token(expected, position)}"
        )
    where = "all tokens are the same" if tokens is None else f"tokens differ from {tokens} on"
    return Difference(position, f"at token {position} {_logprob_that_differs(expected, got, position)}; {where}")


def difference_of_logprobs(receipt: Receipt, logprobs: Iterable[float]) -> Difference | None:
    """The first difference between logprobs that were computed elsewhere and the receipt's; None if they are equal. For
    a trainer that must have the bits of its rollout.

    Args:
        logprobs: fp32, one for each output token: a 1-dimensional tensor or any sequence of numbers.

    Raises:
        NoTestError: another number of logprobs, or one that fp32 does not have.
    """
    values = logprobs.tolist() if hasattr(logprobs, "tolist") else list(logprobs)
    expected = receipt.completion.logprobs
    if len(values) != len(expected):
        raise NoTestError(f"{len(values)} logprobs cannot be those of {len(expected)} tokens")
    got = tuple(bits_of(value) for value in values)
    position = first_difference(expected, got)
    if position is None:
        return None
    token = receipt.completion.token_ids[position]
    return Difference(position, f"at token {position} {_instead(token, got[position], expected[position])}")


_POOLED = {"embed": "an embedding", "score": "a score", "classify": "classes"}
"""What each task gives, in words."""


def _difference_of_pooled(expected: Pooled, got: Pooled) -> Difference | None:
    if len(expected.values) != len(got.values):
        return Difference(None, f"it has {len(got.values)} values instead of {len(expected.values)}")
    position = first_difference(expected.values, got.values)
    if position is None:
        return None
    others = sum(one != other for one, other in zip(expected.values, got.values, strict=True))
    said = f"value {position} is {_number(got.values[position])} instead of {_number(expected.values[position])}"
    return Difference(position, f"{said}; {others} of {len(got.values)} values differ")


def extent(receipt: Kept) -> str:
    """How much is compared, in words."""
    if isinstance(receipt, PooledReceipt):
        return f"the bits of {count(len(receipt.pooled.values), 'value')} of {_POOLED[receipt.pooling.task]}"
    completion, items = receipt.completion, len(receipt.items)
    logprobs = len(completion.logprobs) + sum(map(len, completion.top_logprobs))
    about = f" about {items} item{'s' * (items != 1)}" if items else ""
    return f"{len(completion.token_ids)} tokens{about} and the bits of {logprobs} logprobs"


def _positions(completion: Completion) -> list[tuple[Any, ...]]:
    return list(zip(completion.token_ids, completion.logprobs, completion.top_logprobs, strict=True))


def _token(completion: Completion, position: int) -> str:
    ids = completion.token_ids
    return str(ids[position]) if position < len(ids) else f"the end ({completion.finish_reason})"


def _logprob_that_differs(expected: Completion, got: Completion, position: int) -> str:
    wanted, found = (dict(side.top_logprobs[position]) for side in (expected, got))
    chosen = expected.token_ids[position]
    if expected.logprobs[position] != got.logprobs[position]:
        return _instead(chosen, got.logprobs[position], expected.logprobs[position])
    token = min(token for token in wanted.keys() | found.keys() if wanted.get(token) != found.get(token))
    if token not in found:
        return f"candidate {token} is no longer listed"
    if token not in wanted:
        return f"candidate {token} is new"
    return _instead(token, found[token], wanted[token])


def _instead(token: int, got: str, expected: str) -> str:
    return f"the logprob of {token} is {_number(got)} instead of {_number(expected)}"


def _number(bits: str) -> str:
    return f"0x{bits} ({number_of(bits)!r})"


def _different_models(left: Model, right: Model) -> bool:
    if left.digest and right.digest:
        return left.digest != right.digest
    return left.name != right.name


def _models(left: Model, right: Model, names: tuple[str, str]) -> Note | None:
    named = f"{left.name} in {names[0]} and {right.name} in {names[1]}" if left.name != right.name else left.name
    if left.digest and right.digest:
        if left.digest != right.digest:
            files = left.files.keys() | right.files.keys()
            other = sorted(file for file in files if left.files.get(file) != right.files.get(file))
            return Note(f"model: {named}, with other {', '.join(other)}", promised=False)
        return Note(f"model: {named}, with the same files", promised=True) if left.name != right.name else None
    sides = zip(names, (left, right), strict=True)
    without = [(name, model.why_no_digest) for name, model in sides if not model.digest]
    unnamed = [name for name, why in without if why == UNNAMED]
    others = [f"no digest in {name}, because {why}" for name, why in without if why != UNNAMED]
    hint = [f"with --model-files for {' and '.join(unnamed)}, their bytes would be compared"] if unnamed else []
    why = "; ".join([*others, *hint])
    return Note(f"model: {named}, compared by name only ({why})", promised=False)


def _adapters(left: Adapter | None, right: Adapter | None, names: tuple[str, str]) -> Note | None:
    if (left and left.digest) == (right and right.digest):
        return None
    sides = zip(names, (left, right), strict=True)
    said = [f"{one.name} ({one.digest[:12]}) in {name}" if one else f"none in {name}" for name, one in sides]
    return Note(f"adapter: {' and '.join(said)}", promised=False)


def _differing(left: dict[str, Any], right: dict[str, Any], names: tuple[str, str], keys: Iterable[str]) -> str:
    return ", ".join(
        f"{name} {left.get(name, 'unknown')} in {names[0]} and {right.get(name, 'unknown')} in {names[1]}"
        for name in sorted(keys)
        if left.get(name) != right.get(name)
    )

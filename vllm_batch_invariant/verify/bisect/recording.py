"""The outputs of operations for one request, as digests, and the first divergence of two runs."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from ..outcome import NoTestError


class Key(NamedTuple):
    """The name of an output, the same in every run that takes the same path through the model."""

    module: str
    """Path of the innermost module, empty for the model itself."""
    call: int
    """How often the module was called before in this step."""
    operation: str
    """An operator of PyTorch's dispatcher, such as ``aten.mm``, or :data:`MODULE_OUTPUT`."""
    occurrence: int
    """How often the operator was called before in this call of the module."""
    output: int
    """Number among its outputs and the arguments that it writes."""


MODULE_OUTPUT = "output of the module"
ITEM = "rows of an item"
"""What an encoder of images or sounds made of one, in the place of an operator."""


class Slice(NamedTuple):
    """The request's part of a tensor, if a certain dimension of the tensor holds the rows of the batch."""

    shape: tuple[int, ...]
    digest: bytes


@dataclass(frozen=True)
class Record:
    """One output, with a slice for each dimension that could hold the rows of the batch."""

    key: Key
    dtype: str
    slices: tuple[Slice, ...]


@dataclass(frozen=True)
class RecordedStep:
    """The records of one request in one step of the engine, in the order of execution."""

    position: int
    """Of the request's first token in this step."""
    rows: int
    """Tokens of the request."""
    other_tokens: int
    """Tokens of other requests."""
    requests: int
    """Requests, this one included."""
    left_out: dict[str, int]
    """Outputs that are not recorded, by the reason."""
    records: tuple[Record, ...]

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Self:
        """From the dictionaries and lists that a worker sends."""
        records = tuple(
            Record(Key(*key), dtype, tuple(Slice(tuple(shape), digest) for shape, digest in slices))
            for key, dtype, slices in data["records"]
        )
        return cls(**{**data, "records": records})

    def to_plain(self) -> dict[str, Any]:
        """As dictionaries, lists, numbers, strings and bytes, which any channel between processes carries."""
        records = [
            [list(record.key), record.dtype, [[list(part.shape), part.digest] for part in record.slices]]
            for record in self.records
        ]
        return {**vars(self), "records": records}


@dataclass(frozen=True)
class OutputDivergence:
    """The first output whose bits differ."""

    step: int
    index: int
    """Its index among the records of the step, in the run alone."""
    key: Key
    dtype: str
    shape: tuple[int, ...]
    """Of the request's part."""
    only_alone: tuple[str, ...]
    """Operations just before it in the same module without a counterpart in the run with concurrent requests."""
    only_concurrent: tuple[str, ...]


@dataclass(frozen=True)
class Coverage:
    """How many outputs were compared, over all steps."""

    steps: int
    untested_steps: int
    """Steps in which no other request ran."""
    compared: int
    left_out: dict[str, int]
    """Outputs that are not recorded, by the reason."""
    without_rows: dict[str, int]
    """Operations whose output has no dimension with the rows of the batch, with their counts."""
    one_sided: dict[str, int]
    """Operations that ran in only one of the two runs, with their counts."""

    @classmethod
    def of_workers(cls, found: Sequence[Self]) -> Self:
        """What was compared in all workers, which take the same steps."""
        counts = ([getattr(one, name) for one in found] for name in ("left_out", "without_rows", "one_sided"))
        together = (dict(sum(map(Counter[str], of_all), Counter[str]())) for of_all in counts)
        return cls(found[0].steps, found[0].untested_steps, sum(one.compared for one in found), *together)


def first_divergence(
    alone: Sequence[RecordedStep], concurrent: Sequence[RecordedStep], last: int
) -> tuple[OutputDivergence | None, Coverage]:
    """Compare the steps up to number ``last``; later steps read other tokens, or do not matter.

    Raises:
        NoTestError: the request was cut into other steps, or no other request ran in a step with it.
    """
    alone, concurrent = _same_steps(alone, concurrent, last)
    divergence, compared, untested = None, 0, 0
    left_out: Counter[str] = Counter()
    without_rows: Counter[str] = Counter()
    one_sided: Counter[str] = Counter()
    for number, (left, right) in enumerate(zip(alone, concurrent, strict=True)):
        if not right.other_tokens:
            untested += 1
            continue
        left_out.update(left.left_out)
        others = {record.key: record for record in right.records}
        times_alone, times_concurrent = _times(left.records), _times(right.records)
        one_sided.update(key.operation for key in {record.key for record in left.records} ^ others.keys())
        for index, record in enumerate(left.records):
            other, which = others.get(record.key), record.key[:3]
            if other is None:
                continue
            if times_alone[which] != times_concurrent[which]:
                one_sided[record.key.operation] += 1
                continue
            pair = _same_shape(record, other)
            if pair is None:
                without_rows[record.key.operation] += 1
                continue
            compared += 1
            if divergence is None and pair[0].digest != pair[1].digest:
                divergence = OutputDivergence(
                    number,
                    index,
                    record.key,
                    record.dtype,
                    pair[0].shape,
                    _unmatched_before(left.records, record.key, others.keys()),
                    _unmatched_before(right.records, record.key, {record.key for record in left.records}),
                )
    if untested == len(alone):
        raise NoTestError("not a test: no other request ever ran in a step of this one")
    counts = (dict(counter) for counter in (left_out, without_rows, one_sided))
    return divergence, Coverage(len(alone), untested, compared, *counts)


def _same_steps(
    alone: Sequence[RecordedStep], concurrent: Sequence[RecordedStep], last: int
) -> tuple[Sequence[RecordedStep], Sequence[RecordedStep]]:
    alone, concurrent = alone[: last + 1], concurrent[: last + 1]
    if not alone or not concurrent:
        raise NoTestError(
            "not a test: the model's forward was never seen, so it does not run as a PyTorch module in this engine"
        )
    for number, (left, right) in enumerate(zip(alone, concurrent, strict=False)):
        if (left.position, left.rows) != (right.position, right.rows):
            raise NoTestError(
                f"not a test: in step {number} the engine computed positions {_positions(left)} alone and "
                f"{_positions(right)} with concurrent requests; pass --place 0, fewer or shorter prompts for those, or "
                "--serve-args '--max-num-batched-tokens N' with an N that holds all prompts"
            )
    if len(alone) != len(concurrent):
        raise NoTestError(
            f"not a test: the request took {len(alone)} steps alone and {len(concurrent)} with concurrent requests"
        )
    return alone, concurrent


def _positions(step: RecordedStep) -> str:
    return f"{step.position} to {step.position + step.rows - 1}"


def _same_shape(record: Record, other: Record) -> tuple[Slice, Slice] | None:
    """The slices of one shape. Alone, the request's part is the whole tensor, so its shape tells which dimension holds
    the rows.
    """
    if record.dtype == other.dtype:
        for left in record.slices:
            for right in other.slices:
                if left.shape == right.shape:
                    return left, right
    return None


def _times(records: Iterable[Record]) -> Counter[tuple[Any, ...]]:
    """How often each call of a module ran each operator. If that differs between two runs, the same occurrence of it is
    not the same computation in both.
    """
    return Counter(record.key[:3] for record in records if not record.key.output)


def _unmatched_before(records: Iterable[Record], key: Key, known: Iterable[Key]) -> tuple[str, ...]:
    """Operations of the key's module since the last record with a counterpart, up to the key's."""
    found: list[str] = []
    for record in records:
        if record.key == key:
            break
        if record.key in known:
            found.clear()
        elif record.key.module == key.module and record.key.operation not in found:
            found.append(record.key.operation)
    return tuple(found)

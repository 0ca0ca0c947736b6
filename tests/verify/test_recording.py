"""Where two recordings diverge, and what is said of what was not compared."""

import msgspec
import pytest

from vllm_batch_invariant.verify.bisect.recording import Key, Record, RecordedStep, Slice, first_divergence
from vllm_batch_invariant.verify.outcome import NoTestError


def record(name: str, *parts: tuple[tuple[int, ...], bytes], dtype: str = "float32", output: int = 0) -> Record:
    module, operation = name.split(":")
    return Record(Key(module, 0, operation, 0, output), dtype, tuple(Slice(*part) for part in parts))


def step(*records: Record, position: int = 0, rows: int = 2, other_tokens: int = 6) -> RecordedStep:
    return RecordedStep(position, rows, other_tokens, 3, {"integers": 1}, records)


A, B = ((2, 8), b"a"), ((2, 8), b"b")


def test_equal_recordings_have_no_divergence_and_are_counted() -> None:
    steps = [step(record("x:mm", A), record("y:mm", A)), step(record("x:mm", A), position=2)]
    divergence, coverage = first_divergence(steps, steps, last=9)
    assert divergence is None
    assert (coverage.steps, coverage.compared, coverage.left_out) == (2, 3, {"integers": 2})


def test_the_first_difference_in_the_order_of_execution_is_the_divergence() -> None:
    alone = [step(record("x:mm", A), record("y:mm", A), record("z:mm", A))]
    concurrent = [step(record("z:mm", B), record("y:mm", B), record("x:mm", A))]
    divergence, coverage = first_divergence(alone, concurrent, last=0)
    assert (divergence.key.module, divergence.shape, divergence.index) == ("y", (2, 8), 1)
    assert coverage.compared == 3


def test_of_several_possible_dimensions_the_one_that_holds_rows_alone_counts() -> None:
    alone = [step(record("x:mm", A))]
    other = ((8, 2), b"c")
    assert first_divergence(alone, [step(record("x:mm", other, A))], last=0)[0] is None
    assert first_divergence(alone, [step(record("x:mm", other, B))], last=0)[0].shape == (2, 8)


def test_what_has_no_rows_or_no_counterpart_is_counted_and_not_compared() -> None:
    alone = [step(record("x:mm", A), record("x:tile"), record("x:mv", A), record("x:cast", A))]
    concurrent = [step(record("x:mm", A), record("x:tile", B), record("x:gemm", A), record("x:cast", B, dtype="int8"))]
    divergence, coverage = first_divergence(alone, concurrent, last=0)
    assert divergence is None
    assert coverage.compared == 1
    assert coverage.without_rows == {"tile": 1, "cast": 1}
    assert coverage.one_sided == {"mv": 1, "gemm": 1}


def test_an_operator_that_ran_another_number_of_times_is_not_compared_by_its_number() -> None:
    def copies(*digests: bytes) -> list[Record]:
        return [
            Record(Key("x", 0, "copy_", place, 0), "float32", (Slice((2, 8), d),)) for place, d in enumerate(digests)
        ]

    alone = [step(*copies(b"in", b"out"), record("x:mm", A))]
    divergence, coverage = first_divergence(alone, [step(*copies(b"out"), record("x:mm", A))], last=0)
    assert (divergence, coverage.compared, coverage.one_sided["copy_"]) == (None, 1, 2)
    assert first_divergence(alone, [step(*copies(b"in", b"other"), record("x:mm", A))], last=0)[0].key.occurrence == 1


def test_operations_without_a_counterpart_just_before_the_divergence_are_named() -> None:
    alone = [step(record("x:early", A), record("x:mm", A), record("w:mv", A), record("x:mv", A), record("x:out", A))]
    concurrent = [step(record("x:mm", A), record("x:gemm", A), record("x:sum", A), record("x:out", B))]
    divergence, _ = first_divergence(alone, concurrent, last=0)
    assert (divergence.only_alone, divergence.only_concurrent) == (("mv",), ("gemm", "sum"))


def test_steps_after_the_last_are_not_compared() -> None:
    alone = [step(record("x:mm", A)), step(record("x:mm", A), position=2)]
    concurrent = [step(record("x:mm", A)), step(record("x:mm", B), position=2)]
    assert first_divergence(alone, concurrent, last=0)[0] is None
    assert first_divergence(alone, concurrent, last=1)[0].step == 1


def test_a_step_without_another_request_proves_nothing() -> None:
    alone = [step(record("x:mm", A)), step(record("x:mm", A), position=2)]
    concurrent = [step(record("x:mm", B), other_tokens=0), step(record("x:mm", A), position=2)]
    divergence, coverage = first_divergence(alone, concurrent, last=9)
    assert divergence is None
    assert (coverage.steps, coverage.untested_steps, coverage.compared) == (2, 1, 1)
    with pytest.raises(NoTestError, match="no other request ever ran"):
        first_divergence(alone[:1], concurrent[:1], last=9)


def test_an_engine_without_steps_is_no_test() -> None:
    with pytest.raises(NoTestError, match="forward was never seen"):
        first_divergence([], [], last=9)


def test_steps_of_other_positions_are_no_test() -> None:
    with pytest.raises(NoTestError, match="positions 0 to 1 alone and 0 to 0 with concurrent requests"):
        first_divergence([step()], [step(rows=1)], last=9)
    with pytest.raises(NoTestError, match="2 steps alone and 1 with concurrent requests"):
        first_divergence([step(), step(position=2)], [step()], last=9)


def test_a_step_survives_the_way_between_two_processes() -> None:
    sent = step(record("x:mm", A, ((8, 2), b"\x00\xff")), record("y:tile"))
    assert RecordedStep.from_plain(msgspec.msgpack.decode(msgspec.msgpack.encode(sent.to_plain()))) == sent

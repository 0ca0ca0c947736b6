"""What ``reproduce`` prints: four rows, where two texts part, a judgement; and what it says while it runs."""

from io import StringIO

import pytest
from rich.console import Console

from vllm_batch_invariant.verify.answers import Answer, Counts, GeneratedToken, Tally
from vllm_batch_invariant.verify.harness.load import Run
from vllm_batch_invariant.verify.harness.metrics import BatchLog, Reading
from vllm_batch_invariant.verify.harness.mode import NONE, OURS, UNKNOWN
from vllm_batch_invariant.verify.reproduce import progress
from vllm_batch_invariant.verify.reproduce.progress import Progress
from vllm_batch_invariant.verify.reproduce.report import ReproduceResult, in_words, parted_texts, print_report

LOG = BatchLog([Reading(1, {}), Reading(40, {}), Reading(2, {})])
LONG = "and so on " * 30


def answer(text: str, *tokens: tuple[str, float], others: tuple[tuple[str, float], ...] = ()) -> Answer:
    return Answer.of(text, [GeneratedToken(token, value, ((token, value), *others)) for token, value in tokens])


FIRST = answer(f"Leaves turn [red] because\nof light, {LONG}", ("1", -0.5), ("2", -0.25), others=(("3", -1.5),))
OTHER_TEXT = answer(f"Leaves turn [red] because\nof cold, {LONG}", ("1", -0.5), ("3", -0.75), others=(("2", -0.875),))
OTHER_LOGPROB = answer(FIRST.text, ("1", -0.5), ("2", -0.125), others=(("3", -1.5),))


def result(*answers: Answer, label: str = "plain", mode: str = NONE, failed: int = 0) -> ReproduceResult:
    why = "no room" if failed else ""
    return ReproduceResult.of(label, Run(answers, 2.0, 3, 1, failed, why, "logprobs 5"), LOG, {"mode": mode})


def printed(*results: ReproduceResult, verbose: bool = False, terminal: bool = False) -> list[str]:
    out = StringIO()
    console = Console(file=out, width=100, force_terminal=terminal, color_system="truecolor" if terminal else None)
    print_report(console, results, verbose)
    return out.getvalue().splitlines()


PLAIN = result(FIRST, OTHER_LOGPROB, OTHER_TEXT, OTHER_TEXT, FIRST)
MODE = result(FIRST, FIRST, FIRST, FIRST, FIRST, label="mode", mode=OURS)


def test_the_table_has_four_rows_and_all_with_verbose() -> None:
    rows = [line for line in printed(PLAIN, MODE) if line.startswith("│")]
    cells = [[cell.strip() for cell in row.strip("│").split("│")] for row in rows]
    assert cells == [
        ["answers", "5", "5"],
        ["different texts", "2", "1"],
        ["different logprobs, same text or not", "3", "1"],
        ["requests in the batch", "1 to 40", "1 to 40"],
    ]
    assert any("logprobs 5" in line for line in printed(PLAIN, MODE, verbose=True))


def test_two_texts_that_part_are_shown_with_the_first_other_word_and_the_logprobs_of_both() -> None:
    lines = printed(PLAIN)
    at = lines.index("plain: the first answers that part, at token 1:")
    assert lines[at + 1].startswith(r"  answer 0: Leaves turn [red] because\nof **light,** and so on ")
    assert lines[at + 2] == '            logprobs there: "light," -0.25, "cold," -1.5'
    assert lines[at + 3].startswith(r"  answer 2: Leaves turn [red] because\nof **cold,** and so on ")
    assert lines[at + 4] == '            logprobs there: "light," -0.875, "cold," -0.75'
    assert lines[at + 1].endswith("…")
    assert len(lines[at + 1]) < 300


def test_on_a_terminal_the_word_is_in_colour() -> None:
    line = next(line for line in printed(PLAIN, terminal=True) if "answer 2:" in line)
    assert "\x1b[1;31mcold,\x1b[0m" in line
    assert "**" not in line


def test_where_all_texts_are_equal_the_logprobs_are_shown_as_the_evidence() -> None:
    said = " ".join(printed(result(FIRST, OTHER_LOGPROB, FIRST)))
    assert "plain: no token differs; the evidence is in the logprobs. At token 1 answer 0 lists 2 -0.25, " in said
    assert "answer 1 2 -0.125 plain: Not reproducible. Of 2 repeats 1 have other logprobs." in said


def test_the_last_lines_judge_both_and_have_the_words_of_the_page() -> None:
    assert printed(PLAIN, MODE)[-3:] == [
        "Plain vLLM: 3 of 5 answers differ from the first. With the mode: none of 5.",
        "plain: Not reproducible. Of 4 repeats 2 have other tokens and 3 have other logprobs.",
        "mode: Reproducible. All 5 answers are equal, bit for bit.",
    ]


def test_the_short_table_hides_neither_another_mode_nor_failures() -> None:
    lines = printed(result(FIRST, FIRST, mode=UNKNOWN, failed=2))
    assert f"plain: mode: {UNKNOWN}" in lines
    assert "plain: 2 concurrent requests failed: no room" in lines


@pytest.mark.parametrize(
    ("one", "other", "parted"),
    [
        ("a b", "a b", None),
        ("the sun is", "the sea is", ("the ", ("sun", " is"), ("sea", " is"))),
        ("the end", "the end of it", ("the end", ("<end>", ""), (" of", " it"))),
        ("a\nb", "a\n\nb", ("a\n", ("b", ""), ("\nb", ""))),
        ("", "new", ("", ("<end>", ""), ("new", ""))),
    ],
)
def test_texts_part_at_the_begin_of_a_word(one: str, other: str, parted: object) -> None:
    assert parted_texts(one, other) == parted
    if parted:
        assert one == parted[0] + parted[1][0].replace("<end>", "") + parted[1][1]


def test_a_tally_counts_as_the_comparison_does() -> None:
    tally = Tally()
    assert [tally.add(one) for one in (FIRST, FIRST, OTHER_LOGPROB, OTHER_TEXT)] == [
        Counts(1, 1, 1), Counts(2, 1, 1), Counts(3, 1, 2), Counts(4, 2, 3),
    ]  # fmt: skip
    found = result(FIRST, FIRST, OTHER_LOGPROB, OTHER_TEXT).comparison
    assert tally.counts == Counts(found.samples, found.completions, found.logprob_sequences)
    assert in_words(tally.counts) == "2 completions, 3 logprob sequences"


def test_a_file_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 100.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with Progress(Console(file=StringIO()), 1000).shown("plain", LOG) as tell:
        for seconds, count in ((1, 5), (16, 293), (17, 300)):
            now = 100.0 + seconds
            tell(Counts(count, 3, 19))
    assert capsys.readouterr().err == "plain, 293 of 1000: 3 completions, 19 logprob sequences, batch of 2\n"


def test_a_terminal_has_the_counts_beside_a_bar() -> None:
    out = StringIO()
    console = Console(file=out, width=80, force_terminal=True)
    with Progress(console, 1000).shown("plain", LOG) as tell:
        tell(Counts(293, 3, 19))
    shown = Console(file=StringIO(), width=80).render_str(out.getvalue()).plain
    assert "293 of 1000: 3 completions, 19 logprob sequences" in shown


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (Counts(1, 1, 1), ""),
        (Counts(9, 1, 1), "plain, 9 of 10 so far: 1 completion, 1 logprob sequence: no difference yet"),
        (Counts(9, 1, 4), "plain, 9 of 10 so far: 1 completion, 4 logprob sequences: they differ"),
    ],
)
def test_an_interrupted_run_tells_what_was_seen(counts: Counts, said: str) -> None:
    running = Progress(Console(file=StringIO()), 10)
    assert running.so_far == ""
    with pytest.raises(KeyboardInterrupt), running.shown("plain", LOG) as tell:
        tell(counts)
        raise KeyboardInterrupt
    assert running.so_far == said
    with running.shown("plain", LOG) as tell:
        tell(counts)
    assert running.so_far == "", "a run that has ended is in the table"

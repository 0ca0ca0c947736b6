"""Where a CPU shows no other text, ``make demo`` quotes the recorded run of a GPU; what it offers can be pasted."""

import csv
from pathlib import Path
from typing import Any

import pytest

from scripts import demo


def results(completions: int, logprob_sequences: int) -> list[dict[str, Any]]:
    return [{"comparison": {"completions": completions, "logprob_sequences": logprob_sequences}}]


def closing(completions: int, logprob_sequences: int) -> str:
    return "\n".join(demo.closing(results(completions, logprob_sequences), "a model", Path("page.html")))


def test_where_texts_part_nothing_else_is_called_as_a_witness() -> None:
    said = closing(3, 19)
    assert "H200" not in said
    assert "page.html" in said
    assert "check --quick 'a model'" in said


@pytest.mark.parametrize(("sequences", "line"), [(19, "its logprobs are not"), (1, "and so are its logprobs")])
def test_where_texts_agree_a_recorded_run_is_quoted(sequences: int, line: str) -> None:
    said = closing(1, sequences)
    assert f"On this CPU all texts of plain vLLM are equal{'; ' if sequences > 1 else ', '}{line}" in said
    with demo.RECORDED.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["mode"] == "off"]
    assert any(f"gave {row['completions']} different texts" in said and row["date"] in said for row in rows)


def test_the_commands_that_are_offered_can_be_pasted() -> None:
    commands = [line.split("    #")[0].split() for line in closing(2, 2).splitlines() if line.startswith("  ")]
    assert len(commands) == 3
    assert all(Path(words[0]).is_file() for words in commands)

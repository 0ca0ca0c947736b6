"""Every figure of cost that a document says is that of the data."""

import csv
import re
import shutil
from pathlib import Path

import pytest

from benchmarks.record import DATA, read
from scripts import cost_figures
from scripts.cost_figures import FIGURES, ROOT, SAMPLES, add_recording, cost, documents, engine, lines, written
from tests.docs.documents import ROOT as ROOT_OF_DOCUMENTS

README = (ROOT / "README.md").read_text()
_FIGURE = re.compile(r"<!--figure:([\w-]+)-->.*?<!--end-->", re.DOTALL)


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_a_document_says_what_the_data_say(document: Path) -> None:
    text = document.read_text()
    assert text == written(text), "run: python -m scripts.cost_figures"


def test_every_figure_stands_in_a_document() -> None:
    assert ROOT == ROOT_OF_DOCUMENTS
    assert {name for path in documents() for name in _FIGURE.findall(path.read_text())} == set(FIGURES)


def test_the_readme_has_no_ratio_but_those_of_the_data() -> None:
    assert "0.8" in README, "the figures of cost are there"
    decimals = re.findall(r"\d\.\d\d\b(?!\.)|\d+ (?:ms|MiB|tokens/s)\b", _FIGURE.sub("", README))
    assert set(decimals) <= {"3.11", "3.13", "0.26", "0.32", "0.33"}, "besides versions of Python and vLLM"


def test_a_figure_follows_the_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = FIGURES["cost-token"](), FIGURES["engine"]()
    path = tmp_path / "engine.csv"
    lines_of_file = (DATA / "engine.csv").read_text().splitlines(keepends=True)
    [at] = [
        place
        for place, line in enumerate(lines_of_file)
        if line.startswith("engine,ours,workload=tpot batch=1 context=64,") and "H100" in line and "vllm=0.33.0" in line
    ]
    lines_of_file[at] = lines_of_file[at].replace(",5.936,", ",9.9999,").replace(",0.86755,", ",1.4615,")
    path.write_text("".join(lines_of_file))
    monkeypatch.setattr(cost_figures, "_data", lambda name: read(path))
    assert FIGURES["cost-token"]() == before[0].replace("0.95", "1.46")
    assert "| 6.84 ms | 10.0 ms | 1.46 |" in FIGURES["engine"]()


def test_of_rates_more_is_less_cost() -> None:
    [prefill] = [line for line in lines(engine(model="30b-a3b")) if "prefill" in line.words]
    assert prefill.ours.p50 > prefill.stock.p50
    assert cost(prefill.ours) == pytest.approx(prefill.stock.p50 / prefill.ours.p50, rel=1e-3)
    with pytest.raises(ValueError, match="nothing to compare"):
        cost(next(row for row in read(DATA / "engine.csv") if row.ratio is None))


def test_a_mark_that_names_nothing_or_begins_a_line_is_refused() -> None:
    with pytest.raises(KeyError, match="made-up"):
        written("<!--figure:made-up--><!--end-->")
    with pytest.raises(ValueError, match="begins a line"):
        written("a word\n<!--figure:cost-token--><!--end-->")
    assert written("It took <!--figure:cost-token-->9<!--end-->.") != "It took <!--figure:cost-token-->9<!--end-->."


def test_a_recorded_run_is_added_before_the_others(tmp_path: Path) -> None:
    table = Path(shutil.copy(SAMPLES, tmp_path))
    old = list(csv.DictReader(SAMPLES.open(newline="")))

    def result(mode: str, completions: int) -> dict:
        return {
            "info": {"mode": mode, "versions": {"vllm": "0.33.0"}},
            "samples": {"which": [0] * 500},
            "comparison": {"completions": completions, "logprob_sequences": completions + 2},
            "batches": {"running": {"10": 1, "9": 3}},
        }

    run = {"results": [result("none: off", 7), result("this plugin", 1)], "began": "2027-01-02T03:04:05"}
    run["request"] = {"max_tokens": 600}
    add_recording(run, "a model", "a GPU", table)
    rows = list(csv.DictReader(table.open(newline="")))
    assert rows[2:] == old
    assert [row["completions"] for row in rows[:2]] == ["7", "1"]
    assert {(row["samples"], row["batch"], row["date"], row["machine"]) for row in rows[:2]} == {
        ("500", "9-10", "2027-01-02", "a GPU")
    }
    with pytest.raises(ValueError, match="one result without the mode"):
        add_recording(run | {"results": run["results"][:1]}, "a model", "a GPU", table)

"""The figures of the documents show the data that there is."""

import json
import re
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("matplotlib")

from scripts import figures
from scripts.demos import blocks
from scripts.see import answers

LARGEST = 60_000
"""Bytes."""


@pytest.fixture(scope="module")
def drawn() -> dict[str, str]:
    return {name: draw() for name, draw in figures.DRAWINGS.items()}


def described(picture: str) -> str:
    return ET.fromstring(picture).attrib["aria-label"]


@pytest.mark.parametrize("name", figures.DRAWINGS)
def test_the_kept_figure_shows_what_the_data_are_now(name: str, drawn: dict[str, str]) -> None:
    """In words, where machines agree: what is drawn of it may follow the version of matplotlib."""
    kept = (figures.FIGURES / f"{name}.svg").read_text()
    assert described(kept) == described(drawn[name]), "run: python -m scripts.figures"


def test_the_words_follow_the_data(drawn: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "sums", lambda dtype: dict.fromkeys(blocks.BLOCKS, 1.5))
    monkeypatch.setattr(blocks, "moved", lambda dtype: ({(1, 1): 0}, {2: 7}))
    changed = described(figures.order())
    assert changed != described(drawn["order"])
    assert "block 64: 1.5" in changed
    assert "split-K 2: 7" in changed


def test_the_same_data_make_the_same_file(drawn: dict[str, str]) -> None:
    assert [name for name, draw in figures.DRAWINGS.items() if name != "order" and draw() != drawn[name]] == []


@pytest.mark.parametrize("name", figures.DRAWINGS)
def test_a_figure_is_small_and_readable_on_any_page(name: str, drawn: dict[str, str]) -> None:
    picture = drawn[name]
    assert len(picture) < LARGEST
    assert "<dc:date>" not in picture
    assert re.search(r'<svg width="[\d.]+(pt)?" height="[\d.]+(pt)?"', picture)
    drawn_paper = r'd="M 0 [\d.]+\s+L 432 [\d.]+\s+L 432 0\s+L 0 0\s+z\s*"\s+style="fill: #ffffff'
    assert re.search(f'{drawn_paper}|<rect class="paper"', picture), "no paper under it"
    assert "prefers-color-scheme: dark" in picture
    assert "<text" in picture


ONE = "Small numbers come first, so that they keep their digits.\nThe sum is then as near as it can be & no nearer."
OTHER = ONE.replace("keep", "lose").replace("then", "not")


def run(plain: list[tuple[str, int]]) -> dict:
    """A recording of these texts, each as often; the plugin's is the first."""

    def result(mode: str, texts: list[tuple[str, int]]) -> dict:
        different = [{"text": at, "first_logprob": None, "candidates": []} for at in range(len(texts))]
        runs = [[number, count] for number, (_, count) in enumerate(texts)]
        shown = {"mode": mode, "texts": [text for text, _ in texts], "different": different, "runs": runs}
        return shown | {"batch": [1, 9], "logprob_sequences": 2}

    where = {"machine": "a machine", "vllm": "1.2", "date": "2027-01-02"}
    request = {"prompt": "Why?", "temperature": 0.0}
    results = [result("none: off", plain), result("on", [(plain[0][0], sum(count for _, count in plain))])]
    return {"where": where, "target": "a model", "request": request, "results": results}


def test_the_first_other_word_of_two_answers_is_marked() -> None:
    found = answers.cards(run([(ONE, 6), (OTHER, 4)]))
    heads = ["plain vLLM: 6 of 10 answers", "plain vLLM: 4 of 10 answers", "with the plugin: 10 of 10 answers"]
    assert [card.head for card in found] == heads
    marked = [card.mark and card.lines[card.mark[0]][card.mark[1] :][: card.mark[2]] for card in found]
    assert marked == ["keep", "lose", None]
    picture = ET.fromstring(answers.draw(run([(ONE, 6), (OTHER, 4)])))
    texts = [place.text for place in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert [texts.count(word) for word in ("keep", "lose")] == [1, 1]


def test_a_word_far_inside_of_a_long_answer_is_shown_among_its_neighbours() -> None:
    before, behind = "and so on " * 300, " and more" * 300
    [one, other, _] = answers.cards(run([(f"{before}left{behind}", 5), (f"{before}right{behind}", 5)]))
    for card, word in ((one, "left"), (other, "right")):
        line, column, length = card.mark
        assert card.lines[line][column : column + length] == word
        assert card.lines[0].startswith("... ")
        assert card.lines[-1].endswith(" ...")
        assert len(card.lines) < 6


def test_equal_texts_show_the_first_other_logprob() -> None:
    recorded = run([(ONE, 6)])
    listed = {"position": 3, "expected": [["5", -0.25]], "got": [["5", -0.75]]}
    plain = recorded["results"][0]
    plain["different"].append({"text": 0, "first_logprob": 3, "candidates": [listed]})
    plain["runs"].append([1, 4])
    [one, other, ours] = answers.cards(recorded)
    assert (one.lines[-1], other.lines[-1]) == ("logprob of token 3: -0.25", "logprob of token 3: -0.75")
    assert one.head == "plain vLLM: 6 of 10 answers, one text and 2 sequences of logprobs"
    assert ours.mark is None


def test_a_recording_without_the_mode_or_without_plain_vllm_is_refused(tmp_path) -> None:
    path = tmp_path / "run.json"
    recorded = run([(ONE, 6)])
    path.write_text(json.dumps(recorded))
    assert answers.recorded(path) == recorded
    path.write_text(json.dumps(recorded | {"results": recorded["results"][1:]}))
    with pytest.raises(ValueError, match="a result without the mode"):
        answers.recorded(path)

"""The figures of the documents show the data that there is."""

import re
from xml.etree import ElementTree as ET

import pytest

pytest.importorskip("matplotlib")

from scripts import figures
from scripts.demos import blocks

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
    assert "date" not in picture
    assert re.search(r'<svg width="[\d.]+pt" height="[\d.]+pt"', picture)
    paper = re.search(r'd="M 0 [\d.]+\s+L 432 [\d.]+\s+L 432 0\s+L 0 0\s+z\s*"\s+style="fill: #ffffff', picture)
    assert paper, "no white paper under it"
    assert "<text" in picture

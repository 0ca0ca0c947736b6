"""The page of a check: what it shows, that it needs nothing else, and that it can be read without seeing it."""

import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest

from tests.verify import receipts
from tests.verify.test_bisect import differing
from tests.verify.test_check_cases import answer, certificate
from vllm_batch_invariant.verify.answers import Answer, GeneratedToken, RequestSpec, number_of
from vllm_batch_invariant.verify.bisect.engine import Case, Setting
from vllm_batch_invariant.verify.bisect.page import page_of as bisect_page
from vllm_batch_invariant.verify.check.page import page_of
from vllm_batch_invariant.verify.check.report import Report
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.harness.load import Run
from vllm_batch_invariant.verify.harness.metrics import BatchLog, Latency, Reading, Trace
from vllm_batch_invariant.verify.receipt.comparison import compare
from vllm_batch_invariant.verify.receipt.page import page_of as receipt_page
from vllm_batch_invariant.verify.report.chart import Chart, Line, distribution, steps
from vllm_batch_invariant.verify.report.html import Page, write_html
from vllm_batch_invariant.verify.report.sample_map import letter, map_of
from vllm_batch_invariant.verify.reproduce.page import page_of as reproduce_page
from vllm_batch_invariant.verify.reproduce.report import ReproduceResult

VOID = {"meta", "link", "br", "img", "hr", "wbr"}
HOSTILE = "<script>alert('x')</script>"


def results(label: str, breaks: bool) -> CheckResults:
    """One setting with everything that a page shows."""
    same, other = answer(1, 2, 3, 4, text="abcd"), answer(1, 2, 9, 9, text=f"ab{HOSTILE}")
    found = CheckResults(label, [("batch", "with concurrent requests"), ("schedule", "preemption")])
    found.show("alone", same)
    for sample, got in (("with 1 other", other if breaks else same), ("with 7 others", same)):
        found.add("batch", "with concurrent requests", sample, same, got)
        found.show(sample, got)
    if breaks:
        found.show("again", answer(1, 2, 3, 4, ulp_at=1, text="abcd"))
    found.gaps["schedule", "preemption"] = "the engine did not preempt"
    found.certificates = [certificate(difference="at (0, 0)" if breaks else ""), certificate(operation="mean")]
    found.traces = [Trace("as served", (0.0, 0.5, 1.0), (1, 8, 2))]
    found.latency = Latency.of([[0.1, 0.2, 0.31], [0.1, 0.22]])
    found.info = {"device": {"type": "cpu", "name": HOSTILE}, "startup_seconds": 1.25}
    return found


def report(partial: str = "") -> Report:
    runs = (results("VLLM_BATCH_INVARIANT=0", True), results("VLLM_BATCH_INVARIANT=1", False))
    return Report(f"model {HOSTILE}", "quick", ("--enforce-eager",), "2026-01-01T00:00:00+00:00", 75.0, runs, partial)


class Reader(HTMLParser):
    """Elements of a page with their attributes and ancestors."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str], tuple[str, ...]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, tuple(self._open)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}, tuple(self._open)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] not in ("style", "script"):
            self.text += data

    def all(self, tag: str) -> list[dict[str, str]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]


def _columns(page: Reader) -> list[int]:
    """How many columns each table has."""
    counts: list[int] = []
    for tag, attributes, _ in page.elements:
        if tag == "table":
            counts.append(0)
        elif tag == "th" and attributes["scope"] == "col":
            counts[-1] += 1
    return counts


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(path, page_of(report()))
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(text: str) -> Reader:
    return Reader(text)


def test_every_link_leads_to_something_in_the_page(page: Reader) -> None:
    ids = [attributes["id"] for _, attributes, _ in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    links = [attributes["href"] for attributes in page.all("a")]
    assert links
    assert {link[1:] for link in links if link.startswith("#")} <= set(ids)
    references = {value for _, attributes, _ in page.elements for value in attributes.values()}
    used = {name for value in references for name in re.findall(r"url\(#([^)]+)\)", value)}
    assert used <= set(ids)


def test_the_page_needs_nothing_from_elsewhere(page: Reader, text: str) -> None:
    assert all(link.startswith("#") for link in (attributes["href"] for attributes in page.all("a")))
    assert not page.all("script")
    assert not page.all("link")
    assert not page.all("img")
    assert "@import" not in text
    addresses = set(re.findall(r"https?://[^\s\"'<)]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_what_came_from_a_model_or_a_machine_is_never_markup(page: Reader) -> None:
    assert HOSTILE in page.text
    assert not page.all("script")


def test_tables_have_captions_and_headers_with_a_scope(page: Reader) -> None:
    tables = page.all("table")
    assert len(tables) == len(page.all("caption")) >= 8
    assert all(
        ("many" in attributes.get("class", "")) != (columns == 2)
        for attributes, columns in zip(tables, _columns(page), strict=True)
    )
    headers = page.all("th")
    assert all(attributes.get("scope") in ("col", "row") for attributes in headers)
    rows = sum(tag == "tr" and ancestors[-1] == "tbody" for tag, _, ancestors in page.elements)
    assert sum(attributes["scope"] == "row" for attributes in headers) == rows


def test_figures_have_a_description_and_a_caption_and_say_who_differs_in_words(page: Reader) -> None:
    drawn = [attributes for _, attributes, ancestors in page.elements if ancestors[-1:] == ("figure",)]
    described = [attributes for attributes in drawn if "aria-label" in attributes]
    assert len(described) == len(page.all("figure")) == len(page.all("figcaption")) == 4
    assert all(len(attributes["aria-label"]) > 40 for attributes in described)
    assert {attributes["role"] for attributes in described} == {"img", "group"}
    assert "the first token to differ is number 2" in described[0]["aria-label"]
    inside = [attributes for tag, attributes, ancestors in page.elements if tag == "a" and "svg" in ancestors]
    assert [attributes["aria-label"] for attributes in inside] == [
        "with 1 other: first logprob to differ is number 2",
        "with 1 other: first token to differ is number 2",
        "again: first logprob to differ is number 1",
    ]


def test_the_map_draws_each_stretch_of_a_completion_where_it_is(page: Reader) -> None:
    rows = [
        (attributes["class"], attributes["x"], attributes["width"])
        for tag, attributes, ancestors in page.elements
        if tag == "rect" and "figure" in ancestors and "ul" not in ancestors
    ]
    same, other = [("c0", "0%", "100%")], [("c0", "0%", "50%"), ("c1", "50%", "50%")]
    assert rows == [*same, *other, *same, ("logprobs", "25%", "75%")]


def test_headings_descend_one_by_one_and_the_page_has_landmarks_and_a_language(page: Reader) -> None:
    levels = [int(tag[1]) for tag, _, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels))
    assert page.all("html")[0]["lang"] == "en"
    assert page.all("main")
    assert page.all("nav")[0]["aria-label"]
    assert "width=device-width" in next(a["content"] for a in page.all("meta") if a.get("name") == "viewport")


def test_an_outcome_is_a_word_and_not_a_colour_alone(page: Reader) -> None:
    for word in ("holds", "breaks", "not tested"):
        assert re.search(rf"[✓✗–]\s+{word}", page.text)
    # letters on the map say what its colours say
    assert re.search(r"B follows completion B", page.text)
    for mark, headline in ("✗", "Not reproducible. Bits change with the batch."), ("–", "Not decided. 1 of 3 cases"):
        assert f"{mark} {headline}" in page.text


def test_the_verdict_names_the_guarantee_that_breaks_and_the_token(page: Reader) -> None:
    assert "VLLM_BATCH_INVARIANT=0: breaks batch (from token 2 on)" in page.text
    assert "VLLM_BATCH_INVARIANT=1: holds batch" in page.text
    assert "the engine did not preempt" in page.text


def test_no_cell_says_that_there_is_nothing_to_say(page: Reader) -> None:
    assert "nothing" not in page.text.replace("nothing tested", "")
    columns = [a["data-column"] for a in page.all("td") if a.get("data-column") == "first difference"]
    assert len(columns) == 3  # of the setting that breaks; the other one's table has no such column


def test_a_function_has_its_name_and_its_package() -> None:
    qualified = "vllm_batch_invariant.integration.layers.norm.BatchInvariantRMSNorm"
    run = CheckResults("x", [], certificates=[replace(certificate(), served_by=qualified)])
    [section] = [s for s in page_of(Report("x", "quick", (), "", 1.0, (run,))).sections if s.anchor == "operations"]
    assert section.parts[0].rows[0][-1].text == "BatchInvariantRMSNorm of vllm_batch_invariant"


def test_both_latencies_are_shown_where_both_were_measured(page: Reader) -> None:
    assert "between tokens, median (ms)" in page.text
    assert "--compare measures both" not in page.text


def test_an_interrupted_check_that_found_nothing_has_a_page_that_is_marked_partial(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    empty = CheckResults("server", [("batch", "with concurrent requests")], failed="interrupted")
    write_html(path, page_of(Report("x", "quick", (), "now", 1.0, (empty,), "It was interrupted.")))
    found = Reader(path.read_text(encoding="utf-8"))
    assert "Partial report. It was interrupted." in found.text
    assert "(partial)" in found.text  # in the title
    assert "not tested: interrupted" in found.text


def test_a_reproducibility_run_has_the_same_map_and_batches(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    answers = tuple(answer(1, 2, 3) if number % 4 else answer(1, 2, 9) for number in range(1, 90))
    log = BatchLog([Reading(1, {}), Reading(5, {}), Reading(2, {})])
    result = ReproduceResult.of("VLLM_BATCH_INVARIANT=0", Run(answers, 2.0, 3, 1, 0), log, {"mode": "none"})
    assert "answers" not in result.as_json()
    write_html(path, reproduce_page("http://here", RequestSpec(), [result]))
    found = Reader(path.read_text(encoding="utf-8"))
    assert "Not reproducible. Of 88 repeats 22 have other tokens and 22 have other logprobs." in found.text
    assert "sample 3 and 21 more" in found.text
    assert "█" not in found.text
    assert [attributes["class"] for attributes in found.all("svg") if "class" in attributes][:2] == ["strip", "strip"]


def test_json_has_each_different_answer_once_and_its_candidates_where_it_first_differs() -> None:
    log = BatchLog([Reading(1, {}), Reading(5, {}), Reading(2, {})])
    answers = (answer(1, 2, 3), answer(1, 2, 3, ulp_at=1), answer(1, 2, 9), answer(1, 2, 3), answer(1, 2))
    result = ReproduceResult.of("VLLM_BATCH_INVARIANT=0", Run(answers, 2.0, 3, 1, 0), log, {"mode": "none"})
    samples = json.loads(json.dumps(result.as_json()))["samples"]
    assert samples["which"] == [0, 1, 2, 0, 3]
    same, close, other, short = samples["different"]
    assert (same["first_token"], same["first_logprob"], same["candidates"]) == (None, None, [])
    assert (close["first_token"], close["first_logprob"]) == (None, 1)
    [there] = close["candidates"]
    assert there["expected"][0] == ["2", same["logprobs"][1]]
    assert there["got"][0] == ["2", close["logprobs"][1]]
    assert math.nextafter(same["logprobs"][1], 0) in (close["logprobs"][1], there["expected"][0][1])
    assert (other["first_token"], other["tokens"]) == (2, ["1", "2", "9"])
    assert short["candidates"] == [{"position": 2, "expected": other["candidates"][0]["expected"], "got": []}]


def test_json_says_numbers_that_it_has_no_word_for() -> None:
    values = [GeneratedToken("1", value) for value in (math.nan, -math.inf, -0.0)]
    log = BatchLog([Reading(1, {}), Reading(5, {}), Reading(2, {})])
    answers = (Answer.of("x", values), Answer.of("x", values))
    result = ReproduceResult.of("plain", Run(answers, 2.0, 3, 1, 0), log, {"mode": "none"})
    [found] = json.loads(json.dumps(result.as_json(), allow_nan=False))["samples"]["different"]
    assert [number_of(one) if isinstance(one, str) else one for one in found["logprobs"][1:]] == [-math.inf, -0.0]
    assert found["logprobs"][0].startswith("nan ")


def test_a_sample_follows_the_first_completion_that_began_as_it_does() -> None:
    found = map_of([("a", answer(1, 2, 3)), ("b", answer(1, 5, 6)), ("c", answer(1, 5, 7)), ("d", answer(1, 2, 3))])
    assert [row.follows for row in found.rows] == [(0, 0, 0), (0, 1, 1), (0, 1, 2)]
    assert found.rows[0].labels == ("a", "d")
    assert found.rows[2].runs == ((0, 0, 1), (1, 1, 1), (2, 2, 1))
    assert [row.token for row in found.rows] == [None, 1, 1]
    assert found.completions == 3
    assert found.first_token == 1
    assert [row.label for row in found.different] == ["b", "c"]


def test_a_logprob_that_differs_alone_is_on_the_map() -> None:
    found = map_of([("a", answer(1, 2, 3)), ("b", answer(1, 2, 3, ulp_at=2))])
    assert (found.rows[1].token, found.rows[1].logprob) == (None, 2)
    assert found.completions == 1
    assert found.first_token is None


def test_many_samples_with_the_same_bits_share_a_row_and_none_is_lost() -> None:
    samples = [(f"sample {i}", answer(1, 2, 3) if i % 10 else answer(1, i)) for i in range(1000)]
    found = map_of(samples, most_rows=30)
    assert len(found.rows) == 30
    assert found.rows[1].label == "sample 1 and 899 more"
    assert sum(len(row.labels) for row in found.rows) + found.not_shown == 1000


def test_completions_have_letters_beyond_the_alphabet() -> None:
    assert [letter(number) for number in (0, 25, 26, 52)] == ["A", "Z", "A1", "A2"]


def test_a_page_needs_no_package_for_plots(text: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # an import of it fails
    write_html(tmp_path / "page.html", page_of(report()))
    assert (tmp_path / "page.html").read_text(encoding="utf-8") == text


def test_a_page_of_equal_answers_shows_one_sentence_and_no_map(tmp_path: Path) -> None:
    log = BatchLog([Reading(1, {}), Reading(5, {}), Reading(2, {})])
    result = ReproduceResult.of(
        "VLLM_BATCH_INVARIANT=1", Run((answer(1, 2, 3),) * 50, 2.0, 3, 1, 0), log, {"mode": "on"}
    )
    write_html(tmp_path / "page.html", reproduce_page("http://here", RequestSpec(), [result]))
    found = Reader((tmp_path / "page.html").read_text(encoding="utf-8"))
    assert "Reproducible. All 50 answers are equal, bit for bit." in found.text
    assert [a["role"] for a in found.all("svg") if "role" in a] == ["img"]  # batches over time
    assert "sample 1" not in found.text


def test_a_drawn_line_goes_through_the_values_and_no_further() -> None:
    chart = Chart("", "seconds", "requests", (Line("", steps([(0.0, 1.0), (2.0, 8.0), (4.0, 2.0)])),))
    assert chart.polyline(chart.lines[0]) == "0,875 500,875 500,0 1000,0 1000,750"
    assert chart.x_ticks == ((0.0, "0"), (0.25, "1"), (0.5, "2"), (0.75, "3"), (1.0, "4"))
    assert [number for _, number in chart.y_ticks] == ["0", "2", "4", "6", "8"]


def test_a_long_run_is_drawn_with_its_lowest_and_highest_batch() -> None:
    sizes = [5.0] * 20_000
    sizes[7000], sizes[7001] = 0.0, 10.0
    chart = Chart(
        "", "seconds", "requests", (Line("", steps([(place / 4, size) for place, size in enumerate(sizes)])),)
    )
    points = [tuple(map(int, point.split(","))) for point in chart.polyline(chart.lines[0]).split()]
    assert len(points) < 3000
    assert {(350, 0), (350, 1000)} <= set(points)


def test_a_distribution_says_which_share_is_not_above_a_value() -> None:
    points = distribution([3.0, 1.0, 2.0, 2.0])
    assert dict(points) == {0.0: 0.0, 1.0: 0.25, 2.0: 0.75, 3.0: 1.0}


@pytest.mark.parametrize(
    ("end", "numbers"), [(0.3, "0 0.1 0.2 0.3"), (7, "0 2 4 6"), (1, "0 0.2 0.4 0.6 0.8 1"), (127, "0 50 100")]
)
def test_axes_have_round_numbers(end: float, numbers: str) -> None:
    ticks = Chart("", "", "", (Line("", ((0.0, 0.0), (end, 1.0))),)).x_ticks
    assert [number for _, number in ticks] == numbers.split()
    assert all(share == pytest.approx(float(number) / end) for share, number in ticks)


def read(page: Page, folder: Path) -> Reader:
    """A page as it is written."""
    write_html(folder / "page.html", page)
    return Reader((folder / "page.html").read_text(encoding="utf-8"))


SETTING = Setting(f"model {HOSTILE}", "0.32.0", "cpu", "bfloat16", "0", "plain vLLM")


def test_the_page_of_a_bisection_names_the_operation_and_every_run(tmp_path: Path) -> None:
    found = differing()
    equal = replace(found, found=None, first_token=None, first_logprob=None, unrecorded_differ=False)
    case = Case((1, 2, 3), ((4,), (5,)), 1, 4)
    page = read(bisect_page(SETTING, [(case, equal), (case, found)]), tmp_path)
    assert "✗ Bits first differ in model.layers.3.mlp.down_proj: aten.mm, with 2 concurrent requests." in page.text
    assert page.text.count("✓ holds") == page.text.count("✗ breaks") == 1
    assert HOSTILE in page.text
    page = read(bisect_page(SETTING, [(case, equal)]), tmp_path)
    assert "✓ Nothing differs." in page.text
    assert "breaks" not in page.text


def test_the_page_of_a_receipt_marks_the_token_at_which_another_computation_differs(tmp_path: Path) -> None:
    made, other = receipts.receipt(), receipts.receipt(completion=receipts.completion(logprobs=(-0.5, -1.5, -0.75)))
    page = read(receipt_page(made, compare(made, other)), tmp_path)
    assert "✗ Different from token 1 on." in page.text
    cells = [attributes for attributes in page.all("span") if attributes.get("class") == "outcome breaks"]
    assert len(cells) == 1
    page = read(receipt_page(made, compare(made, made)), tmp_path)
    assert "✓ Equal. Every token and logprob has the same bits." in page.text
    assert "Equal bits were not promised" in page.text  # nobody knows the model's files


@pytest.mark.parametrize(
    ("mode", "headline"),
    [(True, "✓ Anybody with the same engine"), (False, "– The mode was off"), (None, "– The engine did not say")],
)
def test_the_page_of_a_receipt_says_whether_its_bits_can_be_computed_again(
    mode: bool | None, headline: str, tmp_path: Path
) -> None:
    made = receipts.receipt(environment=replace(receipts.CPU, mode=mode))
    page = read(receipt_page(made), tmp_path)
    assert headline in page.text
    assert "0xbf000000" in page.text  # the bits of -0.5
    assert ("What the bits depend on" in page.text) == (mode is not None)


def test_a_private_receipt_has_no_prompt_on_its_page(tmp_path: Path) -> None:
    made = receipts.receipt()
    private = replace(made, prompt=replace(made.prompt, token_ids=None))
    assert "11 12 13" in read(receipt_page(made), tmp_path).text
    assert "11 12 13" not in read(receipt_page(private), tmp_path).text

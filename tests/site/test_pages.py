"""Every figure answers to every control, by keyboard too, on a phone and a desk, and says what has changed."""

import csv
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scripts.site import ROOT

SEE = sorted(path.stem for path in (ROOT / "docs" / "see").glob("*.md"))
WITH_FIGURES = [name for name in SEE if name != "index"]
PHONE = {"width": 360, "height": 740}
ORDER_OF_BUTTONS = ("Zoom in", "Later samples", "Earlier samples", "Zoom out")
"""Of a map: what does nothing before another has been pressed."""


def says(figure: Any) -> str:
    return figure.get_attribute("data-says")


def changed_by(figure: Any, act: Callable[[], None]) -> None:
    before = says(figure)
    act()
    assert says(figure) != before
    assert len(says(figure)) > 20


@pytest.mark.parametrize("name", WITH_FIGURES)
def test_every_control_changes_what_its_figure_says(name: str, opened: Callable[..., Any]) -> None:
    page = opened(f"see/{name}.html")
    figures = page.locator("[data-see]").all()
    assert figures
    for figure in figures:
        controls = 0
        for select in figure.locator("select").all():
            first, second, *_ = select.evaluate("select => [...select.options].map(({ value }) => value)")
            for value in (second, first) if select.input_value() == first else (first, second):
                changed_by(figure, lambda select=select, value=value: select.select_option(value))
                controls += 1
        for slider in figure.locator("input[type=range]").all():
            key = "ArrowLeft" if slider.input_value() == slider.get_attribute("max") else "ArrowRight"
            changed_by(figure, lambda slider=slider, key=key: slider.press(key))
            assert slider.get_attribute("aria-valuetext")
            controls += 1
        names = [button.get_attribute("aria-label") for button in figure.locator("button").all()]
        for label in sorted(names, key=lambda label: (label not in ORDER_OF_BUTTONS, names.index(label))):
            button = figure.get_by_role("button", name=label, exact=True)
            if button.is_enabled():
                changed_by(figure, lambda button=button: button.press("Enter"))
                controls += 1
        assert controls
        status = figure.get_by_role("status")
        page.wait_for_function(
            "root => root.querySelector('[role=status]').textContent === root.dataset.says", arg=figure.element_handle()
        )
        assert status.inner_text()


def test_terms_can_be_typed_and_moved_without_a_mouse(opened: Callable[..., Any]) -> None:
    page = opened("see/addition.html")
    figure = page.locator("[data-see]")
    page.get_by_label("Numbers", exact=True).select_option("swallowed")
    assert "fp16 0, " in says(figure)
    page.get_by_role("button", name="Smallest first").press("Enter")
    assert "fp16 4, exact" in says(figure)
    term = page.get_by_label("Term 1", exact=True)
    term.fill("3")
    term.press("Enter")
    assert says(figure).startswith("3, 1, 1, 1")
    page.get_by_role("button", name="Add term 1 later").press("Enter")
    assert says(figure).startswith("1, 3, 1, 1")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Add term 2 later"


def table_of_how_it_works(title: str) -> list[list[str]]:
    """The rows of the first table behind a title, as a demonstration printed them."""
    text = (ROOT / "docs" / "how-it-works.md").read_text().partition(title)[2]
    table = re.search(r"\|-.*-\|\n((?:\|.*\|\n)+)", text)[1]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_sums_by_block_are_those_that_pytorch_printed_and_a_missing_recording_is_named(
    opened: Callable[..., Any],
) -> None:
    page = opened("see/blocks.html")
    found = {}
    for name in ("fp32", "fp16"):
        page.locator("[data-see=sums] select").select_option(name)
        rows = page.locator("[data-see=sums] tbody tr").all()
        found[name] = {row.locator("th").inner_text(): row.locator("td").first.inner_text() for row in rows}
    expected = table_of_how_it_works("Sum of 1048576 numbers")
    assert [[block, found["fp32"][block], found["fp16"][block]] for block, _, _ in expected] == expected
    text = page.locator("[data-see=sums]").inner_text()
    made = (ROOT / "site" / "data" / "gpu_blocks.json").exists()
    assert ("The GPU's numbers" in text) == made
    assert ("No GPU has measured this yet" in text) != made


def test_tiles_move_no_element_and_k_in_parts_as_many_as_in_pytorch(opened: Callable[..., Any]) -> None:
    page = opened("see/blocks.html")
    figure = page.locator("[data-see=product]")
    printed = {row[0]: int(row[1]) for row in table_of_how_it_works("| split-K")}
    for cut, expected in (("64x128/1", 0), ("128x128/4", printed["4"])):
        figure.locator("select").nth(1).select_option(cut)
        figure.get_by_role("button").click()
        page.wait_for_function("root => root.dataset.says.includes('have other bits')", arg=figure.element_handle())
        assert f" {expected:,} of 65,536 elements" in says(figure)


@pytest.mark.parametrize(
    ("served", "models"), [("Qwen3-8B", (None, "predictable")), ("Qwen3-30B-A3B, experts", ("30b-a3b",))]
)
def test_the_engines_bars_are_the_fair_figures_of_whole_models_on_one_gpu_in_the_file(
    opened: Callable[..., Any], served: str, models: tuple[str | None, ...]
) -> None:
    """Two engines that write other texts accept other drafts; tokens of a verify step are no cost."""
    page = opened("see/cost.html")
    figure = page.locator("[data-see=cost]")
    figure.get_by_label("Shape of the model").select_option(label=served)
    left_out = re.compile(r"\b(layers|arithmetic|tp|tree|format)=")
    with (ROOT / "benchmarks" / "data" / "engine.csv").open() as file:
        measured = [row for row in csv.DictReader(file) if "H200" in row["gpu"] and "vllm=0.33.0" in row["versions"]]
    whole = [row for row in measured if row["provider"] == "ours" and not left_out.search(row["case"])]
    whole = [row for row in whole if row["metric"] not in ("length", "step")]
    keys = [dict(pair.split("=") for pair in row["case"].split()) for row in whole]
    fair = [
        (row, of_row)
        for row, of_row in zip(whole, keys, strict=True)
        if of_row.get("model") in models and ("spec" not in of_row or of_row.get("model") == "predictable")
    ]
    ours = [row for row, _ in sorted(fair, key=lambda one: "spec" in one[1])]
    shown = figure.locator(".see-scroll").first.locator("tbody td:nth-of-type(2)").all_inner_texts()
    assert [re.search(r"\((.*)\)", cell)[1] for cell in shown] == [f"{float(row['ratio']):.2f}" for row in ours]
    rates = [float(row["ratio"]) if row["metric"] != "throughput" else 1 / float(row["ratio"]) for row in ours]
    assert f"worse in {sum(ratio > 1.01 for ratio in rates)}." in says(figure)


def test_figures_of_engines_that_wrote_other_texts_are_told_apart(opened: Callable[..., Any]) -> None:
    figure = opened("see/cost.html").locator("[data-see=cost]")
    assert "n-grams" in figure.locator("details table").text_content()
    assert "1.15" in figure.locator("details table").text_content()
    assert "1.15" not in figure.locator(".see-scroll").first.inner_text()
    assert "tokens of a verify step" not in figure.inner_text()


def test_a_bar_that_is_worse_has_a_colour_of_its_own(opened: Callable[..., Any]) -> None:
    page = opened("see/cost.html")
    figure = page.locator("[data-see=cost]")
    rows = [("ours", "time", 1.02), ("ours", "time", 1.005), ("ours", "throughput", 0.95), ("ours", "throughput", 1.2)]
    given = [{"provider": name, "metric": metric, "ratio": ratio} for name, metric, ratio in (*rows, ("native", "", 9))]
    names = page.evaluate("async (rows) => rows.map((await import('/src/ratios.js')).colour)", given)
    assert [name.removeprefix("var(--see-") for name in names] == ["worse)", "ours)", "worse)", "ours)", "other)"]
    fills = figure.locator("svg rect[fill^='var']").evaluate_all("all => all.map((one) => one.getAttribute('fill'))")
    legend = figure.locator(".see-legend").inner_text()
    assert fills
    assert ("var(--see-worse)" in fills) == ("worse" in legend)
    colours = "name => getComputedStyle(document.body).getPropertyValue(name)"
    assert len({page.evaluate(colours, f"--see-{name}") for name in ("ours", "worse", "other")}) == 3


def test_the_title_of_a_page_is_as_dark_as_its_text(opened: Callable[..., Any]) -> None:
    page = opened("see/cost.html")
    colour = "one => getComputedStyle(document.querySelector(one)).color"
    assert page.evaluate(colour, "article h1") == page.evaluate(colour, "article p")


def test_the_recorded_figure_comes_before_the_rule_of_thumb(opened: Callable[..., Any]) -> None:
    page = opened("see/batch.html")
    shown = page.locator("[data-see]").evaluate_all("all => all.map((one) => one.dataset.see)")
    assert shown == ["dot-product", "tiles"]


def test_the_map_shows_the_recorded_run(opened: Callable[..., Any]) -> None:
    recorded = json.loads((ROOT / "site" / "data" / "samples.json").read_text())
    page = opened("see/samples.html")
    figure = page.locator("[data-see=samples]")
    for place, result in enumerate(recorded["results"]):
        figure.get_by_label("Run").select_option(str(place))
        assert f"{result['logprob_sequences']} sequence" in says(figure)
        assert figure.locator(".see-map svg rect[fill]").count() >= len(result["runs"])
    figure.get_by_label("Run").select_option("0")
    figure.locator(".see-map svg").click(position={"x": 200, "y": 100})
    assert "The chosen answer" in says(figure)


@pytest.mark.parametrize("name", SEE)
def test_a_screen_reader_stumbles_over_nothing_and_a_phone_shows_all(name: str, opened: Callable[..., Any]) -> None:
    page = opened(f"see/{name}.html", viewport=PHONE)
    assert violations(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    page.get_by_title("Dark colours").click()
    page.wait_for_function("document.body.dataset.mdColorScheme === 'slate'")
    assert violations(page, ("color-contrast",)) == []


def violations(page: Any, rules: tuple[str, ...] = ("wcag2a", "wcag2aa", "best-practice")) -> list[tuple[str, str]]:
    """Rules of axe that elements of the text break: by default those of WCAG 2 and of good practice."""
    from axe_core_python.sync_playwright import Axe

    found = Axe().run(page, context="article", options={"runOnly": list(rules)})
    return [(rule["id"], node["html"][:200]) for rule in found["violations"] for node in rule["nodes"]]


@pytest.mark.parametrize("name", WITH_FIGURES)
def test_a_page_prints_without_its_controls(name: str, opened: Callable[..., Any]) -> None:
    page = opened(f"see/{name}.html")
    page.emulate_media(media="print")
    assert not any(controls.is_visible() for controls in page.locator(".see-controls, .see-buttons").all())
    assert page.locator(".see-status").first.is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")


@pytest.mark.parametrize("name", WITH_FIGURES)
def test_the_mathematics_is_folded_until_it_is_asked_for(name: str, opened: Callable[..., Any]) -> None:
    page = opened(f"see/{name}.html")
    summary = page.get_by_text("The mathematics", exact=True)
    text = page.locator("details", has=summary).locator("> p").first
    assert not text.is_visible()
    summary.press("Enter")
    assert text.is_visible()


MOVING = """() => [...document.querySelectorAll('*')].filter(one => {
  const { transitionDuration, animationName } = getComputedStyle(one);
  return animationName !== 'none' || transitionDuration.split(', ').some(time => parseFloat(time) > 0);
}).length"""


def test_nothing_moves_where_a_reader_wants_less_motion(opened: Callable[..., Any]) -> None:
    page = opened("see/samples.html")
    assert page.evaluate(MOVING) == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(MOVING) > 0


def test_pages_open_as_files_and_can_be_searched(built: Path, opened: Callable[..., Any]) -> None:
    page = opened("see/norm.html", origin=built.as_uri())
    assert "partial sum" in says(page.locator("[data-see]"))
    page.get_by_placeholder("Search").click()
    page.get_by_placeholder("Search").press_sequentially("receipts")
    page.locator(".md-search-result__item").first.wait_for()


def test_nothing_in_the_site_names_a_place_to_load_something_from(built: Path) -> None:
    """Links that a reader may follow have an <a>; nothing else may name a host."""
    for path in built.rglob("*.html"):
        for tag, attribute in re.findall(
            r"<(script|link|img|iframe|source)\b[^>]*?(?:src|href)=[\"']?(https?:[^\"' >]+)", path.read_text()
        ):
            assert tag == "link", f"{path.name} loads {attribute}"
    assert "d3-zoom" in (built / "assets" / "licences.txt").read_text()


def test_every_page_ends_with_a_command_and_says_that_it_needs_a_script() -> None:
    for name in WITH_FIGURES:
        text = (ROOT / "docs" / "see" / f"{name}.md").read_text()
        assert "## On your machine\n\n```\n" in text
        assert text.count("data-see=") == text.count("<noscript>")
        assert f"]({name}.md)" in (ROOT / "docs" / "see" / "index.md").read_text()

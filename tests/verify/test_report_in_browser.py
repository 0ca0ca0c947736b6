"""The page of a check in a real browser: its links and its map work, on a phone and in print too.

Needs Chromium, and the packages playwright and axe-core-python.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.verify.test_report_page import report
from vllm_batch_invariant.verify.check.page import page_of
from vllm_batch_invariant.verify.report.html import write_html

playwright = pytest.importorskip("playwright.sync_api")
axe = pytest.importorskip("axe_core_python.sync_playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")

DESK, PHONE = {"width": 1200, "height": 800}, {"width": 360, "height": 740}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    path: Path = tmp_path_factory.mktemp("page") / "report.html"
    write_html(path, page_of(report(partial="It was interrupted.")))
    return path.as_uri()


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    opened = browser.new_page(viewport=DESK)
    asked, said = [], []
    opened.on("request", lambda request: asked.append(request.url))
    opened.on("console", lambda message: said.append(message.text))
    opened.goto(address)
    yield opened
    # neither a request to anywhere else nor a complaint of the browser's
    assert asked == [address]
    assert said == []
    opened.close()


def test_every_link_of_the_navigation_leads_to_its_section(page: Any) -> None:
    links = page.locator("nav a")
    assert links.count() == 6
    for place in range(links.count()):
        links.nth(place).click()
        section = page.url.rpartition("#")[2]
        assert page.locator(f"h2#{section}").inner_text() == links.nth(place).inner_text()


def test_a_mark_on_the_map_leads_to_the_row_that_says_what_differs(page: Any) -> None:
    page.locator("svg a[aria-label^='with 1 other']").last.click()
    target = page.locator("tr:target")
    assert target.count() == 1
    assert "with 1 other" in target.inner_text()
    assert "9 instead of 3" in target.inner_text()


def test_the_map_is_reached_with_the_keyboard(page: Any) -> None:
    page.locator("svg a").first.focus()
    page.keyboard.press("Enter")
    assert page.locator("tr:target").count() == 1


@pytest.mark.parametrize("viewport", [DESK, PHONE], ids=["desk", "phone"])
def test_axe_finds_nothing_that_a_screen_reader_would_stumble_over(page: Any, viewport: dict[str, int]) -> None:
    page.set_viewport_size(viewport)
    found = axe.Axe().run(page)
    broken = [(rule["id"], node["html"]) for rule in found["violations"] for node in rule["nodes"]]
    assert broken == []


def test_nothing_is_wider_than_a_phone_but_what_scrolls_in_itself(page: Any) -> None:
    page.set_viewport_size(PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    widths = [box["width"] for box in (svg.bounding_box() for svg in page.locator("figure > svg, .strip").all())]
    assert len(widths) > 5
    assert max(widths) <= PHONE["width"]
    assert float(page.evaluate("parseFloat(getComputedStyle(document.body).fontSize)")) >= 16


def test_tables_keep_their_columns_names_on_a_phone_where_rows_are_stacked(page: Any) -> None:
    page.set_viewport_size(PHONE)
    cell = page.locator(".many tbody td").first
    assert cell.evaluate("cell => getComputedStyle(cell, '::before').content") == '"same bits ...: "'
    assert page.get_by_role("table", name="The guarantees of the contract").count() == 1


def test_a_value_of_a_table_with_one_column_of_values_has_no_label_on_a_phone(page: Any) -> None:
    page.set_viewport_size(PHONE)
    cell = page.locator("table:not(.many) tbody td").first
    assert cell.evaluate("cell => getComputedStyle(cell, '::before').content") == "none"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_the_colours_that_the_reader_prefers(page: Any, scheme: str) -> None:
    page.emulate_media(color_scheme=scheme)
    paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == {"light": "rgb(255, 255, 255)", "dark": "rgb(22, 24, 27)"}[scheme]
    found = axe.Axe().run(page, options={"runOnly": ["color-contrast"]})
    assert [node["html"] for rule in found["violations"] for node in rule["nodes"]] == []
    assert found["passes"]


def test_print_has_all_of_it_and_no_navigation(page: Any) -> None:
    page.emulate_media(media="print")
    assert not page.locator("nav").is_visible()
    for svg in page.locator("figure svg").all():
        assert svg.is_visible()
    assert page.pdf(format="A4").startswith(b"%PDF")

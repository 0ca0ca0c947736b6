"""A report as one page of HTML that needs nothing else: no network, no script, no file beside it."""

from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from ..outcome import Outcome
from .files import write

_MARKS = {Outcome.HOLDS: "✓", Outcome.BREAKS: "✗", Outcome.NOT_TESTED: "–"}


@dataclass(frozen=True)
class Cell:
    """What is in a table's cell.

    Attributes:
        text: several lines where it has line breaks.
        outcome: puts the outcome's mark and word before the text.
        anchor: the id by which the row is reached, unique in the page.
    """

    text: str
    outcome: Outcome | None = None
    anchor: str = ""

    @property
    def mark(self) -> str:
        """A sign for the outcome, which its word repeats."""
        return _MARKS[self.outcome] if self.outcome else ""


@dataclass(frozen=True)
class Table:
    """A table whose first cells are the headers of their rows."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A plot with what it shows in words."""

    caption: str
    svg: str

    @property
    def markup(self) -> Markup:
        """The plot, which the page takes as it is: it was drawn here."""
        return Markup(self.svg)


@dataclass(frozen=True)
class Section:
    """A part of the page, with the anchor under which it is found."""

    anchor: str
    heading: str
    parts: tuple[Table | Figure | str, ...]


@dataclass(frozen=True)
class Page:
    """The report.

    Attributes:
        title: of the page.
        about: one line: what was checked, where and when.
        outcome: of everything.
        summary: a sentence for each setting.
        partial: why the report is not whole; empty where it is.
        sections: its parts, in order.
    """

    title: str
    info: str
    outcome: Outcome
    summary: tuple[Cell, ...]
    partial: str
    sections: tuple[Section, ...]


def write_html(path: Path, page: Page) -> None:
    """Write the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__, "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    environment.tests["table"] = lambda part: isinstance(part, Table)
    environment.tests["figure"] = lambda part: isinstance(part, Figure)
    write(path, environment.get_template("report.html").render(page=page))

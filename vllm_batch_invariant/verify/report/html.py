"""A report as a single HTML page without scripts, which loads no other file and needs no network."""

from dataclasses import dataclass
from pathlib import Path

from markupsafe import Markup

from ..outcome import Outcome
from .files import write

_MARKS = {Outcome.HOLDS: "✓", Outcome.BREAKS: "✗", Outcome.NOT_TESTED: "–"}


@dataclass(frozen=True)
class Cell:
    """The cell of a table.

    Attributes:
        text: may have line breaks.
        outcome: its mark and word precede the text.
        anchor: id of the row, unique in the page.
    """

    text: str
    outcome: Outcome | None = None
    anchor: str = ""

    @property
    def mark(self) -> str:
        """A sign for the outcome, in addition to its word."""
        return _MARKS[self.outcome] if self.outcome else ""


@dataclass(frozen=True)
class Table:
    """A table whose first cells are the headers of their rows."""

    caption: str
    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Figure:
    """A plot, and a caption that says what it shows."""

    caption: str
    svg: str

    @property
    def markup(self) -> Markup:
        """The plot, which needs no escaping because it was drawn here."""
        return Markup(self.svg)


@dataclass(frozen=True)
class Section:
    """A section of the page, with its id."""

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
        partial: why the report is incomplete; empty if it is complete.
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

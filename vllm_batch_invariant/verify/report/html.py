"""A report as a single HTML page without scripts, which loads no other file and needs no network."""

from dataclasses import dataclass, replace
from pathlib import Path

from ..outcome import Outcome
from .chart import Chart
from .files import write
from .sample_map import SampleMap, letter

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

    def without_empty_columns(self) -> "Table":
        """The same table without columns in which nobody says anything."""
        kept = [
            place
            for place in range(len(self.header))
            if any(row[place].text or row[place].outcome for row in self.rows)
        ]
        rows = tuple(tuple(row[place] for place in kept) for row in self.rows)
        return replace(self, header=tuple(self.header[place] for place in kept), rows=rows)


@dataclass(frozen=True)
class Figure:
    """A drawing, and a caption that says what it shows."""

    caption: str
    chart: Chart


@dataclass(frozen=True)
class MapFigure:
    """A map of samples, and a caption that says what it shows.

    Attributes:
        description: for screen readers.
        anchors: ids of the table's rows to which the marks of a row lead, by its number.
    """

    caption: str
    found: SampleMap
    description: str
    anchors: dict[int, str]


Part = Table | Figure | MapFigure | str


@dataclass(frozen=True)
class Section:
    """A section of the page, with its id."""

    anchor: str
    heading: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Verdict:
    """The result of one setting, for somebody who reads nothing else.

    Attributes:
        label: whose result it is; empty if there is one.
        outcome: decides sign and colour.
        headline: the result in plain words.
        numbers: (number, what it counts), shown large.
        detail: a sentence for those who know the words of the contract.
    """

    label: str
    outcome: Outcome
    headline: str
    numbers: tuple[tuple[str, str], ...] = ()
    detail: str = ""

    @property
    def mark(self) -> str:
        """A sign for the outcome."""
        return _MARKS[self.outcome]


@dataclass(frozen=True)
class Page:
    """The report.

    Attributes:
        title: of the page.
        info: one line: what was run, where and when.
        verdicts: one for each setting.
        partial: why the report is incomplete; empty if it is complete.
        sections: its parts, in order.
    """

    title: str
    info: str
    verdicts: tuple[Verdict, ...]
    partial: str
    sections: tuple[Section, ...]


def write_html(path: Path, page: Page) -> None:
    """Write the page."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader(__package__, "templates"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True,
    )  # fmt: skip
    for name, kind in (("table", Table), ("figure", Figure), ("map", MapFigure)):
        environment.tests[name] = lambda part, kind=kind: isinstance(part, kind)
    environment.filters |= {"percent": lambda share: f"{100 * share:.4g}%", "letter": letter}
    write(path, environment.get_template("report.html").render(page=page))

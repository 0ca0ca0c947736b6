"""The report's plots."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .sample_map import SampleMap, letter
from .svg import svg

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from ..harness.metrics import Latency, Trace

_COLOURS = ("#cfe3f1", "#f6c48c", "#a9dcc7", "#f3e68f", "#e6bcd6", "#b9c9f2", "#f2b0a6")
"""Light enough for black letters, which say the same."""
_OTHERS = "#d4d4d4"
_LINES = (("#0072B2", "-"), ("#D55E00", "--"), ("#009E73", ":"))


def sample_map(found: SampleMap, name: str, description: str, anchors: Mapping[int, str]) -> str:
    """One row a sample: letters and colours say which completion it follows, marks where it parts from the first.

    Args:
        name: of the plot, unique in its page; the ids in it begin with it.
        description: what there is to see, for who does not.
        anchors: where the marks of a row lead, by its number.
    """

    def draw(figure: "Figure") -> None:
        from matplotlib.lines import Line2D
        from matplotlib.patches import Patch

        axes = figure.subplots()
        for place, row in enumerate(found.rows):
            for completion, start, length in row.runs:
                axes.broken_barh([(start, length)], (place - 0.42, 0.84), facecolors=_colour(completion), linewidth=0)
                # beside the mark where the stretch begins with one
                beside = 1.2 if start and length > 1 else 0.15
                axes.text(start + beside, place, letter(completion), va="center", fontsize=7)
            if row.logprob is None:
                continue
            end = len(row.follows) if row.token is None else row.token
            if end > row.logprob:
                span = [(row.logprob, end - row.logprob)]
                axes.broken_barh(span, (place - 0.42, 0.84), facecolors="none", edgecolor="#444444", hatch="////", lw=0)
            marks = [(row.logprob, "o", "white"), *([(row.token, "X", "black")] if row.token is not None else [])]
            for position, marker, colour in marks:
                mark = axes.scatter(
                    [position + 0.5], [place], marker=marker, s=34, color=colour, edgecolor="black", zorder=3
                )
                mark.set_urls([f"#{anchors[place]}"] if place in anchors else [None])
        if found.first_token is not None:
            axes.axvline(found.first_token, color="black", linestyle="--", linewidth=0.9)
        axes.set_yticks(range(len(found.rows)), [row.label for row in found.rows], fontsize=8)
        axes.set_ylim(len(found.rows) - 0.5, -0.5)
        axes.set_xlim(0, found.length)
        axes.set_xlabel("token of the completion")
        key = [
            Patch(facecolor=_colour(number), label=f"{letter(number)}: follows completion {letter(number)}")
            for number in range(min(found.completions, len(_COLOURS)))
        ]
        if found.completions > len(_COLOURS):
            key.append(Patch(facecolor=_OTHERS, label="other letters: other completions"))
        if found.different:
            key.append(Patch(facecolor="white", edgecolor="#444444", hatch="////", label="same tokens, other logprobs"))
            key.append(Line2D([], [], marker="o", color="none", markerfacecolor="white", markeredgecolor="black"))
            key[-1].set_label("first logprob to differ")
        if found.first_token is not None:
            key.append(Line2D([], [], marker="X", color="none", markerfacecolor="black", markeredgecolor="black"))
            key[-1].set_label("first token to differ")
            key.append(Line2D([], [], color="black", linestyle="--", linewidth=0.9, label="the earliest of those"))
        figure.legend(handles=key, loc="outside lower center", ncols=2, frameon=False)

    keys = min(found.completions, len(_COLOURS) + 1) + 4
    links = {
        f"#{anchor}": f"{found.rows[row].label}: differs from token {found.rows[row].logprob} on"
        for row, anchor in anchors.items()
    }
    height = 0.8 + 0.2 * len(found.rows) + 0.1 * keys
    return svg(draw, height, name, description, links)


def batches_over_time(traces: Sequence["Trace"], name: str, description: str) -> str:
    """Requests in the batch over time, one panel an engine."""

    def draw(figure: "Figure") -> None:
        for axes, trace in zip(figure.subplots(len(traces), squeeze=False).flat, traces, strict=True):
            axes.step(trace.seconds, trace.sizes, where="post", linewidth=0.9, color=_LINES[0][0])
            axes.set_title(trace.engine, fontsize=9, loc="left")
            axes.set_ylim(bottom=0)
            axes.set_ylabel("requests")
        axes.set_xlabel("seconds")

    return svg(draw, 0.4 + 1.5 * len(traces), name, description, {})


def latencies(measured: Mapping[str, "Latency"], name: str, description: str) -> str:
    """The share of tokens that came within a time of the one before, a line a setting."""

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        for (label, latency), (colour, line) in zip(measured.items(), _LINES, strict=False):
            milliseconds = [1e3 * seconds for seconds in latency.between_tokens]
            axes.ecdf(milliseconds, color=colour, linestyle=line, label=label)
        axes.set_xlim(left=0)
        axes.set_xlabel("milliseconds since the token before")
        axes.set_ylabel("share of tokens")
        axes.grid(alpha=0.3)
        figure.legend(loc="outside lower center", frameon=False)

    return svg(draw, 3.0, name, description, {})


def _colour(completion: int) -> str:
    return _COLOURS[completion] if completion < len(_COLOURS) else _OTHERS

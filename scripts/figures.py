"""Draws the figures of the documents from demonstrations, benchmark data, recordings and imports. Needs matplotlib.

usage: python -m scripts.figures [--out FOLDER]
"""

import argparse
import io
import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import torch

from benchmarks.plot import ratio_lines
from benchmarks.record import DATA, Measurement, geometric_means, read
from examples.grpo.runs import ENDS, RUNS, SMALL
from scripts.demos import blocks, splits
from scripts.import_graph import PACKAGE, between_rooms, imports
from scripts.see import animation, answers

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIGURES = Path(__file__).parents[1] / "docs" / "figures"
_BLUE, _ORANGE, _PALE = "#0072B2", "#D55E00", "#9ecae1"
SMALL_FILES = ("envs", "errors", "installing", "resume", "seeds", "serve", "compare", "kept_file", "sources", "version")
"""Modules that every package may import."""
_OF_RUNS = {
    "stock": {"color": _ORANGE},
    "stock-corrected": {"color": "#E69F00"},
    "ours": {"color": _PALE, "linewidth": 3.5},
    "ours-other-batch": {"color": _BLUE, "linestyle": "--"},
}
"""How lines are drawn: the last lies on the one before."""
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_WIDTH = 6.0
_STYLE = {
    "svg.fonttype": "none",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "hatch.linewidth": 0.6,
}
_FLOAT16, _FLOAT32 = torch.float16, torch.float32
_BOX = "#e8f1f8"
_DARK = f"""<style>@media (prefers-color-scheme: dark) {{
 [style*="fill: #ffffff"] {{ fill: #161a1f !important }} [style*="fill: {_BOX}"] {{ fill: #1d3345 !important }}
 [style*="stroke: #000000"] {{ stroke: #e4e7ea !important }} [style*="fill: #000000"] {{ fill: #e4e7ea !important }}
 [style*="stroke: #0072b2"] {{ stroke: #4aa3df !important }} [style*="fill: #0072b2"] {{ fill: #4aa3df !important }}
 text:not([style*="fill"]) {{ fill: #e4e7ea }}
}}</style>"""
"""What a reader with dark colours sees in place of white paper and black ink."""


def order() -> str:
    """What changes the bits of a sum and of a matmul: error of the sum by block, elements moved by tile and split-K."""
    found = {dtype: blocks.sums(dtype) for dtype in (_FLOAT16, _FLOAT32)}
    exact = {dtype: math.fsum(_summed(dtype).tolist()) for dtype in found}
    by_tile, by_splits = blocks.moved(_FLOAT32)
    bars = {f"tile {rows} x {columns}": moved for (rows, columns), moved in by_tile.items()}
    bars |= {f"split-K {count}": moved for count, moved in by_splits.items()}

    def draw(figure: "Figure") -> None:
        half, single, matmuls = figure.subplots(1, 3, width_ratios=(1, 1, 1.2))
        for place, (dtype, sums) in zip((half, single), found.items(), strict=True):
            place.plot(range(len(sums)), [value - exact[dtype] for value in sums.values()], "o", color=_ORANGE)
            place.axhline(0, color="black", linewidth=0.8)
            place.set_xticks(range(len(sums)), list(map(str, sums)), rotation=45)
            place.set_title(f"sum, {_name(dtype)}")
            place.set_xlabel("block")
        half.set_ylabel(f"error of a sum of {blocks.ELEMENTS} numbers")
        colours = [_ORANGE if moved else _BLUE for moved in bars.values()]
        drawn = matmuls.barh(list(bars), list(bars.values()), color=colours)
        matmuls.bar_label(drawn, padding=2)
        matmuls.set_xlim(0, 1.5 * blocks.SIDE**2)
        matmuls.set_xticks([0, blocks.SIDE**2])
        matmuls.invert_yaxis()
        matmuls.set_title("matmul, float32")
        matmuls.set_xlabel("elements that move")

    words = [
        f"Sums of {_name(dtype)}: " + ", ".join(f"block {block}: {value:.9g}" for block, value in sums.items())
        for dtype, sums in found.items()
    ]
    words.append("elements of a matmul with other bits: " + ", ".join(f"{bar}: {moved}" for bar, moved in bars.items()))
    return _page(draw, 2.9, "order", "; ".join(words))


def _summed(dtype: torch.dtype) -> torch.Tensor:
    """The numbers of ``blocks.sums``, exact in float64."""
    return blocks.numbers(blocks.ELEMENTS, seed=0, dtype=dtype, device="cpu").double()


def attention() -> str:
    """Where a query's keys are cut, by the number of keys there are, and how many elements of its result that moves."""
    results = splits.results()
    query = splits.POSITION + 1

    def draw(figure: "Figure") -> None:
        places = figure.subplots(1, len(results), sharey=True)
        for place, (way, sizes) in zip(places, splits.cuts().items(), strict=True):
            for row, (keys, size) in enumerate(sizes.items()):
                starts = range(0, query, size)
                spans = [(start, min(size, query - start)) for start in starts]
                colours = [(_BLUE, _PALE)[number % 2] for number in range(len(spans))]
                place.broken_barh(spans, (row - 0.35, 0.7), facecolors=colours, linewidth=0)
                moved = int((results[way][keys] != results[way][splits.KEYS[0]]).sum())
                place.text(query + 20, row, f"{moved} differ" if moved else "same bits", va="center")
            place.set_title(way)
            place.set_xlim(0, 1.45 * query)
            place.set_xticks(range(0, query, 250))
            place.set_xlabel(f"keys that the query at {splits.POSITION} sees")
        places[0].set_yticks(range(len(splits.KEYS)), list(map(str, splits.KEYS)))
        places[0].set_ylabel("keys there are")
        places[0].invert_yaxis()

    words = [
        f"{way}: "
        + ", ".join(f"{-(-query // size)} of {size} keys where there are {keys}" for keys, size in cut.items())
        for way, cut in splits.cuts().items()
    ]
    description = f"Splits that a query at position {splits.POSITION} sees. {'; '.join(words)}"
    return _page(draw, 2.5, "attention", description)


def time() -> str:
    """Time against what plain vLLM uses: matmuls by M, and attention of decode by the context."""
    matmuls = [found for found in read(DATA / "linear.csv") if found.provider in ("ours", "native")]
    decode = [found for found in read(DATA / "attention.csv") if found.keys["phase"] == "decode"]
    decode = [found for found in decode if found.metric == "time" and found.provider != "stock"]
    matmuls = [found for found in matmuls if found.metric == "time"]

    def draw(figure: "Figure") -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        _panel(left, matmuls, "M", f"matmuls, rows M\n(stock: torch.mm, {matmuls[0].gpu})")
        _panel(right, decode, "context", "attention of decode, keys\n(stock: FlashAttention 3)")
        left.set_ylabel("time / stock (below 1: faster)")

    words = [_means(matmuls, "M", "rows"), _means(decode, "context", "keys")]
    return _page(draw, 3.2, "time", f"Time against stock, geometric means. {'; '.join(words)}")


def _panel(place: "Axes", measurements: Sequence[Measurement], key: str, title: str) -> None:
    ratio_lines(place, measurements, key)
    place.set_title(title)
    place.legend(frameon=False)
    place.tick_params(axis="x", rotation=45)


def _means(measurements: Sequence[Measurement], key: str, unit: str) -> str:
    means = sorted(geometric_means(measurements, [key]).items(), key=lambda found: (found[0][0], int(found[0][1])))
    return ", ".join(f"{provider} at {number} {unit}: {mean:.2f}" for (provider, number), mean in means)


def training() -> str:
    """Reward, KL between rollout and trainer, and gradient norm of each step of the training runs."""
    rows = [row for row in read(DATA / "on_policy.csv") if row.keys["model"] == SMALL]
    newest = rows[0].gpu, rows[0].versions
    lines: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if (row.gpu, row.versions) == newest and row.provider in RUNS:
            lines[row.provider, row.metric].append(row.p50)
    panels = {"reward": "reward", "kl": "KL(rollout || trainer)", "gradient-norm": "gradient norm"}

    def draw(figure: "Figure") -> None:
        places = figure.subplots(1, len(panels))
        for place, (metric, title) in zip(places, panels.items(), strict=True):
            for name, style in _OF_RUNS.items():
                values = lines[name, metric]
                place.plot(range(1, len(values) + 1), values, label=name, **{"linewidth": 1.0} | style)
            place.set_title(title)
            place.set_xlabel("step")
        places[1].set_yscale("symlog", linthresh=1e-6)
        figure.legend(*places[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)

    words = [_trained(name, lines[name, "reward"], lines[name, "kl"]) for name in _OF_RUNS]
    return _page(draw, 2.9, "training", f"Training runs. {'; '.join(words)}")


def _trained(name: str, rewards: Sequence[float], gaps: Sequence[float]) -> str:
    """A training run in words."""
    first, last = fmean(rewards[:ENDS]), fmean(rewards[-ENDS:])
    return f"{name}: reward {first:.2f} to {last:.2f} in {len(rewards)} steps, KL {min(gaps):.2g} to {max(gaps):.2g}"


def packages() -> str:
    """Which package imports which: every arrow is an import that is there, and all point downwards."""
    below = packages_below()
    heights = {room: _height(room, below) for room in below}
    levels = [[room for room in below if heights[room] == height] for height in range(max(heights.values()) + 1)]
    at = {
        room: ((index + 0.5 + 0.18 * (height % 2)) / len(level), float(height))
        for height, level in enumerate(levels)
        for index, room in enumerate(level)
    }

    def draw(figure: "Figure") -> None:
        place = figure.subplots()
        place.set_axis_off()
        place.set_xlim(0, 1)
        place.set_ylim(-0.5, len(levels) - 0.5)
        for room, imported in below.items():
            for other in imported:
                style = {"arrowstyle": "->", "color": _BLUE, "shrinkA": 14, "shrinkB": 18, "linewidth": 0.8}
                place.annotate("", at[other], at[room], arrowprops=style)
        for room, (x, y) in at.items():
            box = {"boxstyle": "round,pad=0.4", "facecolor": _BOX, "edgecolor": _BLUE}
            place.text(x, y, room, ha="center", va="center", bbox=box)

    words = [f"{room} imports {', '.join(sorted(imported)) or 'none'}" for room, imported in sorted(below.items())]
    return _page(draw, 0.8 * len(levels), "packages", "; ".join(words))


def packages_below() -> dict[str, set[str]]:
    """The packages that each package imports, without the small files that everybody may import, and this one's own."""
    pairs = [pair for pair in between_rooms(imports()) if not {*pair} & {*SMALL_FILES, PACKAGE}]
    names = sorted({room for pair in pairs for room in pair})
    return {room: {below for above, below in pairs if above == room} for room in names}


def _height(room: str, below: dict[str, set[str]], above: tuple[str, ...] = ()) -> int:
    """The longest way down from a room.

    Raises:
        ValueError: the imports form a cycle.
    """
    if room in above:
        raise ValueError(f"packages import each other: {' -> '.join((*above, room))}")
    return max((1 + _height(other, below, (*above, room)) for other in below[room]), default=0)


def batch() -> str:
    """One dot product in batches of several sizes: the only figure that moves."""
    dot = animation.recorded()
    page = _page(animation.drawing(dot, _ORANGE, _BLUE), 2.6, "batch", animation.described(dot))
    return animation.moving(page, len(dot["stock"]))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _page(draw: Callable[["Figure"], None], height: float, name: str, description: str) -> str:
    """A picture on paper of its own, white or dark as the reader's colours are, in its own size."""

    def on_paper(figure: "Figure") -> None:
        from matplotlib.patches import Rectangle

        figure.add_artist(Rectangle((0, 0), 1, 1, transform=figure.transFigure, color="white", zorder=-1))
        draw(figure)

    picture = _svg(on_paper, height, name, description)
    width, tall = re.search(r'viewBox="0 0 (\S+) (\S+)"', picture).groups()
    picture = picture.replace("<svg ", f'<svg width="{width}pt" height="{tall}pt" ', 1)
    return picture.replace(">", f">\n{_DARK}", 1) + "\n"


def _svg(draw: Callable[["Figure"], None], height: float, name: str, description: str) -> str:
    """A figure of ``height`` inches without a date, with its own ids and a description for screen readers."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=(_WIDTH, height), layout="constrained")
        draw(figure)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    ET.register_namespace("", _SVG)
    ET.register_namespace("xlink", _XLINK)
    root = ET.fromstring(file.getvalue())
    for metadata in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(metadata)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-label", description)
    return ET.tostring(root, encoding="unicode")


DRAWINGS: dict[str, Callable[[], str]] = {
    "order": order,
    "attention": attention,
    "time": time,
    "training": training,
    "packages": packages,
    "batch": batch,
    "answers": answers.draw,
}
"""How each figure is drawn, by the name of its file."""


def main(arguments: list[str] | None = None) -> None:
    """Draw all figures and print their paths."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=FIGURES, help="where to write them (default: docs/figures)")
    folder = parser.parse_args(arguments).out
    folder.mkdir(parents=True, exist_ok=True)
    for name, draw in DRAWINGS.items():
        path = folder / f"{name}.svg"
        path.write_text(draw())
        print(path)


if __name__ == "__main__":
    main()

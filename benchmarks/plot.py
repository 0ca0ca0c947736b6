"""Plots of the benchmark data, saved beside it: `python -m benchmarks.plot [CSV ...]`. Needs matplotlib."""

import argparse
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from textwrap import wrap

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, NullLocator

from benchmarks.attention_cases import shape_name
from benchmarks.record import DATA, Measurement, geometric_means, read
from benchmarks.shapes import MODELS, WEIGHT_SHAPES

_STYLES = {
    "ours": {"color": "#0072B2", "marker": "o"},
    "ours-triton": {"color": "#009E73", "marker": "s"},
    "ours-flex": {"color": "#E69F00", "marker": "v"},
    "native": {"color": "#D55E00", "marker": "^"},
    "native-triton": {"color": "#D55E00", "marker": "^"},
    "fa3-one-split": {"color": "#56B4E9", "marker": "P"},
}
"""Colours of Okabe and Ito, which colour-blind readers tell apart."""
_OTHER_STYLE = {"color": "#CC79A7", "marker": "D"}
_PANELS_ABREAST = 3
_LEGEND_COLUMNS = 4
_HIGHEST_RATIO = 8
"""What is slower lies outside the picture."""


def _draw_linear(measurements: Sequence[Measurement]) -> Figure:
    """Time against stock by M: a panel for each whole model, and one for all shapes."""
    times = _times(measurements)
    panels: dict[str, list[Measurement]] = {}
    for model in MODELS:
        shapes = {
            (str(shape.out_features), str(shape.in_features))
            for shape in WEIGHT_SHAPES
            if any(origin.model == model.name and origin.workers == 1 for origin in shape.origins)
        }
        own = [measurement for measurement in times if (measurement.keys["N"], measurement.keys["K"]) in shapes]
        if own:
            panels[model.name] = own
    lines = -(-(len(panels) + 1) // _PANELS_ABREAST)
    figure = Figure(figsize=(4 * _PANELS_ABREAST, 3 * lines + 1), layout="constrained")
    axes = figure.subplots(lines, _PANELS_ABREAST, sharex=True, sharey=True, squeeze=False).flatten()
    for place, (name, own) in zip(axes, panels.items(), strict=False):
        ratio_lines(place, own, "M")
        place.set_title(name)
    last = axes[len(panels)]
    _ratio_band(last, times)
    ratio_lines(last, times, "M")
    last.set_title("all shapes, and their range")
    for place in axes[len(panels) + 1 :]:
        place.remove()
    figure.legend(*last.get_legend_handles_labels(), loc="outside lower center", ncols=_LEGEND_COLUMNS)
    figure.suptitle(f"Linear: time against torch.mm, geometric mean over weight shapes. {_setting(times)}")
    for place in axes[-_PANELS_ABREAST:]:
        place.set_xlabel("rows M")
    figure.supylabel("time / stock (below 1: faster)")
    return figure


def _draw_attention(measurements: Sequence[Measurement]) -> Figure:
    """Time against stock: a row for each shape, in it a panel for each batch of decodes and one for prefills."""
    times = _times(measurements)
    shapes = list(dict.fromkeys(shape_name(measurement.keys) for measurement in times))
    batches = sorted({int(found.keys["batch"]) for found in times if found.keys["phase"] == "decode"})
    panels = [*(("decode", batch, "context") for batch in batches), ("prefill", 1, "tokens")]
    figure = Figure(figsize=(3.2 * len(panels), 2.6 * len(shapes) + 1), layout="constrained")
    axes = figure.subplots(len(shapes), len(panels), sharex="col", sharey=True, squeeze=False)
    labels = {}
    for shape, line in zip(shapes, axes, strict=True):
        for (phase, batch, key), place in zip(panels, line, strict=True):
            own = [
                found
                for found in times
                if shape_name(found.keys) == shape and (found.keys["phase"], found.keys["batch"]) == (phase, str(batch))
            ]
            ratio_lines(place, own, key)
            place.xaxis.set_major_formatter(_kilo)
            place.set_title(f"{shape}, {phase}" + (f", batch {batch}" if phase == "decode" else ""), fontsize="medium")
            labels |= {label: handle for handle, label in zip(*place.get_legend_handles_labels(), strict=True)}
    for (_, _, key), place in zip(panels, axes[-1], strict=True):
        place.set_xlabel(key)
    axes[0, 0].set_ylim(top=min(axes[0, 0].get_ylim()[1], _HIGHEST_RATIO))
    figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=_LEGEND_COLUMNS)
    figure.suptitle(f"Attention: time against FlashAttention 3. {_setting(times)}")
    figure.supylabel("time / stock (below 1: faster)")
    return figure


def _draw_engine(measurements: Sequence[Measurement]) -> Figure:
    """Cost against stock: a panel for each GPU and set of versions, in it a bar for each provider and case; rates and
    accepted lengths are turned over, so that longer is always slower. Parts of a model, other models, several GPUs,
    trees, quantised weights and exact arithmetic are left out, and drafts for texts that rounding changes: they compare
    two texts.
    """
    others = {"layers", "model", "tp", "tree", "arithmetic", "format"}
    whole = (found for found in measurements if not others & found.keys.keys())
    whole = (found for found in whole if found.keys.get("spec") != "ngram-repeats")
    compared = [found for found in whole if found.provider != "stock" and found.ratio]
    panels: dict[tuple[str, str], list[Measurement]] = defaultdict(list)
    for found in compared:
        panels[found.versions, found.gpu].append(found)
    heights = [1 + len(own) / 4 for own in panels.values()]
    figure = Figure(figsize=(9, sum(heights) + 0.5), layout="constrained")
    axes = figure.subplots(len(panels), squeeze=False, height_ratios=heights)[:, 0]
    for place, ((versions, gpu), own) in zip(axes, panels.items(), strict=True):
        _draw_costs(place, own)
        place.set_title(", ".join([gpu, *(pair.replace("=", " ") for pair in versions.split())]), fontsize="small")
    axes[-1].set_xlabel("cost / stock (below 1: faster, or less)")
    figure.suptitle("\n".join(wrap(f"Engines. {_setting(compared)}", 80)))
    return figure


def _draw_costs(place: Axes, compared: Sequence[Measurement]) -> None:
    """Ratios to stock of one set of versions."""
    cases = list(dict.fromkeys((found.case, found.metric) for found in compared))
    providers = list(dict.fromkeys(found.provider for found in compared))
    height = 0.8 / max(len(providers), 1)
    for number, provider in enumerate(providers):
        bars = {}
        for found in compared:
            if found.provider == provider:
                more_is_better = found.unit.endswith("/s") or found.metric == "length"  # of what a verify step accepts
                slower = 1 / found.ratio if more_is_better else found.ratio
                bars[cases.index((found.case, found.metric)) + number * height] = slower
        drawn = place.barh(list(bars), list(bars.values()), height, label=provider, color=_style(provider)["color"])
        paper = {"facecolor": "white", "lw": 0, "pad": 0.5}
        place.bar_label(drawn, fmt="%.2f", padding=3, fontsize="small", bbox=paper)
    place.margins(x=0.08)
    place.axvline(1, color="black", linewidth=0.8)
    place.set_yticks(
        [place + height * (len(providers) - 1) / 2 for place in range(len(cases))],
        [f"{case.removeprefix('workload=')}{'' if metric in case else ', ' + metric}" for case, metric in cases],
    )
    place.invert_yaxis()
    place.legend()


def _draw_mean(measurements: Sequence[Measurement]) -> Figure:
    """Time against stock: a panel for each dtype, in it a bar for each shape and dimension."""
    times = _times(measurements)
    dtypes = list(dict.fromkeys(found.keys["dtype"] for found in times))
    lines = len({(found.keys["shape"], found.keys["dim"]) for found in times})
    figure = Figure(figsize=(3.2 * len(dtypes) + 1.5, 0.3 * lines + 1.5), layout="constrained")
    for dtype, place in zip(dtypes, figure.subplots(1, len(dtypes), sharey=True, squeeze=False)[0], strict=True):
        own = [found for found in times if found.keys["dtype"] == dtype]
        names = [f"{found.keys['shape']}, dim {found.keys['dim']}" for found in own]
        place.barh(names, [found.ratio for found in own], color=_style("ours")["color"])
        place.axvline(1, color="black", linewidth=0.8)
        place.set_title(dtype)
    figure.axes[0].invert_yaxis()
    figure.suptitle(f"Mean: time against torch.mean. {_setting(times)}")
    figure.supxlabel("time / stock (below 1: faster)")
    return figure


def _kilo(tokens: float, _: int) -> str:
    return f"{tokens / 1024:g}k" if tokens >= 1024 else f"{tokens:g}"


def _times(measurements: Iterable[Measurement]) -> list[Measurement]:
    """The times that are compared with stock."""
    return [
        measurement
        for measurement in measurements
        if measurement.metric == "time" and measurement.provider != "stock" and measurement.ratio is not None
    ]


def ratio_lines(place: Axes, measurements: Iterable[Measurement], key: str) -> None:
    """A line for each provider over a number of the case."""
    points: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for (provider, number), mean in geometric_means(measurements, [key]).items():
        points[provider].append((int(number), mean))
    place.axhline(1, color="black", linewidth=0.8)
    for provider, line in points.items():
        place.plot(*zip(*sorted(line), strict=True), label=provider, markersize=4, **_style(provider))
    place.set_xscale("log", base=2)
    place.set_yscale("log", base=2)
    place.yaxis.set_major_locator(AutoLocator())
    place.yaxis.set_minor_locator(NullLocator())
    for axis in (place.xaxis, place.yaxis):
        axis.set_major_formatter("{x:g}")
    place.grid(alpha=0.3)


def _ratio_band(place: Axes, measurements: Iterable[Measurement]) -> None:
    """For each provider the lowest to the highest ratio over M."""
    ratios: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for measurement in measurements:
        if measurement.ratio is not None:
            ratios[measurement.provider][int(measurement.keys["M"])].append(measurement.ratio)
    for provider, by_rows in ratios.items():
        rows = sorted(by_rows)
        place.fill_between(
            rows,
            [min(by_rows[m]) for m in rows],
            [max(by_rows[m]) for m in rows],
            color=_style(provider)["color"],
            alpha=0.15,
            linewidth=0,
        )


def _style(provider: str) -> dict[str, str]:
    return _STYLES.get(provider, _OTHER_STYLE)


def _setting(measurements: Sequence[Measurement]) -> str:
    days: dict[str, set[str]] = defaultdict(set)
    for measurement in measurements:
        days[measurement.gpu].add(measurement.date)
    return ", ".join(f"{gpu}, {' and '.join(sorted(own))}" for gpu, own in sorted(days.items()))


DRAWINGS: dict[str, Callable[[Sequence[Measurement]], Figure]] = {
    "linear": _draw_linear,
    "attention": _draw_attention,
    "engine": _draw_engine,
    "mean": _draw_mean,
}
"""How the data of a benchmark is drawn, by the benchmark's name."""


def draw(path: Path) -> Path:
    """Draw a CSV file and save the plot beside it; returns the plot's path.

    Raises:
        ValueError: an empty file, several benchmarks in one, or a benchmark without a drawing.
    """
    measurements = read(path)
    names = {measurement.benchmark for measurement in measurements}
    if len(names) != 1 or not names <= DRAWINGS.keys():
        raise ValueError(f"{path} has data of {sorted(names)}, and there are drawings of {sorted(DRAWINGS)}")
    figure = DRAWINGS[names.pop()](measurements)
    with mpl.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path.with_suffix(".svg"), metadata={"Date": None})
    return path.with_suffix(".svg")


def _drawn() -> list[Path]:
    """Files that have a drawing; ``fuzz.csv`` has rows of another kind, which `check --fuzz --csv` writes."""
    return sorted(path for path in DATA.glob("*.csv") if path.stem in DRAWINGS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw files; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plot", description="Draw benchmark data.")
    parser.add_argument("csv", nargs="*", type=Path, default=_drawn(), help="default: all data that is drawn")
    status = 0
    for path in parser.parse_args(arguments).csv:
        try:
            print(draw(path))
        except ValueError as error:
            print(error, file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())

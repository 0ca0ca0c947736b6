"""Data becomes a picture."""

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.record import Measurement, read, write

pytest.importorskip("matplotlib")


def test_linear_is_drawn_beside_its_data(csv_file: Path) -> None:
    from benchmarks import plot

    assert plot.main([str(csv_file)]) == 0
    assert csv_file.with_suffix(".svg").read_text().count("<svg") == 1


def test_every_whole_model_has_a_panel_and_all_shapes_have_one(csv_file: Path) -> None:
    from benchmarks import plot

    figure = plot.DRAWINGS["linear"](read(csv_file))
    titles = [place.get_title() for place in figure.axes]
    assert "Qwen3-8B" in titles
    assert "Qwen2.5-0.5B" in titles
    assert titles[-1].startswith("all shapes")
    lines = {line.get_label() for line in figure.axes[-1].lines}
    assert {"ours", "ours-triton", "native"} <= lines


def test_a_benchmark_without_a_drawing_is_named(
    tmp_path: Path, measurements: list[Measurement], capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import plot

    write(tmp_path / "other.csv", [replace(measurements[0], benchmark="other")])
    assert plot.main([str(tmp_path / "other.csv")]) == 1
    assert "'other'" in capsys.readouterr().err

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


def test_every_shape_has_a_panel_for_each_batch_of_decodes_and_one_for_prefills(
    tmp_path: Path, attention_measurements: list[Measurement]
) -> None:
    from benchmarks import plot

    path = tmp_path / "attention.csv"
    write(path, attention_measurements)
    assert plot.main([str(path)]) == 0
    figure = plot.DRAWINGS["attention"](read(path))
    titles = [place.get_title() for place in figure.axes]
    assert len(titles) == 3 * (4 + 1)
    assert titles[:5] == [*(f"qwen3-8b, decode, batch {batch}" for batch in (1, 8, 64, 256)), "qwen3-8b, prefill"]
    lines = {line.get_label(): line for line in figure.axes[4].lines}
    assert list(lines["ours-triton"].get_xdata()) == [512, 1024, 4096, 16384, 32768]


def test_a_benchmark_without_a_drawing_is_named(
    tmp_path: Path, measurements: list[Measurement], capsys: pytest.CaptureFixture[str]
) -> None:
    from benchmarks import plot

    write(tmp_path / "other.csv", [replace(measurements[0], benchmark="other")])
    assert plot.main([str(tmp_path / "other.csv")]) == 1
    assert "'other'" in capsys.readouterr().err

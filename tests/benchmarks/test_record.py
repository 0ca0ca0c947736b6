"""Rows survive the file; means are by provider and case."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from benchmarks.record import Measurement, case_text, geometric_means, read, update, versions, write


def test_the_columns_are_those_of_every_benchmark(csv_file: Path) -> None:
    columns = "benchmark,provider,case,metric,unit,p50,p20,p80,ratio,bits,gpu,versions,date"
    assert csv_file.read_text().splitlines()[0] == columns
    assert ",".join(field.name for field in fields(Measurement)) == columns


def test_what_is_written_is_read(measurements: list[Measurement], tmp_path: Path) -> None:
    rows = [replace(measurements[0], ratio=None), replace(measurements[1], gpu='one, "two"', bits="differ")]
    write(tmp_path / "new" / "linear.csv", rows)
    assert read(tmp_path / "new" / "linear.csv") == rows


def test_the_newest_run_replaces_the_file(csv_file: Path, measurements: list[Measurement]) -> None:
    write(csv_file, measurements[:3])
    assert read(csv_file) == measurements[:3]


def test_an_update_leaves_what_other_versions_measured(csv_file: Path, measurements: list[Measurement]) -> None:
    before = read(csv_file)
    newer = [replace(measurements[0], versions="vllm=9.9", p50=1.0), replace(measurements[1], p50=2.0)]
    update(csv_file, newer)
    assert read(csv_file) == newer + [row for row in before if row != measurements[1]]


def test_a_case_is_a_dictionary(measurements: list[Measurement]) -> None:
    assert replace(measurements[0], case=case_text(M=8, dtype="bf16")).keys == {"M": "8", "dtype": "bf16"}


def test_geometric_means(measurements: list[Measurement]) -> None:
    def row(provider: str, m: int, ratio: float | None, metric: str = "time") -> Measurement:
        return replace(measurements[0], provider=provider, case=case_text(M=m, N=64), ratio=ratio, metric=metric)

    rows = [row("ours", 1, 2.0), row("ours", 1, 8.0), row("ours", 2, 1.0), row("native", 1, 3.0)]
    rows += [row("native", 1, None), row("ours", 1, 100.0, metric="bandwidth")]
    assert geometric_means(rows, ["M"]) == pytest.approx({("ours", "1"): 4, ("ours", "2"): 1, ("native", "1"): 3})
    assert geometric_means(rows) == pytest.approx({("ours",): 16 ** (1 / 3), ("native",): 3})


def test_the_versions_name_pytorch_and_this_package() -> None:
    assert versions().startswith("torch=")
    assert "vllm-batch-invariant=" in versions()

"""The benchmark of sampling: bits decide its exit status, and every case is kept as soon as it is measured."""

from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("triton")

from benchmarks import record, sampling

TIMES = {"stock": 20.0, "ours": 10.0, "copy": 1.0}


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> dict[str, bool]:
    """Whether the bits of each operation are right; no GPU."""
    kept = {"top_p": True, "logprobs": True}
    ways = {way: lambda: None for way in TIMES}
    monkeypatch.setattr(sampling, "cases", lambda rows, scale: {name: (ways, right) for name, right in kept.items()})
    timings = {way: SimpleNamespace(samples=[time] * 5) for way, time in TIMES.items()}
    monkeypatch.setattr(sampling, "Timer", lambda: SimpleNamespace(time=lambda *_: timings))
    setting = record.Setting("a GPU", "torch=2.11.0", "2026-01-31")
    monkeypatch.setattr(sampling.Setting, "here", classmethod(lambda cls: setting))
    return kept


def test_every_case_has_a_row_for_each_way_with_its_ratio_to_stock(made_up, tmp_path: Path) -> None:
    out = tmp_path / "sampling.csv"
    assert sampling.main(["--rows", "1", "8", "--std", "3", "--out", str(out)]) == 0
    rows = record.read(out)
    assert len(rows) == 2 * 2 * len(TIMES)
    assert {(row.provider, row.ratio, row.bits) for row in rows} == {
        ("stock", 1.0, "-"), ("ours", 0.5, "equal"), ("copy", 0.05, "-")
    }  # fmt: skip
    assert {row.keys["rows"] for row in rows} == {"1", "8"}
    assert {row.keys["std"] for row in rows} == {"3"}


def test_wrong_bits_are_the_exit_status(made_up, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made_up["top_p"] = False
    out = tmp_path / "sampling.csv"
    assert sampling.main(["--rows", "1", "--std", "1", "--out", str(out)]) == 1
    assert {row.keys["operation"] for row in record.read(out) if row.bits == "differ"} == {"top_p"}
    assert "DIFFER" in capsys.readouterr().out

"""The benchmark of the mean on the CPU: what it makes of providers that keep their promise, break it, or fail."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from benchmarks import mean
from benchmarks.mean import PROVIDERS, Case, Provider, Sweep
from benchmarks.record import Setting, read
from benchmarks.timing import Timer

CASE = Case((40, 16, 3), 1, "fp32")
STOCK, OURS = PROVIDERS


def exact(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x.double().mean(dim).to(x.dtype)


def by_batch(x: torch.Tensor, dim: int) -> torch.Tensor:
    return exact(x, dim) + (1e-6 if len(x) in (3, 16) else 0)


def far_off(x: torch.Tensor, dim: int) -> torch.Tensor:
    return exact(x, dim) + 0.01


def refusing(x: torch.Tensor, dim: int) -> torch.Tensor:
    raise RuntimeError("no such block")


def sweep(*providers: Provider, case: Case = CASE) -> Sweep:
    setting = Setting("none", "torch=0", "2026-01-31")
    run = Sweep(Timer("cpu"), "cpu", cache=4096, providers=providers, setting=setting)
    run.measure(case)
    return run


@pytest.mark.parametrize(
    "case", [CASE, Case((5, 40), 0, "fp32"), Case((2, 5, 40), 2, "bf16"), Case((1, 300), 1, "fp16")], ids=str
)
def test_both_means_are_checked_and_timed(case: Case) -> None:
    run = sweep(STOCK, OURS, case=case)
    assert run.problems == 0
    assert [(row.provider, row.metric, row.unit) for row in run.measurements] == [
        ("stock", "time", "us"),
        ("stock", "bandwidth", "GB/s"),
        ("ours", "time", "us"),
        ("ours", "bandwidth", "GB/s"),
    ]
    time, bandwidth = run.measurements[2:]
    assert time.bits == "equal"
    assert time.keys == {"shape": "x".join(map(str, case.shape)), "dim": str(case.dim), "dtype": case.dtype}
    assert time.ratio == pytest.approx(time.p50 / run.measurements[0].p50)
    assert bandwidth.ratio == pytest.approx(1 / time.ratio)
    elements = torch.Size(case.shape).numel()
    assert bandwidth.p50 == pytest.approx(elements * (4 if case.dtype == "fp32" else 2) / 1e3 / time.p50)


def test_parts_of_the_batch_with_other_bits_are_loud_for_who_promises_them(capsys: pytest.CaptureFixture[str]) -> None:
    run = sweep(Provider("stock", by_batch, promises_bits=False), Provider("ours", by_batch, promises_bits=True))
    assert run.problems == 1
    assert {row.provider: row.bits for row in run.measurements} == {"stock": "differ", "ours": "differ"}
    expected = "BITS DIFFER: ours shape=40x16x3 dim=1 dtype=fp32: [3, 16] entries against 40"
    assert capsys.readouterr().err.strip() == expected


def test_values_that_are_far_from_float64_are_loud(capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep(STOCK, Provider("ours", far_off, promises_bits=True)).problems == 1
    assert "INACCURATE: ours shape=40x16x3 dim=1 dtype=fp32: 6 of 6 elements differ" in capsys.readouterr().err


@pytest.mark.parametrize("failing", ["stock", "ours"])
def test_a_provider_that_fails_loses_its_own_rows(failing: str, capsys: pytest.CaptureFixture[str]) -> None:
    providers = [Provider(name, refusing if name == failing else exact, name == "ours") for name in ("stock", "ours")]
    run = sweep(*providers)
    assert run.problems == 1
    assert failing not in {row.provider for row in run.measurements}
    assert len(run.measurements) == 2
    assert all((row.ratio is None) == (failing == "stock") for row in run.measurements)
    assert f"FAILED: {failing} shape=40x16x3 dim=1 dtype=fp32: RuntimeError: no such block" in capsys.readouterr().err


def test_the_clock_of_the_cpu_takes_every_input_in_turn() -> None:
    called: list[int] = []

    def call(number: int) -> Callable[[], None]:
        return lambda: called.append(number)

    timing = Timer("cpu").time({"stock": [call(0), call(1), call(2)]}, 1.0, 5)["stock"]
    assert called == [0, 1, 2, 0, 1, 2, 0, 1]
    assert len(timing.samples) == 5
    assert min(timing.samples) > 0
    assert not timing.in_graph


def test_the_first_case_is_the_published_one() -> None:
    assert mean.CASES[0] == Case((2048, 4096, 16), 1, "fp32")


def test_the_command_writes_rows_that_can_be_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mean, "CASES", (CASE, Case((40, 16, 3), 0, "bf16"), Case((5, 7), 1, "fp32")))
    out = tmp_path / "mean.csv"
    assert mean.main(["--device", "cpu", "--out", str(out), "--cases", "40x16x3"]) == 0
    rows = read(out)
    assert {(row.benchmark, row.provider, row.keys["dim"]) for row in rows} == {
        ("mean", provider, dim) for provider in ("stock", "ours") for dim in "01"
    }
    assert "ours in bf16: " in capsys.readouterr().out
    pytest.importorskip("matplotlib")
    from benchmarks import plot

    assert plot.main([str(out)]) == 0
    assert [place.get_title() for place in plot.DRAWINGS["mean"](rows).axes] == ["fp32", "bf16"]
    assert out.with_suffix(".svg").read_text().count("<svg") == 1


def test_a_case_that_there_is_not_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        mean.main(["--device", "cpu", "--cases", "dim=9"])
    assert "no case contains this" in capsys.readouterr().err

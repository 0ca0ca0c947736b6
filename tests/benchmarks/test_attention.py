"""What the attention benchmark makes of providers that keep their promise, break it, or fail."""

import io
from collections.abc import Callable

import pytest
import torch
from rich.console import Console

from benchmarks import attention, timing
from benchmarks.attention import Sweep
from benchmarks.attention_batch import Batch, batches_of
from benchmarks.attention_cases import CASES, Case
from benchmarks.attention_providers import NAMES, Provider, load
from benchmarks.attention_summary import print_summary
from benchmarks.record import Measurement, Setting
from benchmarks.roofline import Ceilings
from tests.benchmarks.attention_fakes import (
    DECODE,
    MIXED,
    PREFILL,
    SteadyTimer,
    exact,
    lazy,
    refusing,
    row_by_row,
    wrong,
)

STOCK = Provider("stock", row_by_row)


def sweep(*others: Provider, cases: tuple[Case, ...] = (DECODE, PREFILL), without_graph: str = "") -> Sweep:
    run = Sweep(
        providers=(STOCK, *others),
        timer=SteadyTimer(without_graph),
        ceilings=Ceilings(bytes_per_microsecond=1e6, operations_per_microsecond=1e9),
        setting=Setting("none", "torch=0", "2026-01-31"),
        cache=DECODE.cache_bytes,
        device="cpu",
    )
    for case in cases:
        run.measure(case)
    return run


def ours(attend: Callable[..., object], **options: object) -> Provider:
    return Provider("ours-triton", attend, promises_bits=True, **options)


def verdicts(run: Sweep, provider: str) -> dict[str, str]:
    rows = [row for row in run.measurements if row.provider == provider and row.metric == "time"]
    return {row.keys["phase"]: row.bits for row in rows}


def test_every_case_is_checked_and_timed() -> None:
    run = sweep(ours(row_by_row))
    assert run.problems == 0
    assert verdicts(run, "stock") == verdicts(run, "ours-triton") == {"decode": "equal", "prefill": "equal"}
    rows = [row for row in run.measurements if row.provider == "ours-triton"]
    decode, prefill = ({row.metric: row for row in part} for part in (rows[:4], rows[4:]))
    assert {name: row.p50 for name, row in decode.items() if name != "error"} == pytest.approx(
        {
            "time": 2.0,
            "bandwidth": DECODE.work.moved_bytes / 2 / 1e3,
            "roofline": DECODE.work.moved_bytes / 1e6 / 2,
        }
    )
    assert {name: row.ratio for name, row in decode.items()} == {
        "time": 2.0,
        "bandwidth": 0.5,
        "roofline": 0.5,
        "error": 1.0,
    }
    assert prefill["throughput"].p50 == pytest.approx(PREFILL.work.operations / 2 / 1e6)
    assert 0 < decode["error"].p50 < 4e-3


def test_each_call_has_a_cache_of_its_own() -> None:
    run = sweep()
    assert run.timer.calls[0] == 2 * run.cache // DECODE.cache_bytes + 1


def test_a_plan_is_made_once_for_all_calls_of_a_case() -> None:
    planned, used = [], []

    def plan(batch: Batch) -> dict[str, object]:
        planned.append(batch)
        return {"number": len(planned)}

    def attend(batch: Batch, out: torch.Tensor, number: int) -> None:
        used.append(number)
        exact(batch, out)

    batches = batches_of(DECODE, 16, 3, "cpu")
    for call in attention._calls(Provider("planning", attend, plan), batches, torch.empty_like(batches[0].query)):
        call()
    assert used == [1, 1, 1]


def test_a_call_that_no_graph_can_hold_is_marked() -> None:
    run = sweep(ours(row_by_row), without_graph="ours-triton", cases=(DECODE,))
    assert run.problems == 0
    cases = {row.provider: row.case for row in run.measurements}
    assert cases["ours-triton"] == f"{cases['stock']} graph=no"


def test_bits_that_follow_the_batch_are_loud_for_ours_only(capsys: pytest.CaptureFixture[str]) -> None:
    def by_batch(batch: Batch, out: torch.Tensor) -> None:
        row_by_row(batch, out)
        out.mul_(1 + (len(batch.requests) == 1) * 2**-7)

    control = Provider("fa3-one-split", by_batch)
    run = sweep(control, ours(by_batch), Provider("native-triton", by_batch, observed=False), cases=(DECODE,))
    assert run.problems == 1
    assert [verdicts(run, name)["decode"] for name in ("stock", "fa3-one-split", "ours-triton", "native-triton")] == [
        "equal", "differ", "differ", "-"
    ]  # fmt: skip
    assert "BITS DIFFER: ours-triton phase=decode batch=3" in capsys.readouterr().err


@pytest.mark.parametrize("attend", [wrong, lazy])
def test_a_result_far_from_float64_is_loud_for_ours_only(
    attend: Callable[..., object], capsys: pytest.CaptureFixture[str]
) -> None:
    run = sweep(Provider("native-triton", attend, observed=False), ours(attend), cases=(MIXED,))
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines if "INACCURATE" in line] == ["INACCURATE"]
    assert "ours-triton phase=mixed" in lines[0]
    assert {row.provider for row in run.measurements} == {"stock", "native-triton", "ours-triton"}


def test_a_failing_call_loses_one_case(capsys: pytest.CaptureFixture[str]) -> None:
    run = sweep(ours(refusing, covers=lambda requests: len(requests) != 1 or requests[0].tokens > 1))
    assert run.problems == 1
    assert list(verdicts(run, "ours-triton")) == ["prefill"]
    assert list(verdicts(run, "stock")) == ["decode", "prefill"]
    assert "FAILED: ours-triton phase=decode batch=3" in capsys.readouterr().err


def test_a_failing_plan_and_a_failing_check_lose_one_case() -> None:
    def plan(batch: Batch) -> dict[str, object]:
        raise RuntimeError("no plan")

    def only_alone(batch: Batch, out: torch.Tensor) -> None:
        if len(batch.requests) != 1:
            raise RuntimeError("no batches")
        exact(batch, out)

    assert sweep(ours(exact, plan=plan), cases=(DECODE,)).problems == 1
    run = sweep(ours(only_alone), cases=(PREFILL,))
    assert run.problems == 1
    assert verdicts(run, "ours-triton") == {}


def test_a_case_that_is_not_covered_is_left_out_quietly() -> None:
    run = sweep(ours(row_by_row, covers=lambda requests: len(requests) == 1))
    assert run.problems == 0
    assert list(verdicts(run, "ours-triton")) == ["prefill"]


def test_without_stock_there_is_nothing_to_compare_with() -> None:
    def failing(batch: Batch, out: torch.Tensor) -> None:
        raise RuntimeError("no FlashAttention")

    run = sweep(ours(row_by_row), cases=(DECODE,))
    run.providers = (Provider("stock", failing), ours(row_by_row))
    run.measurements.clear()
    run.measure(DECODE)
    assert run.problems == 1
    assert {row.ratio for row in run.measurements} == {None}


def test_a_timer_that_fails_loses_one_case(capsys: pytest.CaptureFixture[str]) -> None:
    run = sweep(cases=())
    run.timer.time = None
    run.measure(DECODE)
    assert run.measurements == []
    assert "FAILED: timing phase=decode" in capsys.readouterr().err


def test_a_call_in_which_the_host_waits_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def raising(text: str) -> Callable[[], object]:
        def call() -> None:
            raise RuntimeError(text)

        return call

    assert not timing.waits_for_the_gpu(lambda: None)
    assert timing.waits_for_the_gpu(raising("called a synchronizing CUDA operation"))
    with pytest.raises(RuntimeError, match="no such tile"):
        timing.waits_for_the_gpu(raising("no such tile"))
    assert modes == ["error", "default"] * 3


def test_ours_promise_bits() -> None:
    assert NAMES[0] == "stock"
    assert load("ours-triton").promises_bits
    assert load("ours-flex").promises_bits


def test_a_provider_that_takes_other_pages_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert "ours-flex" in [provider.name for provider in attention._load(["ours-flex"], 64)]
    assert "ours-flex" not in [provider.name for provider in attention._load(["ours-flex"], 16)]
    assert "multiple of 64 keys" in capsys.readouterr().err


def test_the_summary_counts_and_ranks(attention_measurements: list[Measurement]) -> None:
    console = Console(file=io.StringIO(), width=160)
    print_summary(attention_measurements, console)
    text = console.file.getvalue()
    [means] = [row for row in cells(text) if row[0] == "ours-triton" and row[-1] == str(len(CASES))]
    decodes = sum(case.phase == "decode" for case in CASES)
    assert means[1:] == ["1.250", "2.000", "2.000", str(decodes), "0", str(len(CASES)), str(len(CASES))]
    grid = {row[0]: row[1:] for row in cells(text) if row[0].startswith("qwen3-8b")}
    assert grid["qwen3-8b x 1"] == ["1.25"] * 4
    assert grid["qwen3-8b x 64"] == ["1.25"] * 3 + [""]
    assert grid["qwen3-8b"] == ["2.00"] * 9
    assert "8 x 1024" in text


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in table.splitlines() if line.startswith("│")]


def test_main_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert attention.main(["--cases", "decode"]) == 2
    assert "needs an NVIDIA GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        attention.main(["--cases", "nothing"])

"""The rows of the benchmark of collectives; the ranks themselves need GPUs."""

import pytest
from rich.console import Console

from benchmarks import collectives
from benchmarks.record import Setting

SETTING = Setting("NVIDIA H200", "vllm=0.33.0", "2026-01-31")


def test_ratios_are_to_vllms_group_and_bits_those_of_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"stock": [4.0, 5.0, 6.0], "ours": [3.0, 4.0, 4.0]}
    found = {
        ("all_reduce", 1): (True, times),
        ("all_reduce", 64): (False, times),
        ("all_reduce+norm", 1): (None, times),
        ("all_reduce+norm", 64): (None, times),
        ("linear+all_reduce+norm", 1): (True, times),
        ("linear+all_reduce+norm", 64): (False, times),
    }
    rows = collectives.measurements(found, 2, SETTING)
    of_case = {(row.keys["op"], row.keys["bytes"], row.provider): (row.ratio, row.bits) for row in rows}
    assert len(of_case) == len(rows) == 12
    for operation in collectives.OPERATIONS:
        for size, bits in (("8192", "equal"), ("524288", "differ")):
            assert of_case[operation, size, "stock"] == (1.0, "-")
            assert of_case[operation, size, "ours"] == (0.8, bits)
    collectives.print_summary(rows, Console(width=120))
    assert capsys.readouterr().out.count("0.800") == 6


@pytest.mark.parametrize("size", [8192, 1 << 20, 1 << 26])
def test_schedules_that_are_tried_have_room_for_the_message_and_blocks_for_their_ctas(size: int) -> None:
    pytest.importorskip("triton")
    tried = collectives.candidates(size)
    assert {one.largest for one in tried.values()} == {size}
    assert {one.two_shot for one in tried.values()} == ({True, False} if size < 1 << 26 else {True})
    assert all(one.ctas == 32 or 2 * one.ctas * one.block <= size for one in tried.values())
    assert len(set(tried.values())) == len(tried) >= 6


def test_a_sweep_prints_the_fastest_and_bits_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    times = {"stock": [4.0] * 3, "ours": [5.0] * 3, "slow": [9.0] * 3, "fast": [3.0] * 3}
    found = {("all_reduce", 1): (True, times), ("all_reduce", 2): (False, times)}
    collectives.print_sweep(found, 4, Console(width=160))
    printed = capsys.readouterr().out
    assert printed.count("3.0 fast; 9.0 slow") == 2
    assert printed.count("BITS DIFFER") == 1

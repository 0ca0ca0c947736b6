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

"""The benchmark of a CPU: what it keeps of a matmul, and what it says of bits that follow the rows."""

import pytest
import torch

from benchmarks import cpu as benchmark
from benchmarks.cpu import Sweep
from benchmarks.record import Setting

SETTING = Setting("none", "torch=0", "2026-01-31")


def test_both_matmuls_are_timed_and_checked() -> None:
    sweep = Sweep(setting=SETTING)
    sweep.matmul(40, 64, 8, "bf16")
    assert [(row.provider, row.metric, row.bits) for row in sweep.measurements] == [
        ("stock", "time", "-"),
        ("stock", "throughput", "-"),
        ("ours", "time", "equal"),
        ("ours", "throughput", "equal"),
    ]
    time = sweep.measurements[2]
    assert time.keys == {"M": "8", "N": "40", "K": "64", "dtype": "bf16"}
    assert time.ratio == pytest.approx(time.p50 / sweep.measurements[0].p50)


def test_bits_that_follow_the_number_of_rows_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    product = benchmark.cpu.prepared_linear

    def by_rows(x: torch.Tensor, *rest: object) -> torch.Tensor:
        return product(x, *rest) * (1 + (len(x) > 4))

    monkeypatch.setattr(benchmark.cpu, "prepared_linear", by_rows)
    sweep = Sweep(setting=SETTING)
    sweep.matmul(40, 64, 8, "fp32")
    assert [row.bits for row in sweep.measurements if row.provider == "ours"] == ["differ"] * 2


def test_attention_of_decode_is_timed_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "_CACHE_BYTES", 1 << 18)
    monkeypatch.setattr(benchmark, "_stock_attention", lambda call, out: lambda: out.zero_())
    sweep = Sweep(setting=SETTING)
    sweep.attention(4, 2, 64, 3, 140)
    assert [(row.provider, row.metric, row.bits) for row in sweep.measurements] == [
        ("stock", "time", "-"),
        ("ours", "time", "equal"),
    ]

    attend = benchmark.attend
    monkeypatch.setattr(benchmark, "attend", lambda call, **out: attend(call, **out) * len(call.query))
    sweep.attention(4, 2, 64, 3, 140)
    assert sweep.measurements[-1].bits == "differ"


def test_a_step_of_decoding_is_the_time_between_tokens() -> None:
    found = {case: measured for case, _, measured in benchmark._workloads(100)}
    times = [(0.5, 8), (0.6, 8), (0.7, 8), (0.8, 8), (0.91, 8)]
    assert found["workload=decode batch=8"](times) == pytest.approx([1.05e5])
    assert found["workload=prefill prompts=4 length=512"]([(0.25, 4)]) == [2.5e5]

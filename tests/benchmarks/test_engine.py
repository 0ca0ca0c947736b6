"""The engine benchmark's rows, summary and failures; engines themselves are made up here."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from benchmarks import engine, engine_worker, engine_workloads, plot, record
from benchmarks.engine_online import LOADS
from benchmarks.engine_workloads import WORKLOADS, TokenTime
from benchmarks.record import Setting
from vllm_batch_invariant.envs import UNTRIED
from vllm_batch_invariant.verify.harness import mode

SETTING = Setting("NVIDIA H200", "vllm=0.26.0", "2026-01-31")


def result(factor: float, same_bits: bool = True) -> dict:
    """What a worker writes: every sample is ``factor``, give or take."""
    samples = [[factor * part for part in (0.9, 1.0, 1.2)] for _ in WORKLOADS["small"]]
    online = {"ttft": [factor * number for number in range(1, 101)], "tpot": [factor] * 5}
    of_engine = {"startup": 10 * factor, "memory": 100, "same_bits": same_bits, "mode": mode.OURS}
    return of_engine | {"samples": samples, "online": online}


@pytest.mark.parametrize("stalls", [0, 1, 2])
def test_a_token_takes_no_less_because_a_run_of_one_token_stalled(stalls, monkeypatch) -> None:
    asked = []

    def seconds(llm: object, prompts: list, tokens: list[int], adapters: int) -> float:
        asked.append(tokens)
        return 1.0 + 0.25 * max(tokens) + 60.0 * (len(asked) - 1 == stalls)

    monkeypatch.setattr(engine_workloads, "_prompts", lambda *_: ["a", "b"])
    monkeypatch.setattr(engine_workloads, "_seconds", seconds)
    assert TokenTime(batch=2, context=64, tokens=128).sample(None) == 250.0
    assert asked == [[1, 1], [1, 1], [1, 1], [129, 129]]


def test_an_engine_without_the_plugin_is_not_taken_for_ours(worker, tmp_path, capfd, monkeypatch) -> None:
    worker.answers["ours"] = result(1.0) | {"mode": mode.THEIRS}
    command = ["MODEL", "--workloads", "small", "--offline", "--providers", "ours", "--out", str(tmp_path / "rows.csv")]
    assert engine.main(command) == 1
    assert record.read(tmp_path / "rows.csv") == []
    assert f"FAILED: ours: {mode.THEIRS}" in capfd.readouterr().err
    monkeypatch.setattr(mode, "entry_points", lambda group: ())
    assert engine.main(command) == 1
    assert f"FAILED: ours is not started: {mode.THEIRS}" in capfd.readouterr().err
    monkeypatch.setenv(mode.PLUGINS, "others")
    assert engine.measure_online(engine._parse(["MODEL"]), ["stock", "ours"]) == {"stock": None, "ours": None}
    assert f"FAILED: ours, online: {mode.THEIRS}" in capfd.readouterr().err


def test_every_case_has_a_name_of_its_own() -> None:
    for name, workloads in WORKLOADS.items():
        cases = [workload.case for workload in workloads] + [LOADS[name].case for _ in LOADS.keys() & {name}]
        assert len(set(cases)) == len(cases)


def test_ratios_are_to_stock_and_bits_are_those_that_were_seen() -> None:
    results = {"stock": result(1.0, same_bits=False), "ours": result(0.5), "native": result(3.0, same_bits=False)}
    rows = engine.measurements(results, "small", SETTING)
    assert {(row.provider, row.bits) for row in rows} == {
        ("stock", "differ"),
        ("ours", "equal"),
        ("native", "differ"),
    }
    for row in rows:
        expected = 1.0 if row.metric == "memory" else {"stock": 1.0, "ours": 0.5, "native": 3.0}[row.provider]
        assert row.ratio == pytest.approx(expected), row
    assert len(rows) == 3 * (len(WORKLOADS["small"]) + 2 + 4)
    [p99] = [row for row in rows if (row.provider, row.metric) == ("ours", "ttft-p99")]
    assert p99.p50 == pytest.approx(0.5 * 99, rel=0.01)


def test_without_stock_there_is_no_ratio() -> None:
    assert {row.ratio for row in engine.measurements({"ours": result(1.0)}, "small", SETTING)} == {None}


def test_the_summary_has_a_line_for_every_case_and_the_bits(capsys: pytest.CaptureFixture[str]) -> None:
    results = {"stock": result(1.0), "ours": result(0.5)}
    rows = engine.measurements(results, "small", SETTING)
    engine.print_summary(rows, Console(width=200))
    shown = capsys.readouterr().out
    assert all(workload.case in shown for workload in WORKLOADS["small"])
    assert "0.500" in shown
    assert "equal" in shown


def test_the_rows_can_be_drawn(tmp_path: Path) -> None:
    rows = engine.measurements({"stock": result(1.0), "ours": result(0.5)}, "small", SETTING)
    record.write(tmp_path / "engine.csv", rows + [replace(row, versions="vllm=9.9") for row in rows])
    drawn = plot.draw(tmp_path / "engine.csv").read_text()
    assert "ours" in drawn
    assert drawn.count("vllm 9.9") == 1, "a panel for each set of versions"


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch):
    """Runs no engine: writes this result, by provider, or has it fail."""
    answers, environments = {}, {}

    def run(command, env, stderr, timeout) -> int:
        deciding = {name for values in engine.PROVIDERS.values() for name in values}
        decided = {name: value for name, value in env.items() if name in deciding}
        provider = next(name for name, values in engine.PROVIDERS.items() if values == decided)
        environments[provider] = env
        if answers[provider] is None:
            stderr.write("something went wrong\n")
            return 1
        Path(command[-1]).write_text(json.dumps(answers[provider]))
        return 0

    monkeypatch.setattr(engine, "run_whole", run)
    return SimpleNamespace(answers=answers, environments=environments)


@pytest.mark.parametrize(("ends", "status"), [("wait", "none after 1 s"), ("exit 3", 3)])
def test_an_engine_that_hangs_or_fails_leaves_no_process(ends: str, status: int | str, tmp_path: Path) -> None:
    child = tmp_path / "child"
    command = ["sh", "-c", f"sleep 300 & echo $! > {child}; {ends}"]
    with (tmp_path / "log").open("w") as errors:
        assert engine.run_whole(command, dict(os.environ), errors, 1) == status
    state, deadline = Path("/proc", child.read_text().strip(), "stat"), time.monotonic() + 10
    while state.exists() and state.read_text().split()[2] != "Z":
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_engine_that_is_cut_short_has_what_it_measured(tmp_path, monkeypatch, capfd) -> None:
    def run(command, env, stderr, timeout) -> int | str:
        known = result({"0": 2.0, "1": 1.0}[env["VLLM_BATCH_INVARIANT"]])
        if env["VLLM_BATCH_INVARIANT"] == "1":
            known["samples"] = known["samples"][:2]
        engine_worker.keep(known, Path(command[-1]))
        return 0 if env["VLLM_BATCH_INVARIANT"] == "0" else f"none after {timeout} s"

    monkeypatch.setattr(engine, "run_whole", run)
    out = tmp_path / "engine.csv"
    command = ["MODEL", "--workloads", "small", "--offline", "--providers", "stock", "ours", "--out", str(out)]
    assert engine.main(command) == 1
    assert "FAILED: ours, exit status none after" in capfd.readouterr().err
    samples = [row for row in record.read(out) if row.case in {one.case for one in WORKLOADS["small"]}]
    assert [(row.provider, row.ratio) for row in samples].count(("ours", 0.5)) == 2
    assert [row.provider for row in samples].count("stock") == len(WORKLOADS["small"])


def test_a_benchmark_that_is_asked_to_end_keeps_what_it_measured(tmp_path, monkeypatch, capfd) -> None:
    def run(command, env, stderr, timeout) -> int:
        engine_worker.keep(result(1.0) | {"samples": result(1.0)["samples"][:1]}, Path(command[-1]))
        os.kill(os.getpid(), signal.SIGTERM)
        return 0

    monkeypatch.setattr(engine, "run_whole", run)
    monkeypatch.setattr(engine, "measure_online", lambda *_: pytest.fail("servers were started"))
    out, handler = tmp_path / "engine.csv", signal.getsignal(signal.SIGTERM)
    assert engine.main(["MODEL", "--workloads", "small", "--out", str(out)]) == 1
    assert signal.getsignal(signal.SIGTERM) is handler
    assert "FAILED: stock, exit status interrupted" in capfd.readouterr().err
    assert {row.provider for row in record.read(out)} == {"stock"}
    assert len([row for row in record.read(out) if row.case in {one.case for one in WORKLOADS["small"]}]) == 1


@pytest.mark.parametrize(
    ("ours", "status"), [(result(1.0), 0), (result(1.0, same_bits=False), 1), (None, 1)], ids=["well", "bits", "failed"]
)
def test_the_exit_status_says_whether_ours_held(ours, status, worker, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT_LINEAR", "triton")
    monkeypatch.setenv(UNTRIED.name, "1")
    worker.answers |= {"stock": result(2.0, same_bits=False), "ours": ours, "native": result(4.0)}
    out = tmp_path / "engine.csv"
    assert engine.main(["MODEL", "--workloads", "small", "--offline", "--out", str(out)]) == status
    assert {row.provider for row in record.read(out)} == {"stock", "native"} | ({"ours"} if ours else set())
    assert ("something went wrong" in capfd.readouterr().err) is (ours is None)
    assert worker.environments["stock"]["VLLM_BATCH_INVARIANT"] == "0"
    assert worker.environments["native"]["VLLM_PLUGINS"] == ""
    assert all("VLLM_BATCH_INVARIANT_LINEAR" not in env for env in worker.environments.values()), "left of the caller"
    assert worker.environments["ours"][UNTRIED.name] == "1", "so that what no GPU has run can be timed"


def test_engines_that_share_the_gpu_start_one_by_one_and_then_take_turns(monkeypatch, capfd) -> None:
    seen: list[str] = []

    def run(provider: str, plan: dict, timeout: float) -> dict | None:
        name = plan["engine"]["model"]
        if name == "fails":
            return None
        seen.append(f"{name} starts")
        time.sleep(0.1)
        seen.append(f"{name} has started")
        turn = engine_worker.Turns(plan["turn"])
        for number in range(2 if name == "one" else 3):
            with turn:
                seen.append(f"{name} begins {number}")
                time.sleep(0.1)
                seen.append(f"{name} ends {number}")
        return plan["engine"]

    monkeypatch.setattr(engine, "_measure", run)
    plans = [("stock", {"engine": {"model": name}}) for name in ("one", "fails", "another")]
    found = list(engine.measure_in_turns(plans, timeout=10))
    share = {"gpu_memory_utilization": 0.9 / 3}
    assert found == [{"model": "one"} | share, None, {"model": "another"} | share]
    turns = [("one", 0), ("another", 0), ("one", 1), ("another", 1), ("another", 2)]
    assert seen[:4] == [f"{name} {what}" for name in ("one", "another") for what in ("starts", "has started")]
    assert seen[4:] == [f"{name} {what} {number}" for name, number in turns for what in ("begins", "ends")]
    assert capfd.readouterr().out.split() == ["stock,", "stock,", "stock"]


def test_an_engine_that_is_alone_waits_for_nobody() -> None:
    for _ in range(2):
        with engine_worker.Turns(None) as turn:
            assert turn is None


def test_exact_arithmetic_is_a_case_of_ours_with_ratios_to_plain_vllm_and_to_the_usual_one(
    worker, tmp_path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT_ARITHMETIC", "exact")  # of the caller, whom the others do not follow
    monkeypatch.setenv("COLUMNS", "200")
    worker.answers |= {"stock": result(2.0), "ours": result(3.0), "exact": result(6.0)}
    out, providers = tmp_path / "engine.csv", ("stock", "ours", "exact")
    command = ["MODEL", "--workloads", "small", "--offline", "--out", str(out), "--providers", *providers]
    assert engine.main(command) == 0
    rows = [row for row in record.read(out) if row.metric == "tpot"]
    found = {(row.provider, row.keys.get("arithmetic", "usual")): row.ratio for row in rows}
    assert found == {("stock", "usual"): 1, ("ours", "usual"): 1.5, ("ours", "exact"): 3}
    assert "3.000, 2.000 of the usual arithmetic's" in capsys.readouterr().out
    environments = {name: env.get("VLLM_BATCH_INVARIANT_ARITHMETIC") for name, env in worker.environments.items()}
    assert environments == {"stock": None, "ours": None, "exact": "exact"}
    worker.answers["exact"] = result(6.0, same_bits=False)
    assert engine.main(command) == 1


def test_a_tree_is_a_case_of_ours(worker, tmp_path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    worker.answers |= {"ours": result(3.0), "tree": result(4.5)}
    out = tmp_path / "engine.csv"
    command = ["MODEL", "--workloads", "small", "--offline", "--out", str(out), "--providers", "ours", "tree"]
    assert engine.main([*command, "--tensor-parallel-size", "2", "--keys", "model=8b"]) == 0
    rows = [row for row in record.read(out) if row.metric == "tpot"]
    assert {(row.keys["model"], row.keys["tp"]) for row in rows} == {("8b", "2")}
    assert {(row.provider, row.keys.get("tree", "none")): row.p50 for row in rows}.keys() == {
        ("ours", "none"),
        ("ours", "2"),
    }
    assert "1.500 of that without a tree" in capsys.readouterr().out
    assert worker.environments["tree"]["VLLM_BATCH_INVARIANT_TP_TREE"] == "2"


def test_other_forms_of_ours_are_measured_where_they_are_asked_for() -> None:
    assert not {"exact", "tree"} & set(engine._parse(["MODEL"]).providers)


def test_of_engines_that_share_the_gpu_neither_start_up_nor_memory_is_written(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(engine, "measure_in_turns", lambda plans, timeout: (result(1.0) for _ in plans))
    out = tmp_path / "engine.csv"
    command = ["MODEL", "--workloads", "small", "--offline", "--out", str(out), "--providers", "stock", "ours"]
    assert engine.main([*command, "--together", "2"]) == 0
    rows = record.read(out)
    assert {row.provider for row in rows} == {"stock", "ours"}
    assert not {"startup", "memory"} & {row.metric for row in rows}

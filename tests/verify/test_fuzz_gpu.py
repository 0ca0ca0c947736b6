"""The script that fuzzes many engines at a time: what it chooses, how it ends, and what it leaves. No engine has a
model.
"""

import csv
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import fuzz_gpu
from tests.verify.fake_fuzz import FakeFuzzedEngine
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.fuzz import command as fuzz_command
from vllm_batch_invariant.verify.fuzz.command import Fuzzer, FuzzPlan
from vllm_batch_invariant.verify.fuzz.schedule import Settings
from vllm_batch_invariant.verify.harness.worker import EngineFailed

SHAPE = '{"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96}'
ENOUGH = ("--settings", "3", "--schedules", "6", "--least-schedules", "18", "--least-preemptions", "18")


class Machine:
    """Fake engines, by the mode in which they run."""

    def __init__(self) -> None:
        self.wrong: dict[str, tuple[str, ...]] = {"0": ("rank",), "1": ()}
        self.on: list[tuple[Settings, Mapping[str, str] | None]] = []
        self.hangs = False

    @contextmanager
    def started(
        self, model: str, serve_args: Any, mode: str, settings: Settings, running: set[Any], environment: Any
    ) -> Iterator[Any]:
        self.on.append((settings, environment))
        if self.hangs:
            hanging = Hanging()
            running.add(hanging)
            hanging.wait()
        yield FakeFuzzedEngine(self.wrong[mode], settings.arguments(model))


class Hanging:
    """An engine that does not come up."""

    killed = False

    def kill(self) -> None:
        self.killed = True

    def wait(self) -> None:
        while not self.killed:
            time.sleep(0.01)
        raise EngineFailed("it was killed")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    made = Machine()
    monkeypatch.setattr(fuzz_command, "started", made.started)
    return made


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(SHAPE)
    return folder


def run(out: Path, model: Path, *arguments: str) -> int:
    return fuzz_gpu.main([str(out), str(model), *ENOUGH, "--seconds", "60", *arguments])


def test_every_engine_leaves_a_row_and_the_control_differs(machine: Machine, model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(out, model) == 0
    rows = list(csv.DictReader((out / "rows.csv").open()))
    assert sorted(row["mode"] for row in rows) == ["0", "1", "1", "1"]
    assert {row["schedules"] for row in rows} == {"6"}
    log = (out / "log.txt").read_text()
    assert "the mode: 3 settings, 18 schedules, " in log
    assert "0 differences" in log
    assert "of 6 schedules differ" in log


@pytest.mark.parametrize(
    ("wrong", "arguments", "status", "said"),
    [
        ({"1": ("rank",)}, (), 1, "differ"),
        ({"0": ()}, (), 1, "equal bits of the others prove nothing"),
        ({"0": ()}, ("--control", "0"), 0, "0 differences"),
        ({}, ("--least-schedules", "19"), 2, "too little: 18 schedules of at least 19"),
        ({"1": ("breaks",)}, (), 1, "it broke"),
    ],
)
def test_what_differs_and_what_is_too_little_is_said(
    machine: Machine, model: Path, tmp_path: Path, wrong: dict[str, tuple[str, ...]], arguments: Any, status: int,
    said: str,
) -> None:  # fmt: skip
    machine.wrong |= wrong
    assert run(tmp_path / "out", model, *arguments) == status
    assert said in (tmp_path / "out" / "log.txt").read_text()


def test_engines_that_hang_are_ended_and_leave_rows(
    machine: Machine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz_gpu, "GRACE", 0.3)
    machine.hangs = True
    began = time.monotonic()
    assert run(tmp_path / "out", model, "--seconds", "0.5", "--control", "0", "--jobs", "2") == 2
    assert time.monotonic() - began < 15
    log = (tmp_path / "out" / "log.txt").read_text()
    assert "the time is over" in log
    assert "was not begun" in log
    assert len(list(csv.DictReader((tmp_path / "out" / "rows.csv").open()))) == 2


def test_engines_that_gpus_share_have_a_lane_of_their_own(
    machine: Machine, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, found in (("device_count", 2), ("is_available", True)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    monkeypatch.setattr(fuzz_command.os, "cpu_count", lambda: 32)
    # an engine of one request runs nothing together, which is no difference
    assert run(tmp_path / "out", model, "--settings", "14", "--least-schedules", "84", "--least-preemptions", "0") == 0
    several = [environment for settings, environment in machine.on if settings.workers * settings.stages > 1]
    assert 2 <= len(several) < 14
    assert {environment["CUDA_VISIBLE_DEVICES"] for environment in several} == {"0,1"}
    single = [environment for settings, environment in machine.on if settings.workers * settings.stages == 1]
    assert {environment["CUDA_VISIBLE_DEVICES"] for environment in single} == {"0", "1"}


def test_fourteen_chosen_engines_have_every_feature(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    for name, found in (("device_count", 2), ("is_available", True)):
        monkeypatch.setattr(torch.cuda, name, lambda found=found: found)
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    monkeypatch.setattr(fuzz_command.os, "cpu_count", lambda: 32)
    (model / "tokenizer.json").write_text("{}")
    fuzzer = Fuzzer(FuzzPlan(str(model), (), "1", 0, 60, folder=model))
    settings = [fuzzer.settings(number) for number in fuzz_gpu.chosen(fuzzer, 7)]
    assert len({one.label for one in settings}) == 7
    assert {one.workers for one in settings} == {1, 2}
    assert {one.tree for one in settings} == {1, 2}
    assert {one.drafts > 0 for one in settings} == {one.small_cache for one in settings} == {False, True}
    assert {name for one in settings for name in one.options} >= {"sleep", "updates", "reasoning", "embeds", "policy"}

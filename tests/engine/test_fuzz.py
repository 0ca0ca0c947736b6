"""The fuzzer, with fixed seeds: nothing differs in real engines of drawn settings, and an injected fault is found."""

import csv
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.adapters import EXPERT_FAULTS
from tests.engine.adapters import FAULTS as ADAPTER_FAULTS
from tests.engine.engines import ROOT, some_exhaustive, untried_on_gpu
from tests.faults.fuzz import FAULTS
from vllm_batch_invariant.cli import main
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.fuzz.command import started
from vllm_batch_invariant.verify.fuzz.finding import CONCURRENT, Finding, Row
from vllm_batch_invariant.verify.fuzz.schedule import EVENTS, Item, Schedule, Settings, draw_schedule, draw_targets
from vllm_batch_invariant.verify.fuzz.shrink import shrink
from vllm_batch_invariant.verify.fuzz.trial import Trial
from vllm_batch_invariant.verify.harness.requests import BUDGET
from vllm_batch_invariant.verify.harness.worker import EngineFailed
from vllm_batch_invariant.verify.outcome import Status

pytestmark = pytest.mark.engine

ON_GPU = torch.cuda.is_available()
CONTEXT = 1024
OPTIONS = {"reasoning": "marker", "embeds": "on", "policy": "priority", "updates": "on"}
OPTIONS |= {"sleep": "on" if ON_GPU else "cache"}
SETTINGS = Settings(16, 300, 32, True, False, True, True, "0" if ON_GPU else "", CONTEXT, options=OPTIONS)
"""Small steps, small pages and a KV cache that preempts; on a GPU the runner in whose sampler a fault is injected."""
NUMBERS = (6, 4, 1, 2, 3, 9, 8, 0, 5, 7)
"""Of the schedules that are drawn, short ones first, and among the first half those that find each fault."""
FEW = 6
"""Those for which make test has time: they have every event."""
OF_COMMAND = 3
"""Schedules of the command, which has them in an engine of settings that it draws."""
TRIES = 8
INJECT = "tests.faults.fuzz:inject"


@pytest.fixture(scope="module", autouse=True)
def environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=":")
        patch.setenv("VLLM_NO_USAGE_STATS", "1")
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv(FLAG, "1")
        yield


@pytest.fixture(scope="module")
def quantised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that the drawn engine has: FP8 in blocks, which no GPU has run; the one of fixed settings has bf16."""
    sizes = {"hidden": 256, "intermediate": 256, "layers": 2, "heads": 2, "head_size": 128, "max_length": 4096}
    form = "w4a16-g32" if ON_GPU else "w8a8-fp8-block"
    return make_checkpoint(tmp_path_factory.mktemp("quantised"), Shape(**sizes), form=form)


@pytest.fixture(scope="module")
def command(quantised: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[int, list[dict[str, str]]]:
    """The command's exit status and the rows of its table."""
    folder = tmp_path_factory.mktemp("fuzz")
    # the schedules end it, and not the minutes, on a busy machine too
    arguments = ["--fuzz", "30", "--seed", "10", "--settings", "1", "--schedules", str(OF_COMMAND)]
    status = main(["check", str(quantised), *arguments, "--csv", str(folder / "rows.csv"), "--found", str(folder)])
    with (folder / "rows.csv").open() as file:
        return status, list(csv.DictReader(file))


def test_a_fuzzed_engine_of_drawn_settings_keeps_every_bit(command: tuple[int, list[dict[str, str]]]) -> None:
    status, [row] = command
    assert status == Status.REPRODUCIBLE, row
    assert int(row["schedules"]) == OF_COMMAND
    assert int(row["concurrent"]) > OF_COMMAND // 2


class Fuzzed:
    """One engine and what a fuzzer finds in it by so many schedules, without a fault and with each."""

    def __init__(self, engine: Any, folder: Path, model: Path, schedules: int) -> None:
        self.engine, self.folder, self.model, self.schedules = engine, folder, model, schedules
        self.clean = self.trial()
        self.faults: dict[str, tuple[int, int, Finding]] = {}
        targets = enumerate(draw_targets(0, 24, self.clean.accepts, CONTEXT))
        self.targets = {number: target for number, target in targets if self.clean.take(target) is not None}
        self.found = [self.clean.fuzz(self.schedule(number)) for number in range(schedules)]

    def trial(self) -> Trial:
        return Trial(self.engine, Row("checkpoint", "1", SETTINGS.label, 0))

    def schedule(self, number: int) -> Any:
        return draw_schedule(f"fixed {NUMBERS[number]}", SETTINGS, self.targets, self.clean.accepts, 12)

    def with_fault(self, fault: str) -> tuple[int, int, Finding]:
        """After how many schedules an injected fault was found, its requests, and what is left of the schedule."""
        if fault in self.faults:
            return self.faults[fault]
        self.engine.call(INJECT, fault)
        trial = self.trial()
        try:
            for number in range(self.schedules):
                schedule = self.schedule(number)
                name, where = trial.fuzz(schedule)
                if name:
                    # so many runs and not so many seconds: a busy machine makes it no larger
                    small = shrink(
                        schedule, name, lambda one, name=name: bool(trial.look(one, name)[0]), TRIES, count().__next__
                    )
                    where, expected, got = trial.look(small, name)
                    finding = Finding(CONCURRENT, where, "", str(self.model), (), "1", SETTINGS, small, name)
                    self.faults[fault] = number + 1, len(schedule.items), replace(finding, expected=expected, got=got)
                    return self.faults[fault]
        finally:
            self.engine.call(INJECT, "")
        raise AssertionError(f"{fault} was not found in {self.schedules} schedules")


@pytest.fixture(scope="module")
def fuzzed(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Iterator[Fuzzed]:
    schedules = len(NUMBERS) if pytestconfig.option.exhaustive or ON_GPU else FEW
    with started(str(checkpoint), (), "1", SETTINGS) as engine:
        yield Fuzzed(engine, tmp_path_factory.mktemp("found"), checkpoint, schedules)


def test_an_engine_with_small_steps_and_a_small_cache_keeps_every_bit(fuzzed: Fuzzed) -> None:
    assert fuzzed.found == [("", "")] * fuzzed.schedules
    assert not fuzzed.clean.refused
    assert not fuzzed.clean.left_out
    row = fuzzed.clean.row
    counted = ("chunked_steps", "preemptions", "prefix_hits", "aborts", *EVENTS)
    provoked = {name: getattr(row, name) for name in counted}
    assert all(provoked.values()), provoked
    sent = [item for number in range(fuzzed.schedules) for item in fuzzed.schedule(number).items]
    assert any(item.embeds for item in sent if item.target)
    assert any(item.priority for item in sent if item.target)
    assert any(BUDGET in item.params for item in sent if item.target)
    assert row.concurrent == fuzzed.schedules


@pytest.mark.parametrize("fault", some_exhaustive(FAULTS, ("sampler",)))
def test_an_injected_fault_is_found_and_made_small(fuzzed: Fuzzed, fault: str) -> None:
    after, requests, finding = fuzzed.with_fault(fault)
    assert after <= fuzzed.schedules // 2
    assert finding.text
    assert len(finding.schedule.items) < requests, finding.describe()


@pytest.mark.exhaustive
def test_a_finding_of_a_fault_that_was_taken_out_does_not_show_again(fuzzed: Fuzzed) -> None:
    *_, finding = fuzzed.with_fault("sampler")
    finding.write(fuzzed.folder / "finding.json")
    read = Finding.read(fuzzed.folder / "finding.json")
    assert read == finding
    assert fuzzed.trial().look(read.schedule, read.target)[0] == ""
    fuzzed.engine.call(INJECT, "sampler")
    try:
        assert fuzzed.trial().look(read.schedule, read.target)[0] == finding.text
    finally:
        fuzzed.engine.call(INJECT, "")


@pytest.mark.exhaustive
@untried_on_gpu
@pytest.mark.parametrize(("experts", "plant"), [(0, "plant"), (4, "plant_in_experts")])
def test_adapters_are_drawn_and_one_that_follows_from_a_rows_place_is_found(
    checkpoint: Path, tmp_path: Path, experts: int, plant: str
) -> None:
    settings = replace(SETTINGS, options={"adapters": "on", "policy": "priority"})
    shape = Shape(layers=2, intermediate=512, experts=experts, top_k=2, max_length=4096)
    model = make_checkpoint(tmp_path, shape) if experts else checkpoint
    faults = EXPERT_FAULTS if experts else ADAPTER_FAULTS
    with started(str(model), (), "1", settings) as engine:
        found = {}
        for fault in ("", *faults):
            engine.call(f"tests.engine.adapters:{plant}", fault)
            trial = Trial(engine, Row("checkpoint", "1", settings.label, 0))
            drawn = enumerate(draw_targets(0, 8, trial.accepts, CONTEXT))
            targets = {number: target for number, target in drawn if trial.take(target) is not None}
            schedules = [
                draw_schedule(f"adapters {number}", settings, targets, trial.accepts, 12) for number in range(4)
            ]
            found[fault] = [trial.fuzz(schedule)[0] for schedule in schedules]
            assert not trial.refused
        engine.call(f"tests.engine.adapters:{plant}", "")
    used = {item.adapter for schedule in schedules for item in schedule.items}
    assert used == {0, 1, 2, 3}
    assert found.pop("") == [""] * 4
    assert all(map(any, found.values())), found


def test_a_request_that_the_core_refuses_is_not_waited_for_and_one_that_is_has_a_name(fuzzed: Fuzzed) -> None:
    params = {"temperature": 0.0, "max_tokens": 2, "ignore_eos": True}
    answered = Item("answered", 0, (20, 21), params, target=True)
    refused = replace(answered, name="refused", params=params | {"max_tokens": 1, "n": 2, "temperature": 0.5})
    endless = replace(answered, name="endless", params=params | {"max_tokens": 100})
    fuzzed.engine.call(INJECT, "refusal")
    try:
        for items in ((refused,), (answered, refused)):
            result = fuzzed.trial().run(Schedule(items))
            assert result["refused"] == {"refused": "what compiles its grammar is not installed"}
            assert {*result["answers"]} == {item.name for item in items} - {"refused"}
        with pytest.raises(EngineFailed, match=r"not answered within 8 engine steps: endless \("):
            fuzzed.trial().run(Schedule((answered, endless)))
    finally:
        fuzzed.engine.call(INJECT, "")

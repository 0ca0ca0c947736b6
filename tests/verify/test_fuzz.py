"""What the fuzzer makes of an engine: differences found, made small, written, run again. Its engines have no model."""

import csv
import html
import json
import os
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fp8_checkpoints import FORMS
from tests.int8_checkpoints import configuration, group
from tests.quantised_checkpoints import FORMATS
from tests.verify.fake_fuzz import FakeFuzzedEngine
from vllm_batch_invariant.cli import main
from vllm_batch_invariant.envs import ARITHMETIC, FLAG
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.serve import serve_command
from vllm_batch_invariant.verify.bisect.command import _case_of
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.fuzz import command as fuzz_command
from vllm_batch_invariant.verify.fuzz.command import (
    Fuzzer,
    FuzzPlan,
    flags_of,
    place_of,
    replay,
)
from vllm_batch_invariant.verify.fuzz.compare import difference
from vllm_batch_invariant.verify.fuzz.finding import CONCURRENT, Finding, Row
from vllm_batch_invariant.verify.fuzz.options import Place
from vllm_batch_invariant.verify.fuzz.schedule import (
    EVENTS,
    Item,
    Reset,
    Schedule,
    Sleep,
    Update,
    draw_schedule,
    draw_settings,
    draw_targets,
)
from vllm_batch_invariant.verify.fuzz.shrink import shrink
from vllm_batch_invariant.verify.fuzz.trial import Trial
from vllm_batch_invariant.verify.harness.engine import context_of
from vllm_batch_invariant.verify.harness.worker import EngineFailed
from vllm_batch_invariant.verify.outcome import NoTestError, Status

SETTINGS = replace(
    draw_settings(0, 1, 1024, Place("cpu")),
    prefix_cache=True,
    options={"embeds": "on", "policy": "priority", "sleep": "cache", "updates": "on"},
)
FOREVER = float("inf")
GREEDY = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True, "logprobs": 5}


def trial(*wrong: str) -> Trial:
    return Trial(FakeFuzzedEngine(wrong), Row("m", "1", "s", 0))


def drawn(count: int, of: Trial) -> list[Schedule]:
    targets = dict(enumerate(draw_targets(0, 40, of.accepts, 1024)))
    return [draw_schedule(str(number), SETTINGS, targets, of.accepts) for number in range(count)]


def test_an_engine_that_keeps_its_bits_has_no_difference() -> None:
    engine = trial()
    assert [engine.fuzz(schedule) for schedule in drawn(20, engine)] == [("", "")] * 20
    assert (engine.row.schedules, engine.row.differences, engine.row.steps) == (20, 0, 140)
    assert engine.row.compared > 20
    assert all(getattr(engine.row, kind) > 0 for kind in EVENTS)
    assert 0 < engine.row.concurrent <= 20
    assert engine.row.aborts > 0


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("listed", "order of listed ids at token"),
        ("rank", "ranks at token"),
        ("text", "text"),
        ("finish", "finish reason"),
        ("prompt", "prompt logprobs: values at the prompt's token"),
        ("sleep", "logprobs: values"),
        ("update", "logprobs: values"),
        ("embeds", "logprobs: values"),
        ("priority", "logprobs: values"),
    ],
)
def test_whatever_differs_with_concurrent_requests_is_found_and_named(wrong: str, said: str) -> None:
    engine = trial(wrong)
    found = [engine.fuzz(schedule) for schedule in drawn(20, engine)]
    assert any(said in where for _, where in found), found
    assert engine.row.differences == sum(bool(where) for _, where in found)


def completion(**changed: Any) -> dict[str, Any]:
    entry = [[5, (-0.5).hex(), 1], [7, (-1.0).hex(), 2]]
    one = {"text": "ab", "tokens": [5], "logprobs": [entry], "finish_reason": "length", "stop_reason": None} | changed
    return {"completions": [one], "prompt_logprobs": []}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": [6]}, "token 0: 6 instead of 5"),
        ({"tokens": [5, 6]}, "token 1: 6 instead of nothing"),
        ({"logprobs": [[[5, (-0.25).hex(), 1], [7, (-1.0).hex(), 2]]]}, "values at token 0, place 0"),
        ({"logprobs": [[[5, (-0.5).hex(), 1], [8, (-1.0).hex(), 2]]]}, "listed ids at token 0, place 1"),
        ({"logprobs": [[[7, (-1.0).hex(), 2], [5, (-0.5).hex(), 1]]]}, "order of listed ids at token 0"),
        ({"logprobs": [[[5, (-0.5).hex(), 1], [7, (-1.0).hex(), 3]]]}, "ranks at token 0, place 1"),
        ({"logprobs": []}, "0 positions instead of 1"),
        (
            {"logprobs": [[[5, (-0.5).hex(), 1], [7, (-1.0).hex(), 2], [4096, "sha256:" + "ab" * 32, 0]]]},
            "4096 candidates",
        ),
        ({"finish_reason": "stop"}, "finish reason: 'stop' instead of 'length'"),
        ({"stop_reason": "x"}, "stop reason: 'x' instead of None"),
        ({"text": "abc"}, "text: 'abc' instead of 'ab'"),
    ],
)
def test_a_difference_says_what_differs_and_where(changed: dict[str, Any], said: str) -> None:
    assert difference(completion(), completion()) == ""
    assert said in difference(completion(), completion(**changed))


def test_another_number_of_samples_and_prompt_logprobs_are_differences() -> None:
    two = {"completions": completion()["completions"] * 2, "prompt_logprobs": []}
    assert difference(two, completion()) == "1 completions instead of 2"
    assert difference(two, two) == ""
    asked = completion() | {"prompt_logprobs": [None, [[3, (-1.0).hex(), 1]]]}
    other = completion() | {"prompt_logprobs": [None, [[3, (-1.5).hex(), 1]]]}
    assert "prompt logprobs: values at the prompt's token 1" in difference(asked, other)


def item(name: str, at: int = 3, length: int = 9, **params: Any) -> Item:
    return Item(name, at, tuple(range(20, 20 + length)), GREEDY | params, target=name.startswith("t"))


def test_a_schedule_is_made_small() -> None:
    others = [item(f"n{number}", at=number, logprobs=20, seed=3, temperature=1.0, n=2) for number in range(12)]
    whole = Schedule((item("t0", length=33, max_tokens=24), item("t1"), *others), (Reset(2, True), Reset(4, False)))

    def differs(schedule: Schedule) -> bool:
        by_name = {one.name: one for one in schedule.items}
        return "n7" in by_name and by_name["n7"].params.get("logprobs") == 20 and len(by_name["t0"].prompt) >= 5

    small = shrink(whole, "t0", differs, FOREVER)
    assert [one.name for one in small.items] == ["t0", "n7"]
    assert small.resets == ()
    target, other = small.items
    assert (len(target.prompt), target.params["max_tokens"], target.at, target.target) == (5, 1, 0, True)
    assert (len(other.prompt), other.at) == (1, 0)
    assert dict(other.params) == {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "logprobs": 20}


def test_two_requests_that_are_needed_both_stay() -> None:
    whole = Schedule((item("t0"), *(item(f"n{number}") for number in range(9))))
    needed = {"n2", "n8"}
    small = shrink(whole, "t0", lambda schedule: needed <= {one.name for one in schedule.items}, FOREVER)
    assert {one.name for one in small.items} == needed | {"t0"}


def test_a_reset_that_is_needed_stays_and_a_sample_never_loses_its_seed_alone() -> None:
    whole = Schedule((item("t0", temperature=1.0, seed=7), item("n0")), (Reset(2, True), Reset(4, False)))
    tried: list[Schedule] = []

    def differs(schedule: Schedule) -> bool:
        tried.append(schedule)
        return any(reset.at == 4 for reset in schedule.resets)

    assert shrink(whole, "t0", differs, FOREVER).resets == (Reset(4, False),)
    for schedule in tried:
        target = next(one for one in schedule.items if one.name == "t0")
        assert target.params["temperature"] == 0 or "seed" in target.params


@pytest.mark.parametrize("needed", [Sleep(3, 2), Update(5, "paused"), Reset(2, True)])
def test_an_event_that_is_needed_stays_alone(needed: Any) -> None:
    events = {
        "resets": (Reset(2, True), Reset(9, False)),
        "sleeps": (Sleep(1, 1), Sleep(3, 2)),
        "updates": (Update(0, "others before"), Update(5, "paused")),
    }
    small = shrink(
        Schedule((item("t0"), item("n0")), **events), "t0", lambda schedule: needed in schedule.events, FOREVER
    )
    assert small.events == [needed]
    assert str(needed) in finding(*small.items, schedule=small).describe()


def test_how_a_request_is_sent_is_made_plain_where_that_is_not_needed() -> None:
    sent = [replace(item(name), embeds=True, priority=5) for name in ("t0", "n0")]
    small = shrink(Schedule(tuple(sent)), "t0", lambda schedule: schedule.items[0].embeds, FOREVER)
    assert [(one.embeds, one.priority) for one in small.items] == [(True, 0)]


def test_making_small_ends_in_time_with_what_it_has() -> None:
    clock = iter(range(10**6))
    whole = Schedule((item("t0"), *(item(f"n{number}") for number in range(50))))
    small = shrink(whole, "t0", lambda _: True, until=3, now=lambda: next(clock))
    assert 1 <= len(small.items) <= 51
    assert next(clock) < 100


_WRONG: list[str] = []
"""What every engine that starts does wrong."""


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[FakeFuzzedEngine]:
    """Every engine that is started, none of which has a model."""
    made: list[FakeFuzzedEngine] = []
    _WRONG.clear()

    @contextmanager
    def started(model: str, serve_args: Any, mode: str, settings: Any, *more: Any) -> Iterator[Any]:
        if "no-start" in _WRONG:
            raise EngineFailed("the engine did not start: no such model")
        made.append(FakeFuzzedEngine(tuple(_WRONG), [*settings.arguments(model), *serve_args]))
        yield made[-1]

    monkeypatch.setattr(fuzz_command, "started", started)
    monkeypatch.setattr(fuzz_command, "bisect_first", lambda fuzzer: "")
    return made


def go_wrong(*wrong: str) -> None:
    _WRONG[:] = wrong


def run(tmp_path: Path, *arguments: str) -> int:
    model = tmp_path / "model"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text('{"max_position_embeddings": 700}')
    return main(["check", str(model), "--fuzz", "1", "--found", str(tmp_path), *arguments])


def test_a_run_without_a_difference_is_status_0_and_has_a_row_an_engine(engines, tmp_path: Path, capsys) -> None:
    table = tmp_path / "rows.csv"
    arguments = ("--settings", "3", "--schedules", "4", "--csv", str(table), "--seed", "5")
    assert run(tmp_path, *arguments) == Status.REPRODUCIBLE
    assert run(tmp_path, *arguments, "--jobs", "2") == Status.REPRODUCIBLE
    rows = list(csv.DictReader(table.open()))
    assert len(rows) == len(engines) == 6
    assert {row["schedules"] for row in rows} == {"4"}
    assert {row["differences"] for row in rows} == {"0"}
    assert sorted(row["settings"] for row in rows[:3]) == sorted(row["settings"] for row in rows[3:])
    assert "seed 5: 12 schedules in 3 engines: no difference" in capsys.readouterr().out
    assert all("--max-model-len 700" in " ".join(engine.arguments) for engine in engines)


def test_settings_are_printed_as_a_command_that_serves_them(engines, tmp_path: Path, capsys) -> None:
    assert run(tmp_path, "--settings", "2", "--schedules", "1", "--serve-args=--dtype 'float32'") == Status.REPRODUCIBLE
    said = capsys.readouterr().out
    told = [line.strip() for line in said.splitlines() if line.strip().startswith("engine: ")]
    assert len(told) == len(engines) == 2
    for line, engine in zip(told, engines, strict=True):
        words = shlex.split(line.removeprefix("engine: "))
        start = next(place for place, word in enumerate(words) if "=" not in word)
        command = serve_command(str(tmp_path / "model"))
        assert words[start : start + len(command)] == command
        assert words[start + len(command) :] == list(engine.arguments)
        assert words[0] == f"{FLAG}=1"
    assert "seed 0: 2 schedules in 2 engines: no difference" in said
    assert "1 schedule, 1 of them" in said
    assert run(tmp_path, "--settings", "1", "--schedules", "1") == Status.REPRODUCIBLE
    assert "seed 0: 1 schedule in 1 engine: no difference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "status", "headline"),
    [
        ((), Status.REPRODUCIBLE, "Reproducible. Every answer has the bits of the request alone."),
        (("listed",), Status.DIVERGED, "Not reproducible. An answer differs, or an engine broke."),
    ],
)
def test_a_run_and_a_replay_have_a_page(
    engines, tmp_path: Path, wrong: tuple[str, ...], status: Status, headline: str
) -> None:
    go_wrong(*wrong)
    page = tmp_path / "page.html"
    assert run(tmp_path, "--settings", "2", "--schedules", "8", "--html", str(page)) == status
    text = html.unescape(page.read_text())
    assert headline in text
    assert "engines of random settings" in text
    assert all(" ".join(engine.arguments[:4]) in text for engine in engines)
    for path in tmp_path.glob("fuzz-model-*-company.json"):
        assert f"--replay {path}" in text
        assert main(["check", "--replay", str(path), "--html", str(page)]) == Status.DIVERGED
        assert "It happens again." in page.read_text()
    assert bool(wrong) == any(tmp_path.glob("fuzz-model-*-company.json"))


def test_variables_of_an_engine_are_part_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    monkeypatch.setattr(fuzz_command, "_on_gpu", lambda: False)
    settings = replace(SETTINGS, runner="0", tree=2, exact=True)
    line = flags_of("a model", ("--seed", "1"), "0", settings)
    start = line.index(shlex.join(serve_command("a model")))
    given = dict(word.split("=", 1) for word in shlex.split(line[:start]))
    assert given == {FLAG: "0", "VLLM_CPU_KVCACHE_SPACE": "4", **settings.environment}, "vLLM would take all memory"
    assert len(settings.environment) == 4
    assert shlex.split(line)[-2:] == ["--seed", "1"]


def test_rows_are_not_appended_to_a_table_of_other_columns(engines, tmp_path: Path, capsys) -> None:
    table = tmp_path / "rows.csv"
    table.write_text("model,mode\n")
    assert run(tmp_path, "--settings", "1", "--schedules", "1", "--csv", str(table)) == Status.NO_TEST
    assert "has other columns" in capsys.readouterr().err
    assert table.read_text() == "model,mode\n"


def test_a_difference_is_status_1_and_a_file_that_runs_again(engines, tmp_path: Path, capsys) -> None:
    go_wrong("listed")
    assert run(tmp_path, "--settings", "1", "--schedules", "8") == Status.DIVERGED
    [path] = tmp_path.glob("fuzz-model-0-0-company.json")
    said = capsys.readouterr().out
    assert "order of listed ids" in said
    assert f"check --replay {path}" in said
    assert "\\x20" not in said
    finding = Finding.read(path)
    assert len(finding.schedule.items) == 2
    assert any(one.params.get("logprobs") == 20 for one in finding.schedule.items)
    assert main(["check", "--replay", str(path)]) == Status.DIVERGED
    assert "differs again" in capsys.readouterr().out
    go_wrong()
    assert main(["check", "--replay", str(path)]) == Status.REPRODUCIBLE
    assert "equal in every bit" in capsys.readouterr().out


def test_a_request_that_differs_between_engines_is_found(engines, tmp_path: Path, capsys) -> None:
    go_wrong("settings")
    assert run(tmp_path, "--settings", "5", "--schedules", "1") == Status.DIVERGED
    paths = list(tmp_path.glob("fuzz-model-0-*-settings.json"))
    assert paths
    finding = Finding.read(paths[0])
    assert {finding.settings.requests, finding.other_settings.requests} > {1}
    assert "the request alone differs between two engines" in capsys.readouterr().out
    assert replay(finding)[0] == Status.DIVERGED
    go_wrong()
    assert replay(finding)[0] == Status.REPRODUCIBLE


def test_an_engine_that_breaks_is_a_finding(engines, tmp_path: Path) -> None:
    go_wrong("breaks")
    assert run(tmp_path, "--settings", "1", "--schedules", "3") == Status.DIVERGED
    [path] = tmp_path.glob("fuzz-model-0-0-broke.json")
    assert replay(Finding.read(path))[0] == Status.DIVERGED
    go_wrong()
    assert replay(Finding.read(path))[0] == Status.REPRODUCIBLE


@pytest.mark.parametrize(("wrong", "said"), [("alone", "no test"), ("no-start", "no such model")])
def test_a_run_that_tested_nothing_is_status_2(engines, tmp_path: Path, capsys, wrong: str, said: str) -> None:
    go_wrong(wrong)
    assert run(tmp_path, "--settings", "2", "--schedules", "3") == Status.NO_TEST
    assert said in capsys.readouterr().out


def test_what_the_engine_refuses_is_left_out_and_said(engines, tmp_path: Path, capsys) -> None:
    go_wrong("refuses")
    arguments = ("--settings", "1", "--schedules", "6", "--without", "json")
    assert run(tmp_path, *arguments) == Status.REPRODUCIBLE
    said = capsys.readouterr().out
    assert "logit_bias: no logit_bias here" in said
    assert "json: left out by --without" in said


def test_time_ends_a_run(engines, tmp_path: Path) -> None:
    plan = FuzzPlan(str(tmp_path), (), "1", 0, 0.0, folder=tmp_path)
    fuzzer = Fuzzer(plan)
    began = time.monotonic()
    fuzzer.run()
    assert time.monotonic() - began < 20
    assert [row.schedules for row in fuzzer.rows] == [1]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--fuzz", "1"), "--fuzz needs a model"),
        (("x/y", "--fuzz", "0"), "not a number above 0"),
        (("x/y", "--seed", "3"), "--seed: only with --fuzz"),
        (("x/y", "--fuzz", "1", "--thorough"), "goes without --quick or --thorough"),
        (("x/y", "--fuzz", "1", "--serve-args=--block-size 16"), "--block-size is drawn by --fuzz"),
        (("x/y", "--fuzz", "1", "--found", "no/such"), "no such folder"),
        (("x/y", "--fuzz", "1", "--csv", "no/such/file"), "no such folder"),
        (("x/y", "--fuzz", "1", "--without", "made_up"), "invalid choice"),
        (("--replay", "tests/assertions.py", "--jobs", "2"), "--replay goes without --jobs"),
    ],
)
def test_a_bad_argument_is_one_line_and_status_2(capsys, arguments: tuple[str, ...], line: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(["check", *arguments])
    assert end.value.code == 2
    [said] = capsys.readouterr().err.splitlines()
    assert line in said


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', "\x00"])
def test_a_file_that_is_no_finding_is_status_2(tmp_path: Path, capsys, text: str) -> None:
    path = tmp_path / "finding.json"
    path.write_text(text)
    assert main(["check", "--replay", str(path)]) == Status.NO_TEST
    assert f"{path} is no finding of a fuzzer" in capsys.readouterr().err


def finding(*items: Item, **changed: Any) -> Finding:
    made = Finding(CONCURRENT, "x", "then", "m", ("--seed", "3"), "1", SETTINGS, Schedule(items), "t0")
    return replace(made, **changed)


def test_a_finding_survives_its_file(tmp_path: Path) -> None:
    events = {"resets": (Reset(2, True),), "sleeps": (Sleep(3, 2),), "updates": (Update(0, "others before"),)}
    whole = Schedule((item("t0"), replace(item("n0"), embeds=True, priority=5)), **events)
    one = finding(schedule=whole, other_settings=SETTINGS, got={"a": [1]})
    one.write(tmp_path / "f.json")
    assert Finding.read(tmp_path / "f.json") == one
    assert json.loads((tmp_path / "f.json").read_text())["format"]


def test_a_bisection_gets_the_requests_of_a_finding() -> None:
    one = finding(item("n0", at=0), item("t0", at=0, max_tokens=9), item("n1", at=0))
    assert one.for_bisect
    case = _case_of(None, one, 5)
    assert (case.place, case.max_tokens, len(case.concurrent)) == (1, 9, 2)
    assert case.prompt == one.schedule.items[1].prompt
    assert "--case f.json" in " ".join(one.bisect_arguments(Path("f.json")))
    assert "--enable-prefix-caching" not in " ".join(one.bisect_arguments(Path("f.json")))
    picture = {"kind": "image", "size": [28, 28], "seed": 1, "at": 0}
    seeing = finding(item("n0", at=0), replace(item("t0", at=0), images=(picture,)), item("n1", at=0))
    assert seeing.for_bisect
    case = _case_of(None, seeing, 5)
    assert (case.items, case.others_items) == ((picture,), ((), ()))
    assert not finding(item("n0", at=0), item("t0", at=2)).for_bisect
    assert not finding(item("n0", at=0, seed=1, temperature=1.0), item("t0", at=0)).for_bisect
    assert not finding(replace(item("n0", at=0), embeds=True), item("t0", at=0)).for_bisect
    assert not replace(one, schedule=replace(one.schedule, sleeps=(Sleep(1, 1),))).for_bisect
    with pytest.raises(NoTestError, match="no target"):
        _case_of(None, finding(item("n0")), 5)


def test_the_context_is_the_models_or_the_one_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 700}')
    assert context_of(str(tmp_path), ()) == 700
    assert context_of(str(tmp_path), ("--max-model-len", "512")) == 512
    assert context_of(str(tmp_path), ("--max-model-len=300",)) == 300
    assert context_of("some/model", ()) is None
    assert not place_of(str(tmp_path), (), "cpu").is_multimodal


def test_a_multimodal_model_is_served_as_text_by_arguments_that_are_drawn_or_given(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"text_config": {"max_position_embeddings": 500}, "vision_config": {}}')
    assert context_of(str(tmp_path), ()) == 500
    chosen = {
        ("--max-model-len", "512"): True,
        ("--language-model-only",): False,
        ('--limit-mm-per-prompt={"image": 0}',): False,
    }
    for arguments, is_open in chosen.items():
        assert place_of(str(tmp_path), arguments, "cpu").is_multimodal == is_open
    assert not place_of("some/model", (), "cpu").is_multimodal


@pytest.mark.parametrize(
    ("changes", "shared"),
    [
        ({}, True),
        *(({"intermediate_size": 96}, False), ({"head_dim": 40}, False), ({"num_experts": 8}, False)),
    ],
)
def test_workers_are_drawn_in_exact_arithmetic_where_layers_have_segments(
    changes: dict[str, Any], shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ARITHMETIC.name, "exact")
    sizes = {"num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 512}
    model = {"architectures": ["Qwen3MoeForCausalLM"], "dtype": "bfloat16"} | sizes | changes
    place = Place("cpu", cores=2, model=model)
    assert {draw_settings(0, number, 300, place).workers for number in range(12)} == ({1, 2} if shared else {1})


def drawn_of(field: str, model: dict[str, Any], *given: str, cores: int = 2) -> set[Any]:
    place = Place("cpu", cores, model=model, given=frozenset(given))
    return {getattr(draw_settings(0, number, 300, place), field) for number in range(12)}


def test_two_workers_are_drawn_for_a_model_that_they_can_share() -> None:
    sizes = {"num_attention_heads": 14, "hidden_size": 64, "intermediate_size": 96}
    assert drawn_of("workers", sizes) == drawn_of("tree", sizes) == {1, 2}
    assert drawn_of("workers", sizes, cores=1) == drawn_of("tree", sizes, cores=1) == {1}
    assert drawn_of("workers", sizes, "--tensor-parallel-size") == {1}
    assert drawn_of("tree", sizes | {"num_experts": 8}) == {1, 2}
    shared = {"num_experts": 8, "shared_expert_intermediate_size": 64}
    assert drawn_of("tree", sizes | shared) == {1, 2}
    assert drawn_of("tree", sizes | shared | {"shared_expert_intermediate_size": 48}) == {1}
    several = {"n_routed_experts": 8, "moe_intermediate_size": 48}
    assert drawn_of("tree", sizes | several | {"n_shared_experts": 2}) == {1, 2}
    assert drawn_of("tree", sizes | several | {"n_shared_experts": 1}) == {1}
    assert drawn_of("tree", sizes | {"moe_intermediate_size": None}) == {1, 2}
    assert drawn_of("tree", {"num_attention_heads": 14}) == {1}


@pytest.mark.parametrize(
    ("quantised", "workers"),
    [
        ({"bits": 4, "group_size": 32}, {1, 2}),
        ({"bits": 4, "group_size": -1}, {1, 2}),
        ({"bits": 4, "group_size": 128}, {1}),
        ({"config_groups": {"group_0": {"weights": {"group_size": 128}}}}, {1}),
        ({"config_groups": {"group_0": {"weights": {"group_size": None, "block_structure": [128, 128]}}}}, {1}),
    ],
)
def test_two_workers_are_drawn_where_they_cut_no_group(quantised: dict[str, Any], workers: set[int]) -> None:
    sizes = {"num_attention_heads": 14, "hidden_size": 896, "intermediate_size": 1536}  # o_proj: 448 inputs each
    assert drawn_of("workers", sizes | {"quantization_config": quantised}) == workers
    assert drawn_of("workers", {"num_attention_heads": 71}) == drawn_of("workers", {}) == {1}


@pytest.mark.parametrize("name", [*FORMS, "int8"])
def test_trees_and_exact_arithmetic_are_drawn_where_activations_in_codes_allow_them(name: str) -> None:
    config = FORMS[name].config if name in FORMS else configuration(group(["Linear"], "channel", "token"))
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "architectures": ["Qwen3ForCausalLM"]}
    sizes |= {"hidden_size": 512, "intermediate_size": 512, "dtype": "bfloat16"}
    model = sizes | {"quantization_config": config}
    has_tree = name in FORMS and (FORMS[name].shared == "block" or FORMS[name].static)
    assert drawn_of("exact", sizes) == {True, False}
    assert drawn_of("exact", model) == {False}
    assert drawn_of("tree", model) == ({1, 2} if has_tree else {1})
    assert drawn_of("tree", model, "--quantization") == drawn_of("workers", model, "--quantization") == {1}
    assert drawn_of("workers", model) == {1, 2}
    in_blocks = name in FORMS and FORMS[name].shared == "block"
    for cut in ({"head_dim": 64}, {"intermediate_size": 384}):
        assert drawn_of("workers", model | cut) == ({1} if in_blocks else {1, 2})


@pytest.mark.parametrize("name", ["w8a8-fp8-modelopt", "w8a8-fp8-modelopt-kv8", "w8a8-fp8-modelopt-file"])
def test_what_modelopt_says_in_either_file_is_read_before_settings_are_drawn(name: str, tmp_path: Path) -> None:
    """A cache in FP8 is drawn where the checkpoint does not say what it is."""
    shape = Shape(hidden=256, intermediate=512, layers=1, heads=4, kv_heads=2, head_size=64, vocab=512)
    place = place_of(str(make_checkpoint(tmp_path / "MODEL", shape, form=name)), (), "cpu")
    assert place.is_quantised
    assert place.activations == "tensor"
    assert bool(place.cache_scheme) is (name != "w8a8-fp8-modelopt")
    drawn = {draw_settings(0, number, 300, place).options.get("cache") for number in range(60)}
    assert (drawn - {None} == set()) is (name != "w8a8-fp8-modelopt")
    for algorithm, scaled in (("FP8", "tensor"), ("FP8_PB_WO", "group"), ("FP8_PER_CHANNEL_PER_TOKEN", "token")):
        for written in (algorithm, algorithm.lower()):
            config = place.model["quantization_config"] | {"quant_algo": written}
            assert Place("cpu", 4, model={"quantization_config": config}).activations == scaled


def test_experts_in_nvfp4_are_drawn_as_those_of_16_bit_activations(tmp_path: Path) -> None:
    """By one worker and two, also with whole ones; with the cache of a checkpoint that says what it is."""
    shape = Shape(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, head_size=64, vocab=512, experts=8)
    for name in ("nvfp4-w4a4", "nvfp4-modelopt-kv8"):
        place = place_of(str(make_checkpoint(tmp_path / name, shape, form=name)), (), "cpu")
        assert (place.has_experts, place.is_quantised, place.activations) == (True, True, "")
        assert bool(place.cache_scheme) is name.endswith("kv8")
        settings = [draw_settings(0, number, 300, place) for number in range(80)]
        drawn = {(one.workers, one.options.get("experts")) for one in settings}
        assert {(1, None), (2, None), (2, "whole")} <= drawn
        assert ({one.options.get("cache") for one in settings} == {None}) is name.endswith("kv8")


@pytest.mark.parametrize("experts", [0, 8])
def test_a_mixture_of_formats_is_drawn_as_its_layers(tmp_path: Path, experts: int) -> None:
    """Which have given scales in FP8 and none in NVFP4; whole experts by two workers in the latter alone."""
    shape = Shape(hidden=256, intermediate=512, layers=2, heads=4, kv_heads=2, head_size=64, vocab=512, experts=experts)
    place = place_of(str(make_checkpoint(tmp_path, shape, form="mixed-modelopt")), (), "cpu")
    assert (place.has_experts, place.is_quantised, place.activations) == (bool(experts), True, "tensor")
    settings = [draw_settings(0, number, 300, place) for number in range(80)]
    drawn = {(one.workers, one.options.get("experts")) for one in settings}
    assert {(1, None), (2, None)} <= drawn
    assert ((2, "whole") in drawn) is bool(experts)
    assert {one.options.get("cache") for one in settings} == {None}
    of_weights = place.model["quantization_config"]
    eight = {name: {"quant_algo": "FP8"} for name in of_weights["quantized_layers"]}
    in_fp8 = replace(place, model=place.model | {"quantization_config": of_weights | {"quantized_layers": eight}})
    assert in_fp8.shares_experts(whole=True) is not bool(experts)
    four = {name: {"quant_algo": "NVFP4", "group_size": 16} for name in of_weights["quantized_layers"]}
    in_fp4 = replace(place, model=place.model | {"quantization_config": of_weights | {"quantized_layers": four}})
    assert in_fp4.activations == ""


@pytest.mark.parametrize("name", ["fp8 by blocks", "compressed-tensors by rows", "w4a16 of 128"])
def test_trees_and_workers_are_drawn_of_quantised_experts_where_they_cut_no_group(name: str) -> None:
    """Of shared experts neither; a tree of one worker's cuts the matrix that codes of four bits stand for."""
    config = FORMS[name].config if name in FORMS else FORMATS[name].config
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 512}
    sizes |= {"intermediate_size": 512, "moe_intermediate_size": 256, "n_routed_experts": 8, "n_shared_experts": 1}
    model = sizes | {"architectures": ["Glm4MoeForCausalLM"], "quantization_config": config}
    cut = model | {"shared_expert_intermediate_size": 384}
    trees, of_cut = ({1, 2} if "rows" not in name else {1}), ({1, 2} if "w4a16" in name else {1})
    assert (drawn_of("tree", model), drawn_of("tree", cut)) == (trees, of_cut)
    assert (drawn_of("workers", model), drawn_of("workers", cut)) == ({1, 2}, {1, 2} if "rows" in name else {1})


@pytest.mark.parametrize(
    ("name", "whole_on_a_cpu", "on_gpus"),
    [
        ("fp8 by blocks", True, {(1, False), (2, False), (2, True)}),
        ("compressed-tensors by rows", True, {(1, False), (2, False)}),
        ("fp8 by tensors", True, {(1, False)}),
        ("fp8 by tensors, given", False, {(1, False)}),
        ("compressed-tensors by tensors, given", False, {(1, False)}),
        ("ModelOpt's by tensors, given", False, {(1, False)}),
    ],
)
def test_experts_in_fp8_are_shared_as_they_have_run(
    name: str, whole_on_a_cpu: bool, on_gpus: set[tuple[int, bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By how many workers, and whether these have whole ones, which have no given scales."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128, "hidden_size": 512}
    sizes |= {"intermediate_size": 512, "moe_intermediate_size": 256, "num_experts": 8, "dtype": "bfloat16"}
    model = sizes | {"architectures": ["Qwen3MoeForCausalLM"], "quantization_config": FORMS[name].config}
    on_a_cpu = {(1, False), (2, False), *([(2, True)] if whole_on_a_cpu else [])}
    for device, version, expected in (("cpu", "0.32.0", on_a_cpu), ("cuda", "0.33.0", on_gpus)):
        monkeypatch.setattr(patch_points, "installed_version", lambda said=version: said)
        drawn = [draw_settings(0, number, 300, Place(device, 4, 2, model)) for number in range(80)]
        assert {(one.workers, "experts" in one.options) for one in drawn} == expected


def test_two_stages_are_drawn_for_a_model_of_several_layers() -> None:
    assert drawn_of("stages", {"num_hidden_layers": 2}) == {1, 2}
    assert drawn_of("stages", {"num_hidden_layers": 2}, cores=1) == drawn_of("stages", {"num_hidden_layers": 1}) == {1}
    for chosen in ("--pipeline-parallel-size", "--tensor-parallel-size", "--speculative-config"):
        assert drawn_of("stages", {"num_hidden_layers": 2}, chosen) == {1}


def test_options_are_drawn_where_a_model_has_what_they_need(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    cores = os.cpu_count() or 1
    assert place_of(str(tmp_path), (), "cpu") == Place("cpu", cores, has_tokenizer=False)
    (tmp_path / "tokenizer.json").write_text("{}")
    assert place_of(str(tmp_path), (), "cpu") == Place("cpu", cores)
    assert not place_of(str(tmp_path), ("--skip-tokenizer-init",), "cpu").has_tokenizer
    assert not place_of(str(tmp_path), ("--load-format", "dummy"), "cpu").is_open("--load-format")
    assert "--seed" in place_of(str(tmp_path), ("--seed=3",), "cpu").given


def test_the_mode_of_a_row_is_the_flags(engines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for flag in ("0", "1"):
        monkeypatch.setenv(FLAG, flag)
        table = tmp_path / f"{flag}.csv"
        run(tmp_path, "--settings", "1", "--schedules", "1", "--csv", str(table))
        assert [row["mode"] for row in csv.DictReader(table.open())] == [flag]


def test_a_draft_model_of_dflash_is_written_once_for_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    model = make_checkpoint(tmp_path / "model", Shape(hidden=64, intermediate=64, layers=2, vocab=300))
    settings = replace(draw_settings(0, 0, 300, Place("cpu")), drafts=3, drafter="dflash")
    arguments = settings.arguments(str(model))
    configured = json.loads(arguments[arguments.index("--speculative-config") + 1])
    folder = Path(configured["model"])
    assert configured == {"method": "dflash", "model": str(folder), "num_speculative_tokens": 3}
    config = json.loads((folder / "config.json").read_text())
    assert config["dflash_config"] == {"mask_token_id": 299, "target_layer_ids": [0]}
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert settings.arguments(str(model)) == arguments
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    assert {one.name for one in tmp_path.iterdir()} == {"model", folder.name}


def test_a_draft_model_of_gemma_4_is_written_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": 64, "global_head_dim": 128, "vocab_size": 300}
    model = {"architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "num_kv_shared_layers": 2} | sizes
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    place = Place("cpu", model=model)
    [drawn, *_] = [one for number in range(60) if (one := draw_settings(0, number, 300, place)).drafter == "mtp"]
    arguments = drawn.arguments(str(tmp_path / "model"))
    configured = json.loads(arguments[arguments.index("--speculative-config") + 1])
    assert configured["method"] == "mtp"
    config = json.loads((Path(configured["model"]) / "config.json").read_text())
    assert (config["model_type"], config["backbone_hidden_size"]) == ("gemma4_assistant", 64)
    assert "num_kv_shared_layers" not in config["text_config"]


def test_a_model_drafts_for_itself_in_some_engines_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = [draw_settings(0, number, 300, Place("cuda")) for number in range(40)]
    found = {one.drafter: one for one in drawn if one.drafts}
    assert found.keys() == {"itself", "ngram", "ngram_gpu"}
    assert all(one.drafter == "ngram" for one in drawn if not one.drafts)
    for drafter, (method, of) in {"itself": ("draft_model", "MODEL"), "ngram_gpu": ("ngram_gpu", None)}.items():
        arguments = found[drafter].arguments("MODEL")
        configured = json.loads(arguments[arguments.index("--speculative-config") + 1])
        assert (configured["method"], configured.get("model")) == (method, of)
        assert f"drafter={drafter}" in found[drafter].label
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.30.0")
    assert not place_of("some/model", (), "cpu").has_draft_models
    ernie = {"architectures": ["Ernie4_5_MoeForCausalLM"], "num_nextn_predict_layers": 1}
    by_layers = [draw_settings(0, number, 300, Place("cpu", model=ernie)) for number in range(40)]
    drafting = next(one for one in by_layers if one.drafts and one.drafter == "mtp")
    configured = json.loads(drafting.arguments("MODEL")[drafting.arguments("MODEL").index("--speculative-config") + 1])
    assert configured == {"method": "mtp", "num_speculative_tokens": drafting.drafts}
    for place in (Place("cuda", model=ernie), Place("cpu", model=ernie | {"num_nextn_predict_layers": 0})):
        drawn_by = {draw_settings(0, number, 300, place).drafter for number in range(40)}
        assert ("mtp" in drawn_by) == (place.device == "cuda")
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    qwen3 = {"architectures": ["Qwen3ForCausalLM"]}
    found = {draw_settings(0, number, 300, Place("cpu", model=qwen3)).drafter for number in range(40)}
    assert found == {"itself", "ngram", "dflash"}
    for place in (Place("cuda", model=qwen3), Place("cpu", model={"architectures": ["GemmaForCausalLM"]})):
        assert "dflash" not in {draw_settings(0, number, 300, place).drafter for number in range(40)}
    for place in (Place("cpu", has_draft_models=False), Place("cpu", model={"vision_config": {}})):
        assert {draw_settings(0, number, 300, place).drafter for number in range(40)} == {"ngram"}

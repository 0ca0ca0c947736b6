"""The script that trains by TRL: its task, what it asks of its runs, and a short run of each with real engines."""

import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.record import DATA, Setting, read
from examples.grpo import runs
from examples.grpo.runs import ALL, SMALL, Result, Step, keep, measurements, problems, schedule
from examples.grpo.task import DIGITS, questions, reward
from vllm_batch_invariant.installing import how_to_install

SETTING = Setting("x86_64", "vllm=1 trl=2", "2026-01-01")
EXACT = Step(0.5, 100, 0, 0.0, 0.0, 0.0, 1.0, 32, 0, "a")
APART = replace(EXACT, different=90, largest=0.1, kl=1e-4, weights="b")


def kept_promises() -> dict[str, Result]:
    """Three steps of every run, as they should be."""
    results = {}
    for name, run in ALL.items():
        step = EXACT if run.exact else replace(APART, weights=name)
        results[name] = Result([replace(step, batch=32 if run.rollouts == "together" else 5)] * 3, 1.0)
    return results


def test_a_right_answer_is_worth_1_and_each_wrong_digit_counts() -> None:
    asked = questions()[22]
    right = asked["expected"]
    assert asked["prompt"].endswith("Count up by 5 from 2:")
    assert right == " 2 7 2 7 2 7 2 7 2 7 2 7"
    answers = {right: 1.0, right[:-1] + "8": 11 / 12, right + " 2 7": 12 / 14, " 2 7": 2 / 12, "": 0.0, "two": 0.0}
    assert reward(list(answers), [right] * len(answers)) == list(answers.values())


def test_every_question_has_an_answer_of_its_own() -> None:
    asked = questions()
    assert len({question["expected"] for question in asked}) == len({question["prompt"] for question in asked}) == 90
    assert {len(question["expected"].split()) for question in asked} == {DIGITS}


def test_nothing_is_said_of_runs_that_keep_their_promises() -> None:
    assert list(problems(kept_promises())) == []


@pytest.mark.parametrize(
    ("name", "step", "problem"),
    [
        ("ours", replace(EXACT, different=1), "ours: rollout and trainer differ"),
        ("ours-other-batch", replace(EXACT, batch=5, kl=1e-20), "ours-other-batch: rollout and trainer differ"),
        ("ours-other-batch", replace(EXACT, batch=32), "its batches are not smaller than those of ours"),
        ("ours-other-batch", replace(EXACT, batch=5, weights="c"), "from step 3 on its weights are not those of ours"),
        ("stale-cache", EXACT, "stale-cache: nothing was seen of it"),
        ("plain-engine", EXACT, "plain-engine: nothing was seen of it"),
    ],
)
def test_a_last_step_that_breaks_a_promise_is_named(name: str, step: Step, problem: str) -> None:
    results = kept_promises()
    results[name] = Result([*results[name].steps[:2], step], 1.0)
    [found] = problems(results)
    assert problem in found


def test_plain_vllm_with_the_weights_of_another_batch_is_named() -> None:
    results = kept_promises()
    results["stock-one-by-one"] = Result([replace(APART, batch=1, weights="stock-corrected")] * 3, 1.0)
    [found] = problems(results)
    assert "stock-one-by-one: its weights are those of stock-corrected" in found


def test_prompts_are_cut_only_where_the_mode_is_on() -> None:
    """Plain vLLM ends with an error where a seeded request's is cut."""
    asked = {run: schedule(run, 32) for run in ALL.values()}
    assert {run.mode for run, planned in asked.items() if planned.max_num_batched_tokens < 32 * 64} == {True}
    assert {planned.max_num_seqs for planned in asked.values()} == {32, 5, 1}


def test_new_rows_replace_those_of_the_same_run_alone(tmp_path: Path) -> None:
    path, results = tmp_path / "on_policy.csv", kept_promises()
    keep(path, list(measurements(results, "small", SETTING)))
    shorter = {name: Result(result.steps[:1], 1.0) for name, result in results.items() if name == "ours"}
    keep(path, list(measurements(shorter, "small", SETTING)))
    keep(path, list(measurements(shorter, "large", SETTING)))
    steps = [(row.provider, row.keys["model"]) for row in read(path) if row.metric == "kl"]
    assert steps.count(("ours", "small")) == steps.count(("ours", "large")) == 1
    assert steps.count(("stock", "small")) == 3


def test_the_kept_data_are_exact_where_the_mode_is_on_and_nowhere_else() -> None:
    kept = read(DATA / "on_policy.csv")
    for row in (row for row in kept if row.metric in ("kl", "logprob-difference") and ALL[row.provider].exact):
        assert (row.p50, row.bits) == (0.0, "equal")
    rows = [row for row in kept if row.keys["model"] == SMALL]
    rows = [row for row in rows if (row.gpu, row.versions) == (rows[0].gpu, rows[0].versions)]
    rows += [row for row in kept if ALL[row.provider].adapter or ALL[row.provider].hybrid]
    names = {name for name, run in ALL.items() if not run.adapter and not run.hybrid} | {row.provider for row in rows}
    gaps = {name: [row for row in rows if (row.provider, row.metric) == (name, "kl")] for name in names}
    for name, found in gaps.items():
        exact = ALL[name].exact
        assert {row.bits for row in found} == ({"equal"} if exact else {"-"})
        assert max(row.p50 for row in found) == 0.0 if exact else found[-1].p50 > 0
    same = {row.provider: row for row in rows if row.metric == "same-weights"}
    optional = {"ours-lora-other-batch", "ours-delta-other-batch"}
    for name in {"ours-other-batch", "ours-one-by-one"} | (optional & names):
        assert (same[name].p50, same[name].bits) == (len(gaps[name]), "equal")
    assert same["stock-one-by-one"].p50 < len(gaps["stock-one-by-one"])


@pytest.mark.engine
@pytest.mark.exhaustive
def test_short_runs_are_exact_and_every_fault_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if find_spec("trl") is None or find_spec("peft") is None:
        pytest.skip(f"needs TRL and PEFT: {how_to_install('on-policy')}")
    out = tmp_path / "on_policy.csv"
    chosen = [name for name, run in ALL.items() if run.mode or run.patched]
    sizes = ["--steps", "2", "--short", "2", "--warm-up", "25"]
    monkeypatch.setattr(sys, "argv", ["on_policy", *sizes, "--out", str(out), "--only", *chosen])
    assert runs.main() == 0, capsys.readouterr().out
    rows = read(out)
    assert {row.provider for row in rows} == set(chosen)
    exact = [row for row in rows if ALL[row.provider].exact]
    assert {row.p50 for row in exact if row.metric in ("kl", "logprob-difference")} == {0.0}
    assert [row.p50 for row in exact if row.metric == "same-weights"] == [2.0] * 4

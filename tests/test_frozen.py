"""A state of what the project puts out: the same code writes the same one, and a change in any part is found."""

import json
import multiprocessing
import os
import shutil
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest

from scripts import frozen
from scripts.frozen import PARTS, Entry, compare, state_of
from vllm_batch_invariant.ops.exact import known_answers
from vllm_batch_invariant.verify.harness import worker

CHEAP = {"pages": [], "digests": ["operations"], "refusals": ["sentences"]}
"""Parts and groups that need no engine and no compiler."""
PTX = ".visible .entry {name}(\n.loc 1 {line} 0\nadd.f32 %f1, %f2, %f3; // {name}.py:{line}\n"


def saved(state: dict[str, Any], part: str, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    frozen.save(state, folder, part)
    return folder


def found(part: str, before: dict[str, Any], after: dict[str, Any], tmp_path: Path) -> int:
    """The exit status of a comparison."""
    return compare(saved(before, part, tmp_path / "before"), saved(after, part, tmp_path / "after"))


@pytest.fixture
def changed(tmp_path: Path) -> Path:
    """A copy of the package in which a refusal, a variable's meaning and nothing else has other words."""
    copy = tmp_path / "copy" / "vllm_batch_invariant"
    shutil.copytree(frozen.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for name, words in {"ops/softmax/cpu.py": "its exp is defined in fp32", "envs.py": "The mode, for vLLM"}.items():
        text = (copy / name).read_text()
        assert words in text
        (copy / name).write_text(text.replace(words, "planted"))
    return copy


@pytest.mark.parametrize("part", CHEAP)
def test_the_same_code_writes_the_same_state(part: str, tmp_path: Path) -> None:
    first, second = (state_of(part, CHEAP[part]) for _ in range(2))
    assert all(first["groups"].values())
    assert first == json.loads(json.dumps(first))
    assert found(part, first, second, tmp_path) == 0


def differs(before: list[Entry], after: list[Entry], said: str) -> None:
    assert [*frozen.differences(before, before)] == []
    assert said in "\n".join(frozen.differences(before, after))


def test_another_word_of_a_refusal_is_found(changed: Path) -> None:
    differs([*frozen.sentences()], [*frozen.sentences(changed)], "; planted; use fp32")


def test_another_word_of_a_page_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = [*frozen._pages(tmp_path)["docs/coverage.md"]()]
    (tmp_path / "docs").mkdir()
    text = (frozen.ROOT / "docs" / "coverage.md").read_text()
    (tmp_path / "docs" / "coverage.md").write_text(text.replace("| Watermarking |", "| planted |"))
    monkeypatch.setattr(frozen, "ROOT", tmp_path)
    differs(before, [*frozen._pages(tmp_path)["docs/coverage.md"]()], "+| planted |")


def test_another_bit_of_exact_arithmetic_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = frozen._digests(tmp_path)
    before = [*groups["operations"]()]
    comparisons = known_answers.comparisons

    def flipped(*arguments: Any) -> Any:
        for name, here, defined in comparisons(*arguments):
            if name == "softmax":
                here.view("int32")[0, 0] ^= 1
            yield name, here, defined

    monkeypatch.setattr(known_answers, "comparisons", flipped)
    differs(before, [*groups["operations"]()], "softmax")


def test_another_word_of_a_commands_result_is_found(
    changed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def entries(package: Path) -> list[Entry]:
        monkeypatch.setenv("PYTHONPATH", str(package.parent))
        return [("settings", frozen.result("settings", tmp_path))]

    differs(entries(frozen.PACKAGE), entries(changed), '"meaning": "planted and this plugin."')


def test_another_bit_of_a_completion_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        """Answers without a model."""

        logprob = "3f800000"

        def __init__(self, *_: object) -> None: ...

        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...

        def step(self, _name: str, requests: list[Any]) -> SimpleNamespace:
            completion = {"text": "a", "tokens": [1], "logprobs": [self.logprob]}
            return SimpleNamespace(requests=[{"completions": [completion], "prompt_logprobs": None} for _ in requests])

    monkeypatch.setattr(worker, "Engine", Engine)
    groups = frozen._completions(tmp_path)
    before = [*groups["dense"]()]
    assert len(before) > 5
    Engine.logprob = "3f800001"
    differs(before, [*groups["dense"]()], "sha256")


def test_another_instruction_of_a_kernel_is_found_and_another_name_or_line_is_none() -> None:
    def entries(name: str, line: int, kind: str = "f32") -> list[Entry]:
        return [(name, frozen.stripped(PTX.format(name=name, line=line).replace("f32", kind), name))]

    assert [*frozen.differences(entries("first", 7), entries("second", 8))] == []
    differs(entries("first", 7), entries("first", 7, "f64"), "+add.f64")


@pytest.mark.parametrize("part", PARTS)
def test_a_comparison_says_what_differs_and_what_it_could_not_compare(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made_with = dict.fromkeys(PARTS[part].needs, "this")
    before = {"made_with": made_with, "groups": {"all": [["name", "a\nb"]], "more": [["name", "c"]]}}
    assert found(part, before, before, tmp_path) == 0
    assert f"{part}/all: equal" in capsys.readouterr().out
    assert found(part, before, before | {"groups": {"all": [["name", "a\nplanted"]]}}, tmp_path) == 1
    said = capsys.readouterr().out
    assert f"{part}/all: different" in said
    assert "    +planted" in said
    assert f"{part}: not compared, in one state alone: more" in said
    for name in made_with:
        other = before | {"made_with": made_with | {name: "another"}, "groups": {"all": []}}
        assert found(part, before, other, tmp_path) == 2
        assert f"{part}: cannot be compared, it was made with another {name}" in capsys.readouterr().out
    assert compare(tmp_path / "before", tmp_path / "nowhere") == 2
    assert f"{part}: not compared, there is no " in capsys.readouterr().out


def test_refusals_that_tests_provoke_are_kept(tmp_path: Path) -> None:
    tests = [frozen.ROOT / "tests" / "integration" / "test_coverage.py"]
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        said = process.submit(kept, tmp_path, tests).result()
    assert "does not cover scores of late interaction: vLLM pads documents to the longest" in "\n".join(said)
    assert len(said) > 20


def kept(folder: Path, tests: list[Path]) -> list[str]:
    """In a process of its own, which pytest begins anew."""
    os.environ.pop("PYTEST_XDIST_WORKER", None)
    return [text for _, text in frozen.provoked(folder, tests)]

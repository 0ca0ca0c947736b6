"""The journeys of docs/architecture.md lead through files and functions that are there, and through no file twice."""

import ast
import re

import pytest

from tests.docs.documents import ROOT

PACKAGE = ROOT / "vllm_batch_invariant"
PAGE = (ROOT / "docs" / "architecture.md").read_text().partition("\n## Five journeys\n")[2].partition("\n## ")[0]
JOURNEYS = {
    part.partition("\n")[0]: re.findall(r"^\d+\. `([\w/.]+)`: (`.*)$", part, re.MULTILINE)
    for part in PAGE.split("\n### ")[1:]
}
"""Files, each with what is said of it."""


def defined(file: str) -> set[str]:
    """Functions and classes, methods as "Class.method"."""

    def names(body: list[ast.stmt], prefix: str = "") -> set[str]:
        found = set()
        for node in body:
            if isinstance(node, ast.FunctionDef):
                found.add(prefix + node.name)
            elif isinstance(node, ast.ClassDef):
                found |= {prefix + node.name, *names(node.body, f"{prefix}{node.name}.")}
        return found

    return names(ast.parse((PACKAGE / file).read_text()).body)


def functions(said: str) -> list[str]:
    """Those that a line lists first."""
    listed = re.match(r"(?:`[\w.]+`(?:, )?)+", said)[0]
    return re.findall(r"`([\w.]+)`", listed)


def test_there_are_five() -> None:
    assert len(JOURNEYS) == 5
    assert all(len(stations) >= 3 for stations in JOURNEYS.values())


@pytest.mark.parametrize("journey", JOURNEYS)
def test_a_journey_leads_through_functions_that_are_there_and_through_no_file_twice(journey: str) -> None:
    files = [file for file, _ in JOURNEYS[journey]]
    assert len(set(files)) == len(files)
    for file, said in JOURNEYS[journey]:
        assert set(functions(said)) <= defined(file), file


@pytest.mark.parametrize("journey", JOURNEYS)
def test_each_file_of_a_journey_names_the_next_ones_first_function(journey: str) -> None:
    """But where a process sends a name to another one, which an earlier file has."""
    before = ""
    for file, said in JOURNEYS[journey]:
        first, text = functions(said)[0].rpartition(".")[2], (PACKAGE / file).read_text()
        by_name = re.search(r"by the name that `([\w/.]+)` sends", said)
        source = (PACKAGE / by_name[1]).read_text() if by_name else before
        assert not before or re.search(rf"\b{first}\b", source), f"{file}: nobody calls {first}"
        before = text


def test_what_else_the_journeys_name_is_there() -> None:
    for file in re.findall(r"`((?:\w+/)+\w+\.py)`", PAGE):
        assert (PACKAGE / file).is_file(), file
    for file, said in re.findall(r"`((?:\w+/)+\w+\.py)`: (`[\w.]+`(?:, `[\w.]+`)*)", PAGE):
        assert set(functions(said)) <= defined(file), file


def test_a_function_that_is_gone_is_found() -> None:
    assert "Engine.called" not in defined("verify/harness/worker.py")
    assert functions("`a`, `B.c`. It calls `d`.") == ["a", "B.c"]

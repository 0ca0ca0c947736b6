"""What the page on GPUs says was compiled is what the file beside it says."""

import re

import pytest

from scripts.check_triton import BEGIN, END, GPUS, PAGE, cells_of, page_table, read_table, used_by, with_older
from vllm_batch_invariant.integration.coverage import COVERED
from vllm_batch_invariant.ops.common.nvidia_gpus import COMPILED_FOR


def test_the_table_is_that_of_the_file() -> None:
    written = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert written == page_table(read_table())


def test_no_cell_but_those_that_the_page_names_has_a_problem_and_that_is_spills_in_loops() -> None:
    problems = [row for row in read_table() if row["outcome"] != "compiled"]
    named = {(row["triton"], "rows") for row in problems if row["triton"] == "3.6.0"}
    everywhere = {"exact arithmetic", "gradients of attention"}
    assert {(row["triton"], row["kernels"]) for row in problems if row["kernels"] not in everywhere} <= named
    assert all(re.fullmatch(r"(\w+ spills \d+ times in a loop(; )?)+", row["outcome"]) for row in problems)


def test_every_cell_of_the_newest_triton_is_in_the_file() -> None:
    rows = read_table()
    newest = max((row["triton"] for row in rows), key=lambda version: tuple(map(int, version.split("."))))
    for gpu in GPUS:
        found = {row["kernels"] for row in rows if (row["triton"], row["gpu"]) == (newest, f"sm_{gpu}")}
        assert found == set(cells_of(gpu)), gpu


def test_a_run_of_some_cells_replaces_their_rows_alone_and_drops_those_that_there_are_no_more() -> None:
    before = read_table()
    [one, _, gone] = [row for row in before if (row["triton"], row["gpu"]) == (before[-1]["triton"], "sm_90")][:3]
    new = one | {"sources": "new"}
    names = {90: [row["kernels"] for row in before if row["gpu"] == "sm_90" and row["kernels"] != gone["kernels"]]}
    after = with_older([new], names)
    assert [row for row in after if row not in before] == [new]
    assert {row["kernels"] for row in before if row not in after} == {one["kernels"], gone["kernels"]}
    assert [row for row in after if row in before] == [row for row in before if row in after], "in the file's order"
    earlier = with_older([one | {"triton": "3.5.1", "gpu": "sm_120"}], {})
    assert earlier[1:] == before, "versions are in their order"


def test_the_coverage_table_names_the_gpus_that_are_compiled_for() -> None:
    [devices] = [one.note for one in COVERED if one.name == "Devices"]
    named = {tuple(map(int, found)) for found in re.findall(r"(\d+)\.(\d)", devices)}
    assert named == set(COMPILED_FOR)


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        ("SIZE = 3", "SIZE = 4", False),
        ("import torch as t", "import numpy as t", False),
        ("size, 'cell'", "size, 'a cell'", False),
        ("'another'", "'one more'", True),
        ("OTHER = 1", "OTHER = 2", True),
        ("'of another'", "'of one more'", True),
    ],
)
def test_a_digest_follows_what_compiles_a_cell_and_nothing_else_of_the_program(
    before: str, after: str, same: bool
) -> None:
    program = (
        "import torch as t\nSIZE = 3\nOTHER = 1\n"
        "def launch(size):\n    return t, size, 'cell'\n"
        "def compile_cell():\n    return launch(SIZE), other()\n"
        "def other():\n    return 'of another'\n"
        "def more():\n    return launch(OTHER), 'another'\n"
    )
    changed = program.replace(before, after)
    assert changed != program
    assert (used_by(changed, ["compile_cell"], {"other"}) == used_by(program, ["compile_cell"], {"other"})) == same

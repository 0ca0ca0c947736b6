"""What the page on GPUs says was compiled is what the file beside it says."""

import re

from scripts.check_triton import BEGIN, END, GPUS, PAGE, cells_of, page_table, read_table
from vllm_batch_invariant.integration.coverage import COVERED
from vllm_batch_invariant.ops.common.nvidia_gpus import COMPILED_FOR


def test_the_table_is_that_of_the_file() -> None:
    written = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert written == page_table(read_table())


def test_no_cell_but_exact_arithmetics_has_a_problem_and_that_spills_in_loops() -> None:
    problems = [row for row in read_table() if row["outcome"] != "compiled"]
    assert {row["kernels"] for row in problems} <= {"exact arithmetic"}
    assert all(re.fullmatch(r"(\w+ spills \d+ times in a loop(; )?)+", row["outcome"]) for row in problems)


def test_every_cell_of_the_newest_triton_is_in_the_file() -> None:
    rows = read_table()
    newest = max((row["triton"] for row in rows), key=lambda version: tuple(map(int, version.split("."))))
    for gpu in GPUS:
        found = {row["kernels"] for row in rows if (row["triton"], row["gpu"]) == (newest, f"sm_{gpu}")}
        assert found == set(cells_of(gpu)), gpu


def test_the_coverage_table_names_the_gpus_that_are_compiled_for() -> None:
    [devices] = [one.note for one in COVERED if one.name == "Devices"]
    named = {tuple(map(int, found)) for found in re.findall(r"(\d+)\.(\d)", devices)}
    assert named == set(COMPILED_FOR)

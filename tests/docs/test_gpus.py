"""What the page on GPUs says was compiled is what the file beside it says."""

import re

from scripts.check_triton import BEGIN, END, GPUS, PAGE, page_table, read_table
from vllm_batch_invariant.integration.coverage import COVERED
from vllm_batch_invariant.ops.common.nvidia_gpus import COMPILED_FOR


def test_the_table_is_that_of_the_file() -> None:
    written = PAGE.read_text().partition(BEGIN)[2].partition(END)[0].strip()
    assert written == page_table(read_table())


SPILLED = {("sm_80", "attention bfloat16 256"), ("sm_90", "attention bfloat16 256")}
"""Cells with a kernel that keeps more of its registers in memory than others do; the page says so."""


def test_no_cell_of_the_file_has_another_problem_and_every_gpu_has_attention_and_matmuls() -> None:
    rows = read_table()
    assert {(row["gpu"], row["kernels"]) for row in rows if row["outcome"] != "compiled"} <= SPILLED
    assert all(row["outcome"] == "compiled" or "bytes of stack" in row["outcome"] for row in rows)
    for gpu in GPUS:
        assert {"matmuls", "attention bfloat16 128"} <= {row["kernels"] for row in rows if row["gpu"] == f"sm_{gpu}"}


def test_the_coverage_table_names_the_gpus_that_are_compiled_for() -> None:
    [devices] = [one.note for one in COVERED if one.name == "Devices"]
    named = {tuple(map(int, found)) for found in re.findall(r"(\d+)\.(\d)", devices)}
    assert named == set(COMPILED_FOR)

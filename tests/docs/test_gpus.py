"""What the page on GPUs says was compiled is what the file beside it says."""

import re
from pathlib import Path

import pytest

from scripts import attention_heads, check_triton, marks
from scripts.check_triton import (
    BEGIN,
    END,
    GPUS,
    PAGE,
    brought_up_to_date,
    cells_of,
    page_table,
    read_table,
    with_older,
)
from vllm_batch_invariant.integration.coverage import COVERED
from vllm_batch_invariant.ops.common.nvidia_gpus import COMPILED_FOR


def test_the_table_is_that_of_the_file() -> None:
    assert marks.between(PAGE.read_text(), BEGIN, END).strip() == page_table(read_table())


def test_the_table_of_heads_is_that_of_the_schedules() -> None:
    inside = marks.between(PAGE.read_text(), attention_heads.BEGIN, attention_heads.END)
    assert inside.strip() == attention_heads.table()


def test_a_hopper_has_kernels_of_its_own_for_some_heads_and_a_gpu_with_two_instructions_large_blocks() -> None:
    of = attention_heads.kernels_of
    assert [of(size, (9, 0))[0] for size in (64, 96, 128, 256, 512)] == [
        "Gluon", "Triton, 16 rows", "Gluon", "Gluon", "Triton, 16 rows"
    ]  # fmt: skip
    assert of(72, (9, 0)) == ("", "", "Gluon")
    assert of(128, (10, 0))[0] == "Triton, 64 rows"
    assert of(*attention_heads.LATENT[:1], (9, 0), attention_heads.LATENT[1])[0] == "Triton, 16 rows"


def test_no_cell_but_those_that_the_page_names_has_a_problem_and_that_is_spills_in_loops() -> None:
    problems = [row for row in read_table() if row["outcome"] != "compiled"]
    named = {(row["triton"], "rows") for row in problems if row["triton"] == "3.6.0"}
    everywhere = {"exact arithmetic", "gradients of attention"}
    everywhere |= {f"Hopper's attention {dtype} 256" for dtype in ("bfloat16", "float16")}
    over_codes = [row for row in problems if row["kernels"].startswith("attention over e4m3")]
    assert {row["gpu"] for row in over_codes} <= {"sm_100", "sm_103"}
    others = [row for row in problems if row["kernels"] not in everywhere and row not in over_codes]
    assert {(row["triton"], row["kernels"]) for row in others} <= named
    assert all(re.fullmatch(r"(\w+ spills \d+ times in a loop(; )?)+", row["outcome"]) for row in problems)


def test_every_cell_of_the_newest_triton_is_in_the_file() -> None:
    rows = read_table()
    newest = max((row["triton"] for row in rows), key=lambda version: tuple(map(int, version.split("."))))
    for gpu, names in cells_of(GPUS).items():
        found = {row["kernels"] for row in rows if (row["triton"], row["gpu"]) == (newest, f"sm_{gpu}")}
        assert found == set(names), gpu


def test_a_run_of_some_cells_replaces_their_rows_alone_and_drops_those_that_there_are_no_more() -> None:
    before = read_table()
    [one, _, gone] = [row for row in before if (row["triton"], row["gpu"]) == (before[-1]["triton"], "sm_90")][:3]
    new = one | {"commit": "new"}
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


def test_every_row_says_at_which_commit_it_was_compiled() -> None:
    for row in read_table():
        assert re.fullmatch(r"[0-9a-f]{8}", row["commit"]), f"compiled from a tree that nobody has: {row}"
        assert (row["ir"] == "") == (row["ptx"] == "")


PROGRAM = """
import json, sys
_, _, known, _, gpu, *names = sys.argv
for name in names:
    same = json.loads(known).get(name) == "ir of " + name
    cell = {"triton": "3.9.0", "gpu": int(gpu), "name": name, "ir": "ir of " + name, "ptx": "ptx", "problems": []}
    print(json.dumps(cell | {"kernels": None if same else []}), flush=True)
    if name == "breaks":
        sys.exit("broken")
"""
"""In the place of the module that compiles."""


def test_cells_are_compiled_whose_ir_is_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.setattr(check_triton, "PROGRAM", "program")
    monkeypatch.setattr(check_triton, "CACHE", tmp_path)
    monkeypatch.setattr(check_triton, "commit_here", lambda: "now")
    row = dict.fromkeys(read_table()[0], "") | {"triton": "3.9.0", "gpu": "sm_90", "commit": "before"}
    irs = {"same": "ir of same", "changed": "another", "unknown": ""}
    table = [row | {"kernels": name, "ir": ir} for name, ir in irs.items()]
    monkeypatch.setattr(check_triton, "read_table", lambda: table)

    def run(*names: str, again: bool = False) -> tuple[dict[str, str], str | None]:
        found, said = brought_up_to_date("3.9.0", tmp_path, 90, names, again)
        return {name: row["commit"] for name, row in found.items()}, said

    assert run(*irs, "new") == ({"same": "before", "changed": "now", "unknown": "now", "new": "now"}, None)
    monkeypatch.setattr(check_triton, "commit_here", lambda: "later")
    assert run(*irs, "new") == ({"same": "before", "changed": "now", "unknown": "now", "new": "now"}, None)
    assert run("same", "new", again=True) == ({"same": "later", "new": "later"}, None)
    found, said = run("same", "breaks", "new")
    assert found == {"same": "later", "breaks": "later"}, "what was finished is kept"
    assert said is not None
    assert "broken" in said

"""The page on trainers' examples says what the file beside it says."""

import re
from collections import Counter

from scripts import marks
from scripts.trainers.gate import STARTS
from scripts.trainers.models import MODELS, SAME_AS, model_of
from scripts.trainers.rows import kind_of
from scripts.trainers.table import BEGIN, END, PAGE, REPOSITORIES, page_table, read


def test_the_tables_are_those_of_the_file() -> None:
    assert marks.between(PAGE.read_text(), BEGIN, END).strip() == page_table(read())


def test_every_row_names_its_source_and_says_what_came_of_it() -> None:
    rows = read()
    assert {row.trainer for row in rows} == set(REPOSITORIES)
    assert {len({(row.commit, row.date) for row in rows if row.trainer == name}) for name in REPOSITORIES} == {1}
    for row in rows:
        assert re.fullmatch(r"[0-9a-f]{10}", row.commit)
        assert re.fullmatch(r"\d{4}-\d\d-\d\d", row.date)
        assert row.verdict, row
        assert bool(row.alone) == bool(row.gpus) == row.is_asked
    assert max(Counter((row.trainer, row.script) for row in rows).values()) <= 2


def test_every_model_of_the_table_of_models_is_asked_for() -> None:
    asked = {row.model for row in read() if row.is_asked}
    assert set(SAME_AS) <= asked
    assert set(MODELS) <= asked | {name for name, _ in SAME_AS.values()}
    assert all(model_of(name) for name in SAME_AS)
    assert {row.architecture for row in read() if row.alone == STARTS} >= {"Qwen3ForCausalLM", "Qwen3MoeForCausalLM"}


def test_reasons_that_differ_in_a_number_are_one_kind() -> None:
    assert kind_of("tensor parallelism 4") == kind_of("tensor parallelism 16")
    assert kind_of("additional_config={'a': 1}") == kind_of("additional_config={'b': [1, 2]}")
    assert kind_of("the model A") == kind_of("the model B") != kind_of("LoRA adapters")

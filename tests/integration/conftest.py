"""What several tests of this folder ask together."""

import dataclasses
import json
from typing import NamedTuple

import pytest

from scripts import trainer_configurations
from scripts.recipes import table as recipes
from scripts.trainers import gate
from scripts.trainers import table as trainers

CHANGED = {
    "quantization": "fp8",
    "kv_cache_dtype": "fp8_e5m2",
    "pipeline_parallel_size": 3,
    "use_fp64_gumbel": True,
    "no_such_argument": 1,
}
"""Arguments that no example of a trainer has."""
VARIABLE = "VLLM_CPU_SGL_KERNEL"
"""A variable that none has."""
_GOOD = "examples/on_policy_distillation_trainer/run_qwen3_0.6b_opd_veomni.sh"


class Published(NamedTuple):
    """What the check says now.

    Attributes:
        trainers: the rows of trainers' examples.
        worse: one of them, changed for the worse, by the argument or variable.
        recipes: the rows of recipes.
    """

    trainers: list[trainers.Row]
    worse: dict[str, trainers.Row]
    recipes: list[recipes.Row]


@pytest.fixture(scope="session")
def published() -> Published:
    """Of all that is published, asked in one process: it is as long in starting as in answering."""
    pytest.importorskip("vllm")
    rows, of_recipes = trainers.read(), recipes.read()
    good = next(row for row in rows if row.script == _GOOD)
    worse = [
        dataclasses.replace(good, arguments=json.dumps(good.engine_arguments | {name: value}))
        for name, value in CHANGED.items()
    ]
    worse.append(dataclasses.replace(good, variables=json.dumps({VARIABLE: "1"})))
    asked = trainer_configurations.questions([*rows, *worse])
    said = gate.ask([*asked, *recipes.questions(of_recipes)])
    after = trainer_configurations.judged([*rows, *worse], said[: len(asked)])
    changed = dict(zip([*CHANGED, VARIABLE], after[len(rows) :], strict=True))
    return Published(after[: len(rows)], changed, recipes.judged(of_recipes, said[len(asked) :]))

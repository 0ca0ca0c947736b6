"""LoRA adapters of mixtures of experts, of the experts' products and of other layers: a request has the bits of an
engine where its adapter is alone, and one without an adapter those of an engine without LoRA.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.adapters import EXPERT_FAULTS, written
from tests.engine.engines import EAGER_ON_GPU, UNTRIED_THERE, request, run, tokens
from tests.engine.test_adapters import (
    FEW,
    IN_ENGINE,
    IN_PROCESS,
    LIMITS,
    NAMES,
    ROOM,
    TARGETS,
    alone,
    among,
    asked,
    differing,
    pytestmark,  # noqa: F401 - where adapters are covered
    replaced,
)
from tests.engine.test_experts import FAMILIES
from tests.engine.test_models import checkpoint as random_model
from vllm_batch_invariant.integration.coverage import CORES
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.adapters import ATTENTION, EXPERTS, MLP
from vllm_batch_invariant.verify.harness.worker import Engine

TARGETED = {"A": (8, (*ATTENTION, *MLP, EXPERTS)), "B": (16, (EXPERTS,)), "C": (64, ATTENTION)}
"""Rank and layers of each adapter: the second has experts alone, the third has none."""
PLACES = ("among others", "warm", "preempted", "in another order", "by other numbers")


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3-MoE whose first layer is dense."""
    shape = Shape(hidden=256, intermediate=512, layers=3, experts=8, expert_intermediate=192, max_length=1024)
    return make_checkpoint(tmp_path_factory.mktemp("mixture"), shape)


def folders_of(model: Path, at: Path, targets: Mapping[str, Any] = TARGETED) -> dict[str, Path]:
    return {name: written(at / name, model, rank, rank, layers) for name, (rank, layers) in targets.items()}


@pytest.fixture(scope="module")
def folders(mixture: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return folders_of(mixture, tmp_path_factory.mktemp("adapters"))


def served(model: Path, afterwards: Any, flag: str = "1", **more: Any) -> Any:
    """What an engine with the mode gives."""
    variables = UNTRIED_THERE | ({CORES: "0|1"} if "tensor_parallel_size" in more else {})
    return run({"model": str(model), **FEW, **ROOM, **more}, [], flag, afterwards=afterwards, **variables).afterwards


def in_company(engine: Engine, folders: Mapping[str, Path]) -> dict[str, Any]:
    found = {"alone": alone(engine, folders), "among others": among(engine, folders, NAMES)}
    found["warm"] = among(engine, folders, NAMES, reset=False)
    found["preempted"] = among(engine, folders, NAMES, preempt_after=9)
    found["in another order"] = among(engine, folders, ("C", None, "B", "A"))
    found["by other numbers"] = among(engine, folders, NAMES, numbers={"A": 13, "B": 12, "C": 11})
    return found


@pytest.fixture(scope="module")
def found(mixture: Path, folders: dict[str, Path]) -> dict[str, Any]:
    return served(mixture, partial(in_company, folders=folders))


@pytest.mark.parametrize("where", PLACES)
def test_a_request_has_the_same_bits_in_any_company(found: dict[str, Any], where: str) -> None:
    assert differing(found, where) == []


def test_the_company_was_there(found: dict[str, Any]) -> None:
    answers = [*found["alone"].values()]
    assert all(one != other for number, one in enumerate(answers) for other in answers[:number])
    assert found["among others"]["preemptions"] + found["preempted"]["preemptions"] > 0
    assert max(found["warm"]["cached"]) >= 128

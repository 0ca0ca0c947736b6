"""LoRA adapters of models whose layers keep states: a request has the bits of an engine where its adapter is alone, and
one without an adapter those of an engine without LoRA, in any company, from chunks, after a preemption and from the
prefix cache.
"""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.engine import kept_states, multimodal, test_adapters, test_mamba
from tests.engine.adapters import EXPERT_FAULTS, FAULTS
from tests.engine.engines import EAGER_ON_GPU, UNTRIED_THERE, request, tokens
from tests.engine.quantised_layers import BLOCKS, FORMS, INTEGERS, ROWS, write
from tests.engine.test_adapters import IN_ENGINE, NAMES, ROOM, asked, differing, without_adapters
from tests.engine.test_quantised_hybrids import FAMILIES, Family
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.adapters import write_for
from vllm_batch_invariant.verify.harness.requests import NGRAMS
from vllm_batch_invariant.verify.harness.worker import Engine

COVERED = reviews.ran().lora["cuda" if torch.cuda.is_available() else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
NEAR = 1e-3
"""Of logprobs in fp32, beside which Transformers has the weights in float64."""
LAYERS = {
    "A": (8, ""),
    "B": (16, r"\.(q_proj|v_proj|in_proj_qkv|in_proj|up_proj|w1|input_linear)$"),
    "C": (64, r"\.(o_proj|out_proj|k_proj)$"),
}
"""Rank and layers of an adapter: of all linear ones, of parts of fused ones, and of what goes out."""
TARGETS = kept_states.TARGETS
COMPANY = [
    (request(tokens(40 + 30 * number, 100 + number, kept_states.VOCABULARY), max_tokens=8), name)
    for number, name in enumerate(NAMES)
]
PAGES = {"num_gpu_blocks_override": 60}
"""So many that states of a prompt are found again, and are filled anew when requests are preempted."""
SHARED = ("LFM2", "Qwen3.5", *test_mamba.GROUPS_FOR)
"""Models that two workers share."""
BY_TWO: dict[str, Any] = {"tensor_parallel_size": 2}
OF_EXPERTS = ["Qwen3.5-MoE"]
"""Models with a gate in each expert, whose experts have adapters, too."""
DENSE = [name for name, one in FAMILIES.items() if {"num_experts", "n_routed_experts"}.isdisjoint(one.sizes)]


def written(folder: Path, model: Path) -> dict[str, Path]:
    config = transformers.AutoConfig.from_pretrained(model)
    return {name: write_for(folder / name, config, rank, rank, layers) for name, (rank, layers) in LAYERS.items()}


def in_company(engine: Engine, folders: Mapping[str, Path]) -> dict[str, Any]:
    together = partial(test_adapters.among, engine, folders, NAMES, TARGETS, COMPANY)
    found: dict[str, Any] = {"alone": test_adapters.alone(engine, folders, NAMES, TARGETS), "among others": together()}
    found["warm"] = together(reset=False)
    found["preempted"] = together(preempt_after=9)
    found["by other numbers"] = together(numbers={"A": 13, "B": 12, "C": 11})
    for fault in FAULTS:
        engine.call(f"{IN_ENGINE}:plant", fault)
        found[fault] = together()
    engine.call(f"{IN_ENGINE}:plant", "")
    return found | {"no fault": together()}


def settings_of(family: Family, folder: Path, variables: Mapping[str, str]) -> dict[str, Any]:
    """Of its engines, with adapters or without."""
    return (
        family.settings
        | PAGES
        | kept_states.IN_GRAPHS
        | {"variables": variables, "path": multimodal.python_path(folder)}
    )


def check_company(family: Family, folder: Path, variables: Mapping[str, str], form: str = "", **workers: int) -> None:
    """A request had the same bits in any company, one without an adapter those of an engine without LoRA, and no two
    adapters had the same. Of weights that are stored in a form; empty: bf16.
    """
    source = model = family.source(folder / "model")
    if form:
        model = write(source, FORMS[form], folder / "packed")
    settings = settings_of(family, folder, variables) | workers
    ask = partial(in_company, folders=written(folder, source))
    found: dict[str, Any] = kept_states.started(model, ask, **settings, **ROOM)
    answers = [*found["alone"].values()]
    assert all(one != other for number, one in enumerate(answers) for other in answers[:number])
    assert found["preempted"]["preemptions"] > 0
    assert max(found["warm"]["cached"]) >= 128
    places = ("among others", "warm", "preempted", "by other numbers", "no fault")
    assert [place for place in places if differing(found, place)] == []
    assert all(differing(found, fault) for fault in FAULTS)
    assert kept_states.started(model, partial(without_adapters, targets=TARGETS), **settings) == found["alone"]["None"]


@pytest.mark.parametrize("name", DENSE + OF_EXPERTS)
def test_a_request_has_the_same_bits_in_any_company(name: str, tmp_path: Path) -> None:
    check_company(FAMILIES[name], tmp_path, UNTRIED_THERE)


def with_faults_in_experts(engine: Engine, folders: Mapping[str, Path]) -> dict[str, Any]:
    names = ("A", None)
    found: dict[str, Any] = {"alone": test_adapters.alone(engine, folders, names, TARGETS)}
    for fault in ("", *EXPERT_FAULTS):
        engine.call(f"{IN_ENGINE}:plant_in_experts", fault)
        found[fault] = test_adapters.among(engine, folders, names, TARGETS, COMPANY)
    return found


@pytest.mark.parametrize("name", OF_EXPERTS)
def test_faults_in_experts_with_adapters_show(name: str, tmp_path: Path) -> None:
    model = FAMILIES[name].source(tmp_path / "model")
    ask = partial(with_faults_in_experts, folders=written(tmp_path, model))
    settings = settings_of(FAMILIES[name], tmp_path, UNTRIED_THERE) | EAGER_ON_GPU
    found = kept_states.started(model, ask, **settings, **ROOM)
    assert differing(found, "") == []
    assert [fault for fault in EXPERT_FAULTS if not differing(found, fault)] == []


@kept_states.needs_two
@pytest.mark.parametrize("name", SHARED)
def test_two_workers_give_a_request_the_same_bits_in_any_company(name: str, tmp_path: Path) -> None:
    check_company(FAMILIES[name], tmp_path, UNTRIED_THERE | kept_states.cores_of(2), **BY_TWO)


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *(("Qwen3.5", form) for form in (BLOCKS, ROWS, INTEGERS)),
        ("LFM2", ROWS),
        ("Nemotron-H", INTEGERS),
    ],
)
def test_adapters_of_quantised_weights_give_a_request_the_same_bits_in_any_company(
    name: str, form: str, tmp_path: Path
) -> None:
    check_company(FAMILIES[name], tmp_path, UNTRIED_THERE, form)


@pytest.mark.parametrize("name", DENSE)
def test_drafts_of_n_grams_leave_answers_with_adapters_alone(name: str, tmp_path: Path) -> None:
    """Beside a prefix cache; in an engine without drafts each request is alone."""
    family = FAMILIES[name]
    model = family.source(tmp_path / "model")
    folders = written(tmp_path, model)
    settings = settings_of(family, tmp_path, UNTRIED_THERE) | ROOM
    mine = [(one, name) for one in (*kept_states.REPEATING[:2], TARGETS[0]) for name in NAMES]

    def drafted(engine: Engine) -> tuple[Any, dict[str, int]]:
        cold, warm = (asked(engine, folders, [*mine, *COMPANY], reset=reset) for reset in (True, False))
        assert max(warm["cached"]) > 0
        counted: dict[str, int] = engine.call("tests.engine.drafters:counts")
        return [answers["answers"][: len(mine)] for answers in (cold, warm)], counted

    def undrafted(engine: Engine) -> list[Any]:
        return [asked(engine, folders, [one])["answers"][0] for one in mine]

    drafts = json.dumps(NGRAMS | {"num_speculative_tokens": 3})
    answers, counted = kept_states.started(
        model, drafted, **settings | {"speculative_config": drafts, "max_num_batched_tokens": 256}
    )
    assert 0 < counted["accepted"] < counted["drafts"]
    right = kept_states.started(model, undrafted, **settings)
    assert [found == right for found in answers] == [True, True]
    assert len({str(one) for one in right}) > 3, "adapters show"


def merged(model: Path, adapter: Path, without: str = "-") -> torch.nn.Module:
    """Transformers' in float64, with an adapter in its weights but of layers of a name."""
    how = {"attn_implementation": "eager", "experts_implementation": "eager"}
    made = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, **how)
    weights, scale = load_file(adapter / "adapter_model.safetensors"), 16 / LAYERS["A"][0]

    def product(of: str) -> torch.Tensor:
        a, b = (weights[f"base_model.model.{of}.lora_{side}.weight"].double() for side in "AB")
        return scale * b @ a

    for name, layer in made.named_modules():
        if f"base_model.model.{name}.lora_A.weight" in weights and not name.endswith(without):
            layer.weight.data += product(name)
        elif f"base_model.model.{name}.0.gate_proj.lora_A.weight" in weights:
            inner = layer.down_proj.shape[-1]
            sides = {"gate_proj": layer.gate_up_proj[:, :inner], "up_proj": layer.gate_up_proj[:, inner:]}
            for kind, stack in (sides | {"down_proj": layer.down_proj}).items():
                for number, matrix in enumerate(stack.data if kind != without else ()):
                    matrix += product(f"{name}.{number}.{kind}")
    return made


def check_merged(family: Family, folder: Path, variables: Mapping[str, str], **workers: int) -> None:
    """Logprobs were near those of merged weights in float64, of which no kind of layer may be left out."""
    model = family.source(folder / "model")
    folders = written(folder, model)
    settings = {"path": multimodal.python_path(folder), "variables": variables, "dtype": "float32"} | workers

    def with_a(engine: Engine) -> list[Any]:
        return [asked(engine, folders, [(one, "A")])["answers"][0] for one in TARGETS]

    answers = kept_states.started(model, with_a, **settings, **ROOM)
    assert kept_states.distance_from(merged(model, folders["A"]), answers) < NEAR
    kinds = json.loads((folders["A"] / "adapter_config.json").read_text())["target_modules"]
    assert all(kept_states.distance_from(merged(model, folders["A"], kind), answers) > 10 * NEAR for kind in kinds)


@pytest.mark.parametrize("name", DENSE + OF_EXPERTS)
def test_logprobs_are_near_those_of_merged_weights_in_float64(name: str, tmp_path: Path) -> None:
    check_merged(FAMILIES[name], tmp_path, UNTRIED_THERE)


@kept_states.needs_two
@pytest.mark.parametrize("name", SHARED)
def test_logprobs_of_two_workers_are_near_those_of_merged_weights(name: str, tmp_path: Path) -> None:
    """So each has its part of every adapter."""
    check_merged(FAMILIES[name], tmp_path, UNTRIED_THERE | kept_states.cores_of(2), **BY_TWO)

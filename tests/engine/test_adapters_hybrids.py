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

from tests.engine import kept_states, multimodal, test_adapters
from tests.engine.adapters import FAULTS
from tests.engine.engines import UNTRIED_THERE, request, tokens
from tests.engine.test_adapters import IN_ENGINE, NAMES, ROOM, asked, differing, without_adapters
from tests.engine.test_quantised_hybrids import FAMILIES
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.adapters import write_for
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
DENSE = [name for name, family in FAMILIES.items() if "num_experts" not in family.sizes]


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


@pytest.mark.parametrize("name", DENSE)
def test_a_request_has_the_same_bits_in_any_company(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    model = family.source(tmp_path / "model")
    settings = family.settings | PAGES | kept_states.IN_GRAPHS | {"variables": UNTRIED_THERE}
    settings |= {"path": multimodal.python_path(tmp_path)}
    ask = partial(in_company, folders=written(tmp_path, model))
    found = kept_states.started(model, ask, **settings, **ROOM)
    answers = [*found["alone"].values()]
    assert all(one != other for number, one in enumerate(answers) for other in answers[:number])
    assert found["preempted"]["preemptions"] > 0
    assert max(found["warm"]["cached"]) >= 128
    places = ("among others", "warm", "preempted", "by other numbers", "no fault")
    assert [place for place in places if differing(found, place)] == []
    assert all(differing(found, fault) for fault in FAULTS)
    assert kept_states.started(model, partial(without_adapters, targets=TARGETS), **settings) == found["alone"]["None"]


def merged(model: Path, adapter: Path, without: str = "-") -> torch.nn.Module:
    """Transformers' in float64, with an adapter in its weights but of layers of a name."""
    made = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64, attn_implementation="eager")
    weights, scale = load_file(adapter / "adapter_model.safetensors"), 16 / LAYERS["A"][0]
    for name, layer in made.named_modules():
        path = f"base_model.model.{name}.lora_"
        if f"{path}A.weight" in weights and not name.endswith(without):
            layer.weight.data += scale * weights[f"{path}B.weight"].double() @ weights[f"{path}A.weight"].double()
    return made


@pytest.mark.parametrize("name", DENSE)
def test_logprobs_are_near_those_of_merged_weights_in_float64(name: str, tmp_path: Path) -> None:
    """Of which no kind of layer may be left out."""
    family = FAMILIES[name]
    model = family.source(tmp_path / "model")
    folders = written(tmp_path, model)
    settings = {"path": multimodal.python_path(tmp_path), "variables": UNTRIED_THERE, "dtype": "float32"}

    def with_a(engine: Engine) -> list[Any]:
        return [asked(engine, folders, [(one, "A")])["answers"][0] for one in TARGETS]

    answers = kept_states.started(model, with_a, **settings, **ROOM)
    assert kept_states.distance_from(merged(model, folders["A"]), answers) < NEAR
    kinds = json.loads((folders["A"] / "adapter_config.json").read_text())["target_modules"]
    assert all(kept_states.distance_from(merged(model, folders["A"], kind), answers) > 10 * NEAR for kind in kinds)

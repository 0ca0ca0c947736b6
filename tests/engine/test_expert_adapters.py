"""LoRA adapters of mixtures of experts, of the experts' products and of other layers: a request has the bits of an
engine where its adapter is alone, and one without an adapter those of an engine without LoRA.
"""

import json
import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.adapters import EXPERT_FAULTS, written
from tests.engine.engines import CHECK, EAGER_ON_GPU, OF_DEVICE, SETTINGS, UNTRIED_THERE, arguments_of, run
from tests.engine.test_adapters import (
    IN_ENGINE,
    IN_PROCESS,
    LIMITS,
    NAMES,
    PLACES,
    ROOM,
    TARGETS,
    alone,
    among,
    asked,
    assert_company,
    beside,
    differing,
    in_company,
    pytestmark,  # noqa: F401 - where adapters are covered
    replaced,
    served,
    without_lora,
)
from tests.engine.test_experts import FAMILIES
from tests.engine.test_models import checkpoint as random_model
from vllm_batch_invariant.verify.check.engine import check_engine
from vllm_batch_invariant.verify.check.guarantees import ADAPTERS, APART, cases_of_adapters
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.adapters import ATTENTION, EXPERTS, MLP, SHARED_EXPERT, STACKED_EXPERTS
from vllm_batch_invariant.verify.harness.worker import Engine
from vllm_batch_invariant.verify.outcome import Outcome, Status

TARGETED = {"A": (8, (*ATTENTION, *MLP, EXPERTS)), "B": (16, (EXPERTS,)), "C": (64, ATTENTION)}
"""Rank and layers of each adapter: the second has experts alone, the third has none."""


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


@pytest.fixture(scope="module")
def found(mixture: Path, folders: dict[str, Path]) -> dict[str, Any]:
    return served(mixture, partial(in_company, folders=folders))


@pytest.mark.parametrize("where", PLACES)
def test_a_request_has_the_same_bits_in_any_company(found: dict[str, Any], where: str) -> None:
    assert differing(found, where) == []


def test_the_company_was_there(found: dict[str, Any]) -> None:
    assert_company(found)


def test_a_request_without_an_adapter_has_the_bits_of_an_engine_without_lora(
    found: dict[str, Any], mixture: Path
) -> None:
    assert without_lora(mixture) == found["alone"]["None"]


def test_bits_do_not_follow_from_the_room_for_adapters(
    found: dict[str, Any], mixture: Path, folders: dict[str, Path]
) -> None:
    room = {"max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 128}
    other = served(mixture, partial(alone, folders=folders), max_num_batched_tokens=512, **room)
    assert [name for name, answers in other.items() if answers != found["alone"][name]] == []


def test_two_workers_keep_a_requests_bits(mixture: Path, folders: dict[str, Path]) -> None:
    by_itself, together = beside(mixture, folders, tensor_parallel_size=2)
    assert [name for name, answers in by_itself.items() if together[name] != answers] == []
    assert len({str(answers) for answers in by_itself.values()}) == len(NAMES)


def test_adapters_of_other_layers_leave_experts_alone(
    found: dict[str, Any], mixture: Path, folders: dict[str, Path], tmp_path: Path
) -> None:
    """Where only attention may have some, which most adapters are for, no room is taken for those of experts."""
    attention = folders_of(
        mixture, tmp_path, {"A": (8, ATTENTION), "B": (16, ("q_proj", "o_proj")), "C": (64, ATTENTION)}
    )
    by_itself, together = beside(mixture, attention, lora_target_modules=[*ATTENTION])
    assert [name for name, answers in by_itself.items() if together[name] != answers] == []
    assert len({str(answers) for answers in by_itself.values()}) == len(NAMES)
    assert {name: by_itself[name] for name in ("C", "None")} == {name: found["alone"][name] for name in ("C", "None")}


def with_faults(engine: Engine, folders: Mapping[str, Path]) -> dict[str, Any]:
    seen = {"alone": alone(engine, folders, ("A", "B"))}
    for fault in ("", *EXPERT_FAULTS):
        engine.call(f"{IN_ENGINE}:plant_in_experts", fault)
        seen[fault] = among(engine, folders, ("A", "B"))
    return seen


def test_faults_show(mixture: Path, folders: dict[str, Path]) -> None:
    seen = served(mixture, partial(with_faults, folders=folders), **EAGER_ON_GPU)
    assert differing(seen, "") == []
    for fault in EXPERT_FAULTS:
        assert differing(seen, fault), fault


def test_an_adapter_that_is_loaded_in_place_finds_nothing_of_the_one_before(
    found: dict[str, Any], mixture: Path, tmp_path: Path
) -> None:
    settings = {"model": str(mixture), **LIMITS, **ROOM}
    ways = [(rank, rank, layers) for rank, layers in (TARGETED["A"], TARGETED["B"])]
    afterwards = partial(replaced, checkpoint=mixture, at=tmp_path / "adapter", ways=ways)
    seen = run(settings, [], "1", afterwards=afterwards, **IN_PROCESS, **UNTRIED_THERE).afterwards
    of_a, of_b = found["alone"]["A"][1], found["alone"]["B"][1]
    assert seen["before"]["answers"] == seen["warm"]["answers"] == seen["restored"]["answers"] == [of_a]
    assert "the files of the LoRA adapter A are not those" in seen["changed"]
    assert "while requests have it" in seen["while it serves"]["said"]
    assert seen["in place"] == ""
    assert seen["after"]["answers"] == [of_b]
    assert seen["after"]["cached"] == [0]
    assert seen["by path alone"]["answers"] != [of_a]  # a fault, which is vLLM's


OF_FAMILIES = ("Qwen2-MoE with a shared expert", "Mixtral", "OLMoE without renormalised weights")
OF_FAMILIES += ("gpt-oss with sinks and biases",)


RANK = 8


def merge(model: Path, adapter: Path) -> None:
    """Add the products of an adapter of rank 8 to the weights of a checkpoint."""
    weights, tensors = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name, of_a in tensors.items():
        if "lora_A" not in name:
            continue
        a, b = of_a.double(), 16 / RANK * tensors[name.replace("lora_A", "lora_B")].double()
        path = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if f"{path}.weight" in weights:
            weights[f"{path}.weight"] += (b @ a).float()
            continue
        stacked = path.replace(".base_layer", ".gate_up_proj") if "base_layer" in path else f"{path}.down_proj"
        count = len(a) // RANK  # gpt-oss's are [experts, K, N]
        for expert in range(count):
            own = b[:, expert::count] @ a[expert * RANK : (expert + 1) * RANK]
            weights[stacked][expert] += own.t().float()
    save_file(weights, model / "model.safetensors", {"format": "pt"})


def distance(answer: Any, other: Any) -> float:
    """The largest between logprobs of a prompt's tokens."""
    of_tokens = ([float.fromhex(entry[0][1]) for entry in prompt[1:]] for _, prompt in (answer, other))
    return max(abs(one - two) for one, two in zip(*of_tokens, strict=True))


@pytest.mark.parametrize("family", OF_FAMILIES)
def test_families_keep_a_requests_bits(family: str, tmp_path: Path) -> None:
    """Also with weights of a shared expert. In fp32 an adapter is close to weights with it merged, which are another
    function.
    """
    random_model(FAMILIES[family], torch.float32).save_pretrained(tmp_path / "model")
    made = folders_of(tmp_path / "model", tmp_path, TARGETED | {"A": (RANK, (*ATTENTION, EXPERTS, SHARED_EXPERT))})
    by_itself, together = beside(tmp_path / "model", made, dtype="float32")
    assert [name for name, answers in by_itself.items() if together[name] != answers] == []
    assert len({str(answers) for answers in by_itself.values()}) == len(NAMES)
    merge(tmp_path / "model", made["A"])
    of_merged = served(tmp_path / "model", partial(alone, folders=made, names=(None,)), dtype="float32")["None"]
    near, far = (distance(of_merged[0], by_itself[name][0]) for name in ("A", "None"))
    assert near < 1e-3 < 0.1 < far


def stacked_and_apart(engine: Engine, folders: Mapping[str, Path]) -> list[Any]:
    """Of an adapter in a tensor of all experts, and of the same one in tensors of each; alone, and together."""
    sent = [(TARGETS[0], name) for name in folders]
    numbers = {name: number for number, name in enumerate(folders, 1)}
    found = [asked(engine, folders, [one], numbers)["answers"][0] for one in sent]
    return [found, asked(engine, folders, sent, numbers)["answers"]]


def test_an_adapter_of_stacked_experts_has_the_bits_of_one_for_each(mixture: Path, tmp_path: Path) -> None:
    """Where gate and up have one A, as they have there."""
    made = {"stacked": written(tmp_path / "stacked", mixture, RANK, 1, (*ATTENTION, STACKED_EXPERTS))}
    tensors, apart = load_file(made["stacked"] / "adapter_model.safetensors"), {}
    for name, a in tensors.items():
        path, is_a = name.removesuffix(".lora_A.weight"), name.endswith(".lora_A.weight")
        if ".experts" not in name:
            apart[name] = a
        elif is_a:
            b, count = tensors[f"{path}.lora_B.weight"], len(a) // RANK
            names = ("gate_proj", "up_proj") if path.endswith(".base_layer") else ("down_proj",)
            for expert in range(count):
                for product, of_b in zip(names, b[:, expert::count].chunk(len(names)), strict=True):
                    inside = f"{path.removesuffix('.base_layer')}.{expert}.{product}"
                    apart[f"{inside}.lora_A.weight"] = a[expert * RANK : (expert + 1) * RANK].clone()
                    apart[f"{inside}.lora_B.weight"] = of_b.clone()
    made["apart"] = shutil.copytree(made["stacked"], tmp_path / "apart")
    save_file(apart, made["apart"] / "adapter_model.safetensors")
    mixed = {"enable_mixed_moe_lora_format": True}
    by_itself, together = served(mixture, partial(stacked_and_apart, folders=made), **mixed)
    assert by_itself == together
    assert by_itself[0] == by_itself[1]


def refusals(engine: Engine, folders: Mapping[str, Path]) -> list[str]:
    """What is said against requests with adapters, and then the answers to one that is served."""
    said = [engine.call(f"{IN_ENGINE}:refusal", TARGETS[1], name, 1, str(at)) for name, at in folders.items()]
    return [*said, asked(engine, {}, [(TARGETS[1], None)], {})["answers"]]


def test_a_request_with_an_adapter_that_is_not_served_ends_alone(
    found: dict[str, Any], mixture: Path, tmp_path: Path
) -> None:
    made = {name: written(tmp_path / name, mixture, RANK, 1, (EXPERTS,)) for name in ("router", "part", "stacked")}
    of_router, of_part = (load_file(made[name] / "adapter_model.safetensors") for name in ("router", "part"))
    path = "base_model.model.model.layers.1.mlp.gate"
    of_router |= {f"{path}.lora_A.weight": torch.zeros(RANK, 256), f"{path}.lora_B.weight": torch.zeros(8, RANK)}
    save_file(of_router, made["router"] / "adapter_model.safetensors")
    save_file(
        {name: one for name, one in of_part.items() if "up_proj" not in name},
        made["part"] / "adapter_model.safetensors",
    )
    written(made["stacked"], mixture, RANK, 1, (STACKED_EXPERTS,))
    *said, [answer] = served(mixture, partial(refusals, folders=made))
    assert [
        words in one for words, one in zip(("of the router", "has not all products", "are stacked"), said, strict=True)
    ] == [True] * 3
    assert answer == found["alone"]["None"][1]


def results_of() -> CheckResults:
    return CheckResults("VLLM_BATCH_INVARIANT=1", cases_of_adapters(CHECK))


def test_a_check_with_adapters_holds(mixture: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (SETTINGS | UNTRIED_THERE).items():
        monkeypatch.setenv(name, value)
    found, used = results_of(), [str(folders[name]) for name in ("A", "B")]
    settings = LIMITS | ROOM | {"max_model_len": 768, "max_num_seqs": 64}
    check_engine(str(mixture), arguments_of(settings), "1", CHECK, found, lambda _: None, used)
    differing = [case.name for case in found.cases if case.required and case.outcome is not Outcome.HOLDS]
    assert differing == []
    assert found.status is Status.REPRODUCIBLE
    assert {ADAPTERS, APART} <= {*found.samples}


def test_a_bisection_names_the_experts_that_have_a_fault(mixture: Path, folders: dict[str, Path]) -> None:
    settings = {"model": str(mixture), "max_model_len": 512, **ROOM, **OF_DEVICE, **EAGER_ON_GPU}
    used = [str(folders[name]) for name in ("A", "B")]
    bisected = run(settings, [], "1", bisection=("expert_adapters", used), **UNTRIED_THERE).bisected
    for name in ("", "none"):
        assert bisected[name]["found"] is None
        assert bisected[name]["coverage"]["compared"] > 100
    for fault in EXPERT_FAULTS:
        found = bisected[fault]["found"]
        assert found["divergence"]["key"]["module"].startswith("model.layers.1.mlp.experts."), fault


def test_drafts_change_no_bit(found: dict[str, Any], mixture: Path, folders: dict[str, Path]) -> None:
    ngrams = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    for answers in beside(mixture, folders, speculative_config=json.dumps(ngrams)):
        assert [name for name, right in found["alone"].items() if answers[name] != right] == []

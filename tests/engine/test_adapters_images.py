"""LoRA adapters of the text models of models that take images: a request with images has the bits of an engine where
its adapter is alone, and one without an adapter those of an engine without LoRA, in any company, from chunks that end
inside an image, after a preemption, and from both caches.
"""

import json
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import images, multimodal
from tests.engine.adapters import EXPANDS, FAULTS
from tests.engine.engines import (
    OF_DEVICE,
    PATHS,
    SETTINGS,
    UNTRIED_THERE,
    Engine,
    EngineFailed,
    arguments_of,
    differing_answers,
    request,
)
from tests.engine.kept_states import cores_of, needs_two
from tests.engine.quantised_layers import BLOCKS, FORMS, INTEGERS, ROWS, write
from tests.engine.test_adapters import IN_ENGINE, ROOM
from tests.engine.test_images_of_workers import CASES as OF_WORKERS
from tests.engine.test_images_of_workers import Case, of_family
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.reviews.expert_adapters import TRAILS
from vllm_batch_invariant.verify.harness.adapters import write_for

COVERED = reviews.ran().lora["cuda" if torch.cuda.is_available() else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
LAYERS = {
    "A": (8, ""),
    "B": (16, r"\.(q_proj|v_proj|up_proj)$"),
    "C": (64, r"\.(o_proj|k_proj)$"),
}
"""Rank and layers of an adapter: of all linear ones of the text model, of parts of fused ones, and of others."""
NAMES = (*LAYERS, None)
DTYPE = "bfloat16" if torch.cuda.is_available() else "float32"
MODELS = ("qwen2.5-vl", "qwen3-vl", "qwen3.5", "gemma3", "mistral3", "internvl3", "glm4.1v", "idefics3", "smolvlm")
CASES = OF_WORKERS | {"glm4.1v": of_family("glm4.1v")}  # with videos, which two workers do not take
SHARED = MODELS[:3]
"""Of which two workers share the encoder, too."""
QUANTISED = [
    *(("qwen2.5-vl", form) for form in (ROWS, INTEGERS)),
    *(("qwen3-vl", form) for form in (BLOCKS, ROWS, INTEGERS, "awq")),
    *(("qwen3.5", form) for form in (BLOCKS, INTEGERS)),
]
"""In bf16, with encoders in 16 bits."""
Runs = dict[str, dict[str, Any]]


def with_adapters(case: Case, folders: dict[str, Path]) -> dict[str, tuple[list[dict[str, Any]], slice, str]]:
    """The runs of a case, of whose targets each has another adapter than the one before."""

    def of(number: int, one: dict[str, Any]) -> dict[str, Any]:
        name = NAMES[number % len(NAMES)]
        return one if name is None else one | {"adapter": [name, 1 + number % len(NAMES), str(folders[name])]}

    found = {}
    for run, (requests, targets, reset) in case.runs.items():
        first = int(run.split()[-1]) if run.startswith("alone") else -(targets.start or 0)
        found[run] = [of(first + place, one) for place, one in enumerate(requests)], targets, reset
    return found


def elsewhere(adapter: Path, folder: Path) -> Path:
    """The same weights by names of layers that are not there, as those of a text model in another one may be."""
    shutil.copytree(adapter, folder)
    file = folder / "adapter_model.safetensors"
    named = {re.sub(r"\.(\d+)\.", r".9\1.", name, count=1): tensor for name, tensor in load_file(file).items()}
    save_file(named, file)
    return folder


def given(runs: Runs, names: dict[str, slice], run: str) -> Sequence[dict[str, Any]]:
    return runs[run]["given"][names[run]]


def check_company(name: str, folder: Path, dtype: str = DTYPE, workers: int = 1, form: str = "") -> None:
    """A request with images had the same bits in any company, and one without an adapter those of an engine without
    LoRA. Of weights that are stored in a form; empty: as they are.
    """
    case = CASES[name]
    config = case.config()
    case.save(config, getattr(torch, dtype), model := folder / "model")
    if form:
        model = write(model, FORMS[form], folder / "packed")
    patch = case.side or images.patch_of(config)
    folders = {of: write_for(folder / of, config, rank, rank, layers) for of, (rank, layers) in LAYERS.items()}
    runs = with_adapters(case, folders)
    names = {run: targets for run, (_, targets, _) in runs.items()}
    alone = [run for run in names if run.startswith("alone")]
    paths = [*case.path(folder / "path"), *multimodal.python_path(folder / "path"), PATHS]
    variables = SETTINGS | UNTRIED_THERE | {"PYTHONPATH": os.pathsep.join(paths)}
    limits = case.limits | OF_DEVICE | {"dtype": dtype}
    if workers > 1:
        variables |= cores_of(workers)
        limits |= {"tensor_parallel_size": workers}
    target = {key: value for key, value in runs["alone 0"][0][0].items() if key != "adapter"}
    with Engine(str(model), arguments_of(limits | ROOM), "1", variables, patience=500) as engine:

        def ask(run: str) -> dict[str, Any]:
            requests, _, reset = runs[run]
            return engine.call("tests.engine.images:answers", requests, patch, reset)

        found = {run: ask(run) for run in runs}
        faulty = {}
        for fault in FAULTS:
            engine.call(f"{IN_ENGINE}:plant", fault)
            faulty[fault] = ask("behind 3")
        engine.call(f"{IN_ENGINE}:plant", "")
        targets = json.loads((folders["A"] / "adapter_config.json").read_text())["target_modules"]
        kinds = [kind for kind in targets if kind != TRAILS]
        asked = [
            target | {"adapter": [kind, 10 + number, str(write_for(folder / kind, config, 8, number, rf"\.{kind}$"))]}
            for number, kind in enumerate(kinds)
        ]
        base, *of_kinds = (
            engine.call("tests.engine.images:answers", [one], patch, "cache")["given"] for one in (target, *asked)
        )
        strange = target | {"adapter": ["strange", 9, str(elsewhere(folders["A"], folder / "strange"))]}
        with pytest.raises(EngineFailed, match="which vLLM leaves out"):
            engine.call("tests.engine.images:answers", [strange], patch, "cache")
    with Engine(str(model), arguments_of(limits), "1", variables, patience=500) as engine:
        plain = engine.call("tests.engine.images:answers", runs["alone 3"][0], patch, "cache")["given"]
    right = [given(found, names, run)[0] for run in alone]
    moved = {run: differing_answers(given(found, names, run), right) for run in names if run not in alone}
    assert {run: places for run, places in moved.items() if places} == {}
    assert found["preempted"]["preemptions"] > 0
    shown = {of for of, one in faulty.items() if differing_answers(one["given"][names["behind 3"]], right)}
    rounded_to_itself = {EXPANDS} if dtype == "float32" else set()
    assert shown == {*FAULTS} - rounded_to_itself
    assert [kind for kind, one in zip(kinds, of_kinds, strict=True) if differing_answers(one, base) == []] == []
    assert differing_answers(plain, right[3:4]) == []


@pytest.mark.parametrize(
    ("name", "workers"),
    [*((name, 1) for name in MODELS), *(pytest.param(name, 2, marks=needs_two) for name in SHARED)],
)
def test_a_request_with_images_has_the_same_bits_in_any_company(name: str, workers: int, tmp_path: Path) -> None:
    check_company(name, tmp_path, workers=workers)


@pytest.mark.parametrize(("name", "form"), QUANTISED)
def test_adapters_of_quantised_weights_give_a_request_with_images_the_same_bits_in_any_company(
    name: str, form: str, tmp_path: Path
) -> None:
    check_company(name, tmp_path, "bfloat16", form=form)


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3.5"])
def test_a_text_model_alone_has_the_bits_that_it_has_beside_its_encoder(name: str, tmp_path: Path) -> None:
    case, model = CASES[name], tmp_path / "model"
    config = case.config()
    case.save(config, torch.float32, model)
    folder = write_for(tmp_path / "A", config, 8, 1, "")
    words = {"prompt": [*range(5, 60)], "images": [], "videos": [], "params": request([])["params"]}
    asked = [words, words | {"adapter": ["A", 1, str(folder)]}]
    found = []
    for settings in ({}, {"language_model_only": True}):
        limits = case.limits | OF_DEVICE | {"dtype": "float32"} | ROOM | settings
        path = os.pathsep.join([*multimodal.python_path(tmp_path / "path"), PATHS])
        variables = SETTINGS | UNTRIED_THERE | {"PYTHONPATH": path}
        with Engine(str(model), arguments_of(limits), "1", variables, patience=500) as engine:
            found.append(engine.call("tests.engine.images:answers", asked, 16, "cache")["given"])
    assert differing_answers(*found) == []
    assert differing_answers(found[0][:1], found[0][1:]) == [0]

"""Weights that are replaced in an engine with LoRA adapters: requests with and without one have the bits of an engine
that was started with these weights, whether an adapter was there before or is posted afterwards, and in place.
"""

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.engine import images, kept_states, multimodal, test_images
from tests.engine.adapters import written
from tests.engine.engines import OF_DEVICE, PATHS, request, run, tokens
from tests.engine.test_adapters import COVERED, IN_ENGINE, asked
from tests.engine.test_adapters_hybrids import LAYERS
from tests.engine.test_experts import FAMILIES
from tests.engine.test_models import checkpoint as random_model
from tests.engine.test_quantised_hybrids import FAMILIES as OF_STATES
from tests.engine.test_reload import BEGUN, RELOADS, SHAPE, SLEEPS, TOKENS, WAYS
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.demo_model import make_checkpoint
from vllm_batch_invariant.verify.harness.adapters import ATTENTION, EMBEDDINGS, EXPERTS, write_for
from vllm_batch_invariant.verify.harness.worker import Engine, EngineFailed
from vllm_batch_invariant.verify.quantised_model import quantise

pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU's are tests/engine/reload_cuda.py"),
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
SETTINGS = {
    "max_model_len": 512,
    "max_num_seqs": 8,
    "skip_tokenizer_init": True,
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "max_lora_rank": 64,
    "worker_extension_cls": f"{RELOADS}.Extension",
    "weight_transfer_config": '{"backend": "files"}',
    **OF_DEVICE,
}
STAYS, POSTED = "stays", "posted"
"""Names of two adapters: one has the same files throughout, the other gets those of the next step each time."""
STEPS = ("first", "second")
"""Folders of the posted adapter's files, in turn."""
ASKED = (STAYS, None, POSTED)
NUMBERS = {STAYS: 1, POSTED: 2}
IN_PLACE = ("put_back", "write_in_place")
"""Ways to write weights where they lie, which go back to the first checkpoint."""
TARGET = request(tokens(300, 1), max_tokens=TOKENS)
"""More than a page, so that there is something to find in the prefix cache."""
CHECKPOINTS = (0, 1)
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@dataclass(frozen=True)
class Model:
    """A model whose weights are replaced.

    Attributes:
        save: writes its first checkpoint into a folder.
        target: what its engines are asked.
        limits: of its engines, and variables of theirs.
    """

    save: Callable[[Path], object]
    target: dict[str, Any]
    limits: dict[str, Any] = field(default_factory=dict)

    def checkpoints(self, folder: Path) -> list[Path]:
        """Two, of which no tensor is the same."""
        first, second = (folder / str(which) for which in CHECKPOINTS)
        self.save(first)
        shutil.copytree(first, second)
        generator = torch.Generator().manual_seed(1)
        tensors = load_file(first / "model.safetensors")
        others = {name: _other(tensor, generator) for name, tensor in tensors.items()}
        save_file(others, second / "model.safetensors", metadata={"format": "pt"})
        return [first, second]

    def adapters(self, folder: Path, checkpoint: Path) -> dict[str, Path]:
        config = transformers.AutoConfig.from_pretrained(checkpoint)
        named = zip((*STEPS, STAYS), LAYERS.values(), strict=True)
        return {name: write_for(folder / name, config, rank, rank, layers) for name, (rank, layers) in named}

    def variables(self, folder: Path) -> dict[str, str]:
        """Of its engines; the folder is for what vLLM imports."""
        return {"PYTHONPATH": os.pathsep.join([*multimodal.python_path(folder), PATHS])}


def _other(tensor: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Near enough that a gate stays one."""
    factors, terms = (torch.randn(tensor.shape, generator=generator) for _ in range(2))
    return (tensor.float() * (1 + 0.3 * factors) + 0.01 * terms).to(tensor.dtype)


class Dense(Model):
    """As ``make-checkpoint`` writes them, whose embeddings take adapters, too."""

    def checkpoints(self, folder: Path) -> list[Path]:
        return [make_checkpoint(folder / str(which), SHAPE, which) for which in CHECKPOINTS]

    def adapters(self, folder: Path, checkpoint: Path) -> dict[str, Path]:
        made = {name: written(folder / name, checkpoint, 8 * rank, rank) for rank, name in enumerate(STEPS, 1)}
        return made | {STAYS: written(folder / STAYS, checkpoint, 64, 3, (*ATTENTION, *EMBEDDINGS))}


def with_states(name: str) -> Model:
    target = request(tokens(300, 1, kept_states.VOCABULARY), max_tokens=TOKENS)
    return Model(OF_STATES[name].source, target, {"max_num_batched_tokens": 61})


def with_images(config: Callable[[], transformers.PretrainedConfig]) -> Model:
    """An image behind more tokens than a page has, with one of which a chunk ends."""

    def save(folder: Path) -> None:
        images.save(config(), torch.bfloat16, folder)

    target = test_images.asked(1, 300, [test_images.OBLONG], 20, TOKENS) | {"patch": images.patch_of(config())}
    own = {name: limit for name, limit in test_images.LIMITS.items() if name != "max_num_seqs"}
    more = {"dtype": "bfloat16", "max_num_batched_tokens": test_images.BUDGET, "skip_tokenizer_init": False}
    return Model(save, target, own | more)


HYBRIDS = ("LFM2", "Qwen3.5", "Nemotron-H", "Falcon-H1")
SEEING = {
    "Qwen2.5-VL with images": images.qwen2_5_vl,
    "Qwen3-VL with images": images.qwen3_vl,
    "Qwen3.5 with images": images.qwen3_5,
}
MODELS: dict[str, Model] = {
    "dense": Dense(lambda folder: None, TARGET),
    **{name: with_states(name) for name in HYBRIDS},
    **{name: with_images(config) for name, config in SEEING.items()},
}


def answers(
    engine: Engine, folders: Mapping[str, Path], step: str, target: dict[str, Any] = TARGET, **how: Any
) -> dict[str, Any]:
    """What the target gets with each adapter, and how many tokens the prefix cache had."""
    known = {STAYS: folders[STAYS], POSTED: folders[step]}
    got = asked(engine, known, [(target, name) for name in ASKED], NUMBERS, **how)
    return {"answers": got["answers"], "cached": got["cached"]}


def fresh(engine: Engine, folders: Mapping[str, Path], target: dict[str, Any] = TARGET) -> dict[str, Any]:
    """By step, the answers of an engine that has had no others."""
    found = {}
    for step in STEPS:
        post(engine, folders, step)
        found[step] = answers(engine, folders, step, target)["answers"]
    return found


def post(engine: Engine, folders: Mapping[str, Path], step: str) -> None:
    """Load the files of a step in place of the ones before."""
    assert engine.call(f"{IN_ENGINE}:load", POSTED, NUMBERS[POSTED], str(folders[step]), True) == ""


class Replaced:
    """What one engine answers while its weights and one of its adapters are replaced; it is started with the first of
    the checkpoints.
    """

    def __init__(
        self, running: Engine, checkpoints: list[Path], folders: Mapping[str, Path], target: dict[str, Any]
    ) -> None:
        self._running, self._checkpoints, self._folders = running, [str(one) for one in checkpoints], folders
        self._target = target
        self.fresh = fresh(running, folders, target)
        self.got: dict[str, dict[str, Any]] = {}
        self.step_of: dict[str, str] = {}
        for number, way in enumerate(WAYS):
            for which in (1, 0):
                self._replace(f"{way} {which}", way, which, STEPS[(number + which) % 2], post_first=number % 2 == 0)
        self._call("call", "nothing")
        self._ask("nothing")
        for level in SLEEPS:
            self._call("sleep", level)
            self._ask(f"sleep {level}")
            self._step = STEPS[level - 1]
            self._running.call(f"{IN_ENGINE}:load_asleep", level, *self._posted(self._step))
            self._ask(f"posted in sleep {level}")
        self._call("call", "keep")
        for way in IN_PLACE:
            self._replace(f"before {way}", "by_reload_weights", 1, STEPS[0], post_first=True)
            self._call("call", way)
            self._ask(way)
        self.running = self._while_it_runs()
        self.faulty = self._without_looking()

    def _call(self, function: str, *arguments: object) -> Any:
        return self._running.call(f"{RELOADS}:{function}", *arguments)

    def _posted(self, step: str) -> list[Any]:
        return [POSTED, NUMBERS[POSTED], str(self._folders[step])]

    def _replace(self, name: str, way: str, which: int, step: str, post_first: bool) -> None:
        if post_first:
            post(self._running, self._folders, step)
        self._call(way, self._checkpoints[which])
        if not post_first:
            post(self._running, self._folders, step)
        self._step = step
        self._ask(name)

    def _ask(self, name: str) -> None:
        cold, warm = (answers(self._running, self._folders, self._step, self._target, reset=False) for _ in range(2))
        self.got[name] = cold | {"warm": warm}
        self.step_of[name] = self._step

    def _without_looking(self) -> dict[str, Any]:
        """A fault: nobody looks whether a call of the workers has replaced weights."""
        answers(self._running, self._folders, self._step, self._target)
        self._running.call(f"{IN_ENGINE}:replace_unseen", f"{RELOADS}:by_reload_weights", self._checkpoints[1])
        return answers(self._running, self._folders, self._step, self._target, reset=False)

    def _while_it_runs(self) -> dict[str, Any]:
        adapter = [STAYS, NUMBERS[STAYS], str(self._folders[STAYS])]
        one = self._target
        [whole] = self._call("replaced_while_it_runs", one, BEGUN, self._checkpoints[1], adapter)["completions"]
        begun = one | {"prompt": [*one["prompt"], *whole["tokens"][:BEGUN]]}
        begun["params"] = one["params"] | {"max_tokens": TOKENS - BEGUN}
        known = {STAYS: self._folders[STAYS]}
        [[rest], _] = asked(self._running, known, [(begun, STAYS)], {STAYS: 1})["answers"][0]
        self._call("by_reload_weights", self._checkpoints[0])
        [[old], _] = asked(self._running, known, [(one, STAYS)], {STAYS: 1})["answers"][0]
        return {"whole": whole, "rest": rest, "old": old}


@pytest.fixture(scope="module", params=["dense", "LFM2"])
def model(request: pytest.FixtureRequest) -> Model:
    return MODELS[request.param]


@pytest.fixture(scope="module")
def checkpoints(model: Model, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return model.checkpoints(tmp_path_factory.mktemp("weights"))


@pytest.fixture(scope="module")
def folders(model: Model, checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return model.adapters(tmp_path_factory.mktemp("adapters"), checkpoints[0])


@pytest.fixture(scope="module")
def variables(model: Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return model.variables(tmp_path_factory.mktemp("path"))


@pytest.fixture(scope="module")
def replaced(model: Model, checkpoints: list[Path], folders: dict[str, Path], variables: dict[str, str]) -> Replaced:
    afterwards = partial(Replaced, checkpoints=checkpoints, folders=folders, target=model.target)
    settings = {"model": str(checkpoints[0]), **SETTINGS, **model.limits}
    return run(settings, [], "1", afterwards=afterwards, **variables, **IN_PROCESS).afterwards


@pytest.fixture(scope="module")
def expected(
    model: Model, replaced: Replaced, checkpoints: list[Path], folders: dict[str, Path], variables: dict[str, str]
) -> list[dict[str, Any]]:
    """By checkpoint and step, the answers of a fresh engine."""
    settings = {"model": str(checkpoints[1]), **SETTINGS, **model.limits}
    afterwards = partial(fresh, folders=folders, target=model.target)
    return [replaced.fresh, run(settings, [], "1", afterwards=afterwards, **variables).afterwards]


def differing(replaced: Replaced, expected: list[dict[str, Any]], name: str, which: int) -> list[str | None]:
    """Adapters with which the target has other bits than in a fresh engine with a checkpoint."""
    right, got = expected[which][replaced.step_of[name]], replaced.got[name]["answers"]
    return [one for one, answer, other in zip(ASKED, got, right, strict=True) if answer != other]


@pytest.mark.parametrize("which", CHECKPOINTS)
@pytest.mark.parametrize("way", WAYS)
def test_replaced_weights_give_the_bits_of_a_fresh_engine(
    replaced: Replaced, expected: list[dict[str, Any]], way: str, which: int
) -> None:
    assert differing(replaced, expected, f"{way} {which}", which) == []


@pytest.mark.parametrize("which", CHECKPOINTS)
@pytest.mark.parametrize("way", WAYS)
def test_no_key_of_other_weights_or_adapters_is_found(replaced: Replaced, way: str, which: int) -> None:
    got = replaced.got[f"{way} {which}"]
    assert got["cached"] == [0, 0, 0]
    assert min(got["warm"]["cached"]) >= 128
    assert got["warm"]["answers"] == got["answers"]


@pytest.mark.parametrize("way", IN_PLACE)
def test_weights_written_where_they_lie_serve_at_once(
    replaced: Replaced, expected: list[dict[str, Any]], way: str
) -> None:
    assert differing(replaced, expected, f"before {way}", 1) == []
    assert differing(replaced, expected, way, 0) == []
    assert replaced.got[way]["cached"] == [0, 0, 0]


@pytest.mark.parametrize("level", SLEEPS)
def test_adapters_are_there_after_a_sleep_and_may_be_posted_in_it(
    replaced: Replaced, expected: list[dict[str, Any]], level: int
) -> None:
    """On a CPU vLLM takes nothing away meanwhile but the prefix cache."""
    for name in (f"sleep {level}", f"posted in sleep {level}"):
        assert differing(replaced, expected, name, 0) == []
        assert replaced.got[name]["cached"] == [0, 0, 0]


def test_a_call_that_replaces_nothing_leaves_the_prefix_cache_alone(
    replaced: Replaced, expected: list[dict[str, Any]]
) -> None:
    assert min(replaced.got["nothing"]["cached"]) >= 128
    assert differing(replaced, expected, "nothing", 0) == []


def test_a_request_that_runs_goes_on_as_if_the_new_weights_had_read_all_before(replaced: Replaced) -> None:
    whole, rest, old = (replaced.running[name] for name in ("whole", "rest", "old"))
    for part in ("tokens", "logprobs"):
        assert whole[part][:BEGUN] == old[part][:BEGUN]
        assert whole[part][BEGUN:] == rest[part]
    assert whole["logprobs"][BEGUN] != old["logprobs"][BEGUN]


def test_the_comparison_can_fail(replaced: Replaced, expected: list[dict[str, Any]]) -> None:
    """Each checkpoint and adapter has bits of its own, and keys of the weights before would show."""
    of_all = [str(answer) for one in expected for step in STEPS for answer in one[step]]
    assert len({*of_all}) == len(CHECKPOINTS) * (len(STEPS) + 2)
    right = expected[1][replaced.step_of[IN_PLACE[-1]]]
    assert min(replaced.faulty["cached"]) >= 128
    assert all(answer != other for answer, other in zip(replaced.faulty["answers"], right, strict=True))


OTHERS = {
    "two workers": ("", {"tensor_parallel_size": 2}, {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}),
    "INT4": ("w4a16-g128", {}, {}),
    "FP8 in blocks": ("w8a8-fp8-block", {}, {}),
}
"""Other engines: the form of their weights, settings and variables."""
OF_OTHERS = (("by_reload_weights", 1), ("by_buckets", 0), ("by_name", 1))
"""How their weights are replaced, and by those of which checkpoint."""


def assert_replaced(
    models: Sequence[Path],
    folders: Mapping[str, Path],
    more: Mapping[str, Any],
    variables: Mapping[str, str],
    target: dict[str, Any] = TARGET,
    ways: Sequence[tuple[str, int]] = OF_OTHERS,
) -> None:
    """An engine of the first model has the second's bits, and its own again, as its weights are replaced."""

    def in_turn(engine: Engine) -> list[Any]:
        found = [fresh(engine, folders, target)]
        for way, which in ways:
            engine.call(f"{RELOADS}:{way}", str(models[which]))
            found.append(fresh(engine, folders, target))
        return found

    first, second = (SETTINGS | {"model": str(model), **more} for model in models)
    was, *replaced = run(first, [], "1", afterwards=in_turn, **variables).afterwards
    other = run(second, [], "1", afterwards=partial(fresh, folders=folders, target=target), **variables).afterwards
    assert was != other
    assert [got == (was, other)[which] for got, (_, which) in zip(replaced, ways, strict=True)] == [True] * len(ways)


@pytest.mark.parametrize("name", OTHERS)
def test_other_engines_serve_replaced_weights_with_adapters(name: str, tmp_path: Path) -> None:
    form, more, variables = OTHERS[name]
    dense = MODELS["dense"]
    models = dense.checkpoints(tmp_path)
    folders = dense.adapters(tmp_path, models[0])
    for model in models if form else ():
        quantise(model, form)
    assert_replaced(models, folders, more, variables)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", [*HYBRIDS, *SEEING])
def test_weights_beside_states_and_images_are_replaced_beneath_adapters(
    name: str, workers: int, tmp_path: Path
) -> None:
    of = MODELS[name]
    models = of.checkpoints(tmp_path)
    variables = of.variables(tmp_path / "path") | (kept_states.cores_of(workers) if workers > 1 else {})
    more = of.limits | {"tensor_parallel_size": workers}
    ways = OF_OTHERS if workers == 1 else OF_OTHERS[:1]
    assert_replaced(models, of.adapters(tmp_path, models[0]), more, variables, of.target, ways)


MIXTURES = ("Qwen3-MoE", "Qwen2-MoE with a shared expert", "Mixtral", "OLMoE without renormalised weights")


@pytest.mark.parametrize("family", MIXTURES)
def test_experts_with_adapters_serve_replaced_weights(family: str, tmp_path: Path) -> None:
    models = [tmp_path / str(seed) for seed in CHECKPOINTS]
    for seed, model in enumerate(models):
        if family in FAMILIES:
            random_model(FAMILIES[family], torch.bfloat16, seed).save_pretrained(model)
        else:
            make_checkpoint(model, replace(SHAPE, experts=4, top_k=2, expert_intermediate=192), seed)
    targets = {"first": (*ATTENTION, EXPERTS), "second": (EXPERTS,), STAYS: (*ATTENTION, EXPERTS)}
    made = {name: written(tmp_path / name, models[0], 16, rank, of) for rank, (name, of) in enumerate(targets.items())}
    assert_replaced(models, made, {}, {})


def test_new_weights_of_gpt_oss_with_adapters_are_refused(tmp_path: Path) -> None:
    family = next(name for name in FAMILIES if name.startswith("gpt-oss"))
    random_model(FAMILIES[family], torch.bfloat16).save_pretrained(tmp_path)

    def replace(engine: Engine) -> str:
        try:
            engine.call(f"{RELOADS}:by_reload_weights", str(tmp_path))
        except EngineFailed as error:
            return str(error)
        return ""

    said = run({"model": str(tmp_path), **SETTINGS}, [], "1", afterwards=replace).afterwards
    assert "new weights of GptOssForCausalLM with LoRA adapters" in said

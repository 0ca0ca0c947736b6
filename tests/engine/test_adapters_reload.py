"""Weights that are replaced in an engine with LoRA adapters: requests with and without one have the bits of an engine
that was started with these weights, whether an adapter was there before or is posted afterwards, and in place.
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.adapters import written
from tests.engine.engines import OF_DEVICE, request, run, tokens
from tests.engine.test_adapters import COVERED, IN_ENGINE, asked
from tests.engine.test_experts import FAMILIES
from tests.engine.test_models import checkpoint as random_model
from tests.engine.test_reload import BEGUN, RELOADS, SHAPE, SLEEPS, TOKENS, WAYS
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.demo_model import make_checkpoint
from vllm_batch_invariant.verify.harness.adapters import ATTENTION, EMBEDDINGS, EXPERTS
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


def answers(engine: Engine, folders: Mapping[str, Path], step: str, **how: Any) -> dict[str, Any]:
    """What the target gets with each adapter, and how many tokens the prefix cache had."""
    known = {STAYS: folders[STAYS], POSTED: folders[step]}
    got = asked(engine, known, [(TARGET, name) for name in ASKED], NUMBERS, **how)
    return {"answers": got["answers"], "cached": got["cached"]}


def fresh(engine: Engine, folders: Mapping[str, Path]) -> dict[str, Any]:
    """By step, the answers of an engine that has had no others."""
    found = {}
    for step in STEPS:
        post(engine, folders, step)
        found[step] = answers(engine, folders, step)["answers"]
    return found


def post(engine: Engine, folders: Mapping[str, Path], step: str) -> None:
    """Load the files of a step in place of the ones before."""
    assert engine.call(f"{IN_ENGINE}:load", POSTED, NUMBERS[POSTED], str(folders[step]), True) == ""


class Replaced:
    """What one engine answers while its weights and one of its adapters are replaced; it is started with the first of
    the checkpoints.
    """

    def __init__(self, running: Engine, checkpoints: list[Path], folders: Mapping[str, Path]) -> None:
        self._running, self._checkpoints, self._folders = running, [str(one) for one in checkpoints], folders
        self.fresh = fresh(running, folders)
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
        cold, warm = (answers(self._running, self._folders, self._step, reset=False) for _ in range(2))
        self.got[name] = cold | {"warm": warm}
        self.step_of[name] = self._step

    def _without_looking(self) -> dict[str, Any]:
        """A fault: nobody looks whether a call of the workers has replaced weights."""
        answers(self._running, self._folders, self._step)
        self._running.call(f"{IN_ENGINE}:replace_unseen", f"{RELOADS}:by_reload_weights", self._checkpoints[1])
        return answers(self._running, self._folders, self._step, reset=False)

    def _while_it_runs(self) -> dict[str, Any]:
        adapter = [STAYS, NUMBERS[STAYS], str(self._folders[STAYS])]
        one = request(TARGET["prompt"], max_tokens=TOKENS)
        [whole] = self._call("replaced_while_it_runs", one, BEGUN, self._checkpoints[1], adapter)["completions"]
        begun = request([*one["prompt"], *whole["tokens"][:BEGUN]], max_tokens=TOKENS - BEGUN)
        known = {STAYS: self._folders[STAYS]}
        [[rest], _] = asked(self._running, known, [(begun, STAYS)], {STAYS: 1})["answers"][0]
        self._call("by_reload_weights", self._checkpoints[0])
        [[old], _] = asked(self._running, known, [(one, STAYS)], {STAYS: 1})["answers"][0]
        return {"whole": whole, "rest": rest, "old": old}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return [make_checkpoint(tmp_path_factory.mktemp("weights"), SHAPE, seed) for seed in CHECKPOINTS]


@pytest.fixture(scope="module")
def folders(checkpoints: list[Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, model = tmp_path_factory.mktemp("adapters"), checkpoints[0]
    made = {name: written(folder / name, model, 8 * rank, rank) for rank, name in enumerate(STEPS, 1)}
    return made | {STAYS: written(folder / STAYS, model, 64, 3, (*ATTENTION, *EMBEDDINGS))}


@pytest.fixture(scope="module")
def replaced(checkpoints: list[Path], folders: dict[str, Path]) -> Replaced:
    afterwards = partial(Replaced, checkpoints=checkpoints, folders=folders)
    return run({"model": str(checkpoints[0]), **SETTINGS}, [], "1", afterwards=afterwards, **IN_PROCESS).afterwards


@pytest.fixture(scope="module")
def expected(replaced: Replaced, checkpoints: list[Path], folders: dict[str, Path]) -> list[dict[str, Any]]:
    """By checkpoint and step, the answers of a fresh engine."""
    settings = {"model": str(checkpoints[1]), **SETTINGS}
    return [replaced.fresh, run(settings, [], "1", afterwards=partial(fresh, folders=folders)).afterwards]


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
    models: Sequence[Path], folders: Mapping[str, Path], more: Mapping[str, Any], variables: Mapping[str, str]
) -> None:
    """An engine of the first model has the second's bits, and its own again, as its weights are replaced."""

    def in_turn(engine: Engine) -> list[Any]:
        found = [fresh(engine, folders)]
        for way, which in OF_OTHERS:
            engine.call(f"{RELOADS}:{way}", str(models[which]))
            found.append(fresh(engine, folders))
        return found

    first, second = (SETTINGS | {"model": str(model), **more} for model in models)
    was, *replaced = run(first, [], "1", afterwards=in_turn, **variables).afterwards
    other = run(second, [], "1", afterwards=partial(fresh, folders=folders), **variables).afterwards
    assert was != other
    assert [got == (was, other)[which] for got, (_, which) in zip(replaced, OF_OTHERS, strict=True)] == [True] * 3


@pytest.mark.parametrize("name", OTHERS)
def test_other_engines_serve_replaced_weights_with_adapters(
    checkpoints: list[Path], folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    form, more, variables = OTHERS[name]
    models = [shutil.copytree(one, tmp_path / str(which)) for which, one in enumerate(checkpoints)]
    for model in models if form else ():
        quantise(model, form)
    assert_replaced(models, folders, more, variables)


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

"""Keys and values that one engine stores and another one loads give the bits of one engine that computes them."""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import stores
from tests.engine.engines import EAGER_ON_GPU, OF_DEVICE, Result, request, run, tokens
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

RELOADS = "tests.engine.reloads"
SHAPE = Shape(intermediate=512, layers=2, dtype="bfloat16")
LENGTHS = (130, 300, 257)
"""Of prompts: a page and more, several, and one whose last token is alone behind full pages."""
RUNNERS = ("0", "1") if torch.cuda.is_available() else ("",)
"""vLLM's model runners, by the variable that chooses one; on a CPU there is one."""
ALL: dict[str, Any] = {"name": "all", "requests": [request(tokens(n, n), max_tokens=12, logprobs=5) for n in LENGTHS]}
PREFILLS = {"name": "prefills", "requests": [request(tokens(n, n), max_tokens=1) for n in LENGTHS]}
SAMPLED = {
    "name": "sampled",
    "requests": [request(tokens(n, n), max_tokens=12, temperature=1.0, seed=n, logprobs=5) for n in LENGTHS],
}
AGAIN = {**ALL, "name": "again", "reset_prefix_cache": True}
PREEMPTED = {**SAMPLED, "name": "preempted", "reset_prefix_cache": True, "preempt_after": 4}
STEPS = [ALL, SAMPLED, AGAIN, PREEMPTED]


def answers(
    model: Path,
    store: Path | None,
    steps: Sequence[dict[str, Any]],
    flag: str | None = "1",
    runner: str = RUNNERS[-1],
    afterwards: Callable[[Engine], Any] = lambda engine: None,
    **settings: Any,
) -> Result:
    """Of an engine; with a store, one that stores and loads there."""
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    connector |= {"kv_connector_extra_config": {"shared_storage_path": str(store)}}
    engine = {"model": str(model), "max_model_len": 512, "max_num_seqs": 8, **OF_DEVICE, **EAGER_ON_GPU, **settings}
    engine |= {} if store is None else {"kv_transfer_config": json.dumps(connector)}
    return run(engine, list(steps), flag, afterwards=afterwards, **of_runner(runner))


def of_runner(runner: str) -> dict[str, str]:
    """Variables."""
    return {"VLLM_USE_V2_MODEL_RUNNER": runner} if runner else {}


def bits(result: Result, step: str) -> list[Any]:
    return [one["completions"] for one in result.steps[step]]


def cached(result: Result, step: str) -> list[int]:
    return [one["cached"] for one in result.steps[step]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), SHAPE)


@pytest.fixture(scope="module")
def computed(model: Path) -> Callable[[str], Result]:
    """What an engine of a model runner gives that stores nothing; the two draw other tokens with a seed."""
    return cache(lambda runner: answers(model, None, STEPS, runner=runner))


@pytest.fixture(scope="module")
def alone(computed: Callable[[str], Result]) -> Result:
    return computed(RUNNERS[-1])


@pytest.fixture(scope="module")
def stored(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """What an engine of a model runner left that computed the prompts alone."""

    @cache
    def by(runner: str) -> Path:
        folder = tmp_path_factory.mktemp("store")
        answers(model, folder, [PREFILLS], runner=runner)
        return folder

    return by


@pytest.fixture(scope="module")
def store(stored: Callable[[str], Path]) -> Path:
    return stored(RUNNERS[-1])


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with other weights."""
    return make_checkpoint(tmp_path_factory.mktemp("other"), SHAPE, seed=1)


@pytest.fixture(scope="module")
def fresh(other: Path) -> Result:
    """An engine with them that stores nothing."""
    return answers(other, None, [ALL])


def prompts_in(store: Path) -> list[Path]:
    return sorted(path for path in store.glob("*/*") if path.is_dir())


@pytest.mark.parametrize("runner", RUNNERS)
def test_prefill_by_one_engine_and_decode_by_another_are_one_engine(
    model: Path, computed: Callable[[str], Result], stored: Callable[[str], Path], tmp_path: Path, runner: str
) -> None:
    """The model runner is a part of the key."""
    store, alone = stored(runner), computed(runner)
    assert len(prompts_in(store)) == len(LENGTHS)
    shutil.copytree(store, tmp_path / "store")
    found = answers(model, tmp_path / "store", STEPS, runner=runner)
    assert min(cached(found, "all")[:2]) >= 128  # loaded, since this engine has computed nothing before
    assert min(cached(found, "again")[:2]) >= 128  # evicted, and loaded again
    assert found.preemptions
    for step in STEPS:
        assert bits(found, step["name"]) == bits(alone, step["name"]), step["name"]


def test_a_bit_that_flips_in_a_file_changes_the_answer(model: Path, alone: Result, store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "store")
    for folder in prompts_in(tmp_path / "store"):
        stores.flip(next(folder.iterdir()))
    found = answers(model, tmp_path / "store", [ALL])
    assert bits(found, "all")[:2] != bits(alone, "all")[:2]


def test_what_other_weights_have_stored_is_not_found(other: Path, fresh: Result, store: Path, tmp_path: Path) -> None:
    shutil.copytree(store, tmp_path / "store")
    found = answers(other, tmp_path / "store", [ALL])
    assert cached(found, "all") == [0, 0, 0]
    assert bits(found, "all") == bits(fresh, "all")
    [theirs] = store.iterdir()
    [mine] = [path for path in (tmp_path / "store").iterdir() if path.name != theirs.name]
    shutil.rmtree(mine)
    (tmp_path / "store" / theirs.name).rename(mine)  # nothing but the name has kept them apart
    assert bits(answers(other, tmp_path / "store", [ALL]), "all") != bits(fresh, "all")


def test_weights_that_are_replaced_find_nothing_and_find_it_when_they_come_back(
    model: Path, other: Path, alone: Result, fresh: Result, store: Path, tmp_path: Path
) -> None:
    shutil.copytree(store, tmp_path / "store")

    def replaced(running: Engine) -> list[list[dict[str, Any]]]:
        found = []
        for folder in (other, model):
            running.call(f"{RELOADS}:by_reload_weights", str(folder))
            found.append(running.step("all", ALL["requests"]).requests)
        return found

    settings = {"worker_extension_cls": f"{RELOADS}.Extension", "weight_transfer_config": '{"backend": "files"}'}
    found = answers(model, tmp_path / "store", [ALL], afterwards=replaced, **settings)
    theirs, mine = found.afterwards
    assert [one["cached"] for one in theirs] == [0, 0, 0]
    assert [one["completions"] for one in theirs] == bits(fresh, "all")
    assert min(one["cached"] for one in mine[:2]) >= 128
    assert [one["completions"] for one in mine] == bits(alone, "all")


def test_neither_plain_vllm_nor_the_mode_finds_what_the_other_has_stored(
    model: Path, alone: Result, store: Path, tmp_path: Path
) -> None:
    shutil.copytree(store, tmp_path / "store")
    plain = answers(model, tmp_path / "store", [PREFILLS], flag=None)
    assert cached(plain, "prefills") == [0, 0, 0]
    for folder in prompts_in(tmp_path / "store"):
        if len(folder.parent.name) == 64:
            shutil.rmtree(folder)
    found = answers(model, tmp_path / "store", [ALL])
    assert cached(found, "all") == [0, 0, 0]
    assert bits(found, "all") == bits(alone, "all")


def test_a_part_of_a_prompt_is_not_stored_as_the_whole(model: Path, alone: Result, tmp_path: Path) -> None:
    chunks = {"max_num_batched_tokens": 100}
    for _ in range(2):
        assert bits(answers(model, tmp_path, [ALL], **chunks), "all") == bits(alone, "all")
    assert prompts_in(tmp_path) == []

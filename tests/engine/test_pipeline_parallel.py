"""The layers of a model lie in several stages: a request has the bits that it has in one, in any batch."""

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.engines import (
    EAGER_ON_GPU,
    OF_DEVICE,
    Result,
    differing_answers,
    request,
    run,
    tokens,
    untried_on_gpu,
)
from tests.engine.plans import alone_and_among, moved
from tests.engine.test_models import MODELS, checkpoint
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.worker import Engine
from vllm_batch_invariant.verify.quantised_model import quantise

ON_GPU = torch.cuda.is_available()
pytestmark = [pytest.mark.engine, pytest.mark.core]

SIZES = {"hidden": 512, "intermediate": 1536, "layers": 4, "heads": 8, "kv_heads": 2, "head_size": 64}
LIMITS = {"max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512}
LAST = "model.layers.2.self_attn.v_proj.weight"
FAULTY = "model.layers.2.mlp.down_proj"
"""A weight and a layer of the second of two stages."""


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), Shape(max_length=1024, **SIZES))


@pytest.fixture(scope="module")
def start(dense: Path) -> Callable[..., Result]:
    """An engine whose stages, and workers of a stage, have a thread each."""

    def engine(
        flag: str = "1",
        steps: list[dict[str, Any]] | None = None,
        stages: int = 2,
        workers: int = 1,
        model: Path = dense,
        bisection: Sequence[Any] = (),
        tree: int = 1,
        afterwards: Callable[[Engine], Any] = lambda engine: None,
        **others: Any,
    ) -> Result:
        parallel = {"pipeline_parallel_size": stages, "tensor_parallel_size": workers}
        parallel["distributed_executor_backend"] = "mp"  # in the driver's process one worker would have all cores
        cores = "|".join(str(rank % 2) for rank in range(stages * workers))
        if ON_GPU and stages * workers > torch.cuda.device_count():
            pytest.skip(f"needs {stages * workers} GPUs")
        settings = {"model": str(model)} | LIMITS | parallel | OF_DEVICE | others
        variables = {"VLLM_CPU_OMP_THREADS_BIND": cores, TP_TREE.name: str(tree)}
        return run(settings, steps or FEW, flag, bisection=bisection, afterwards=afterwards, **variables)

    return engine


ASKED = request(tokens(300, 1), max_tokens=8)
FEW = [step for step in alone_and_among() if step["name"].startswith(("alone", "among 17"))]
"""Steps of the plan that other engines run as well."""


def differing(one: Result, other: Result) -> dict[str, list[int]]:
    """Requests of those steps, by their step, whose tokens, logprobs, candidates or prompt logprobs are not equal."""
    pairs = {step["name"]: (one.steps[step["name"]], other.steps[step["name"]]) for step in FEW}
    found = {name: differing_answers(*pair) for name, pair in pairs.items()}
    return {name: requests for name, requests in found.items() if requests}


@pytest.fixture(scope="module")
def two(start: Callable[..., Result]) -> Result:
    """An engine of two stages."""
    return start(steps=FEW)


@pytest.fixture(scope="module")
def changed(start: Callable[..., Result], dense: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """An engine of two stages: the second is given other weights, and it is bisected without a fault and with some."""
    other = tmp_path_factory.mktemp("other")
    shutil.copytree(dense, other, dirs_exist_ok=True)
    weights = load_file(dense / "model.safetensors")
    save_file(weights | {LAST: -weights[LAST]}, other / "model.safetensors", metadata={"format": "pt"})

    def replaced(running: Engine) -> list[dict[str, Any]]:
        asked = {"name": "asked", "requests": [ASKED]}
        before = [running.step(**asked, reset_prefix_cache=cold).requests[0] for cold in (True, False)]
        running.call("tests.engine.reloads:by_reload_weights", str(other))
        after = [running.step(**asked, reset_prefix_cache=cold).requests[0] for cold in (False, False, True)]
        return [*before, *after]

    return start(steps=alone_and_among(), bisection=("in_a_worker", 1, FAULTY), afterwards=replaced, **EAGER_ON_GPU)


def test_a_request_has_the_same_bits_alone_and_among_others(two: Result) -> None:
    assert moved(two) == []


@pytest.mark.exhaustive
def test_a_bisection_names_a_fault_and_the_worker_that_has_its_stage(changed: Result) -> None:
    assert changed.bisected["no fault"]["found"] is None, changed.bisected["no fault"]["verdict"]
    found = changed.bisected["a fault"]["found"]
    assert (found["divergence"]["key"]["module"], found["rank"], found["workers"]) == (FAULTY, 1, 2)


@pytest.mark.exhaustive
def test_a_bisection_names_the_first_stage_that_differs(changed: Result) -> None:
    found = changed.bisected["a fault in the worker before"]["found"]
    assert (found["divergence"]["key"]["module"], found["rank"]) == ("model.layers.1.mlp.down_proj", 0)


@pytest.mark.exhaustive
def test_other_weights_of_the_second_stage_empty_the_prefix_cache(changed: Result) -> None:
    cold, warm, replaced, warm_again, cold_again = changed.afterwards
    assert [answer["cached"] > 0 for answer in changed.afterwards] == [False, True, False, True, False]
    assert warm["completions"] == cold["completions"] != replaced["completions"]
    assert replaced["completions"] == warm_again["completions"] == cold_again["completions"]


@pytest.mark.skipif(ON_GPU, reason="on a GPU this model is too small for plain vLLM to vary")
@pytest.mark.exhaustive
def test_plain_vllm_fails_the_same_comparison(start: Callable[..., Result]) -> None:
    assert moved(start("0", dtype="float32"))


@pytest.mark.parametrize(("stages", "dtype"), [(2, "bfloat16"), (2, "float16"), (4, "float32")])
@pytest.mark.exhaustive
def test_stages_give_the_bits_of_one(two: Result, start: Callable[..., Result], stages: int, dtype: str) -> None:
    several = two if dtype == "bfloat16" else start(stages=stages, dtype=dtype)
    assert differing(several, start(stages=1, dtype=dtype)) == {}


@untried_on_gpu
@pytest.mark.exhaustive
def test_stages_of_two_workers_give_the_bits_of_two_workers(two: Result, start: Callable[..., Result]) -> None:
    """Other bits than those of one worker, so the comparison can fail."""
    both = start(stages=2, workers=2)
    assert differing(both, start(stages=1, workers=2)) == {}
    assert differing(both, two)


@untried_on_gpu
@pytest.mark.exhaustive
def test_stages_whose_workers_add_a_tree_give_the_bits_of_one_worker(start: Callable[..., Result]) -> None:
    assert differing(start(stages=2, workers=2, tree=2), start(stages=1, workers=1, tree=2)) == {}


@untried_on_gpu
@pytest.mark.exhaustive
def test_experts_in_two_stages_give_the_bits_of_one(start: Callable[..., Result], tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path, Shape(max_length=1024, experts=8, **SIZES))
    several = start(steps=alone_and_among(), model=model)
    assert moved(several) == []
    assert differing(several, start(stages=1, model=model)) == {}


@untried_on_gpu
@pytest.mark.exhaustive
def test_stages_in_fp8_give_the_bits_of_one(
    two: Result, start: Callable[..., Result], dense: Path, tmp_path: Path
) -> None:
    """Other bits than those of 16 bits, so the comparison can fail."""
    model = shutil.copytree(dense, tmp_path / "fp8")
    quantise(model, "w8a8-fp8-block")
    several = start(model=model)
    assert moved(several) == []
    assert differing(several, start(stages=1, model=model)) == {}
    assert differing(several, two)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.exhaustive
def test_stages_of_other_architectures_give_the_bits_of_one(
    start: Callable[..., Result], family: str, tmp_path: Path
) -> None:
    """Some hand on one tensor, and no residual."""
    config, dtype = MODELS[family]
    checkpoint(config, dtype).save_pretrained(tmp_path)
    settings = {"model": tmp_path, "skip_tokenizer_init": True}
    assert differing(start(**settings), start(stages=1, **settings)) == {}

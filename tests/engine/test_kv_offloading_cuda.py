"""Keys and values that an engine on a GPU moves to the memory of the CPU come back with their bits."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import OF_DEVICE, Result, request, run, tokens
from tests.engine.test_kv_connectors import RUNNERS, SHAPE, of_runner
from vllm_batch_invariant.verify.demo_model import make_checkpoint
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
PROMPTS = 20
TURNS = [
    {"name": f"{turn} {which}", "requests": [request(tokens(400, which), max_tokens=8, logprobs=5)]}
    for turn in ("first", "second")
    for which in range(PROMPTS)
]
"""Each prompt alone, and all of them in turn: the cache of the GPU has room for less than all."""


def settings(model: Path, connector: str = "") -> dict[str, Any]:
    moved = {"kv_connector": connector, "kv_role": "kv_both"}
    moved |= {"kv_connector_extra_config": {"cpu_bytes_to_use": 1 << 30}}
    engine = {"model": str(model), "max_model_len": 512, "max_num_seqs": 4, **OF_DEVICE}
    engine |= {"block_size": 16, "num_gpu_blocks_override": 200}
    return engine | ({"kv_transfer_config": json.dumps(moved)} if connector else {})


def asked(model: Path, connector: str = "", runner: str = "1", **more: Any) -> Result:
    return run(settings(model, connector), TURNS, "1", **of_runner(runner), **more)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), SHAPE)


@pytest.fixture(scope="module")
def alone(model: Path) -> Result:
    return asked(model)


def taken(result: Result, turn: str) -> list[int]:
    """Tokens of each prompt that were not computed."""
    return [result.steps[f"{turn} {which}"][0]["cached"] for which in range(PROMPTS)]


@pytest.mark.parametrize("runner", RUNNERS)
@pytest.mark.parametrize("connector", CONNECTORS)
def test_what_the_gpu_has_let_go_of_comes_back_with_its_bits(
    model: Path, alone: Result, connector: str, runner: str
) -> None:
    found = asked(model, connector, runner)
    assert sum(taken(alone, "second")) < sum(taken(found, "second"))
    for turn in TURNS:
        assert found.completions(turn["name"]) == alone.completions(turn["name"]), turn["name"]


@pytest.mark.parametrize("connector", CONNECTORS)
def test_a_bit_that_flips_in_the_memory_of_the_cpu_is_seen(model: Path, alone: Result, connector: str) -> None:
    def ask_again(running: Engine) -> list[Any]:
        assert running.call("tests.engine.stores:flip_in_memory") > 0
        return [running.step("again", turn["requests"]).requests[0]["completions"] for turn in TURNS[:PROMPTS]]

    again = asked(model, connector, afterwards=ask_again).afterwards
    assert again != [alone.completions(f"first {which}") for which in range(PROMPTS)]

"""Two engines that share the experts of one model, each in a process of a user's, as vLLM has data parallelism offline:
whichever answers, and whatever the other one does, a request has the same bits. (vLLM refuses dense models there.)
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from tests.engine.engines import OF_DEVICE, SETTINGS, arguments_of, differing_answers
from tests.engine.plans import GREEDY, SEEDED
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.requests import concurrent_requests, request, tokens
from vllm_batch_invariant.verify.harness.server import free_port
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = [pytest.mark.engine]

SHAPE = Shape(hidden=512, intermediate=1024, layers=3, heads=8, experts=8, expert_intermediate=256)
LIMITS = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 512, "skip_tokenizer_init": True}
TARGETS = [*GREEDY, SEEDED]
ONE = [request(tokens(1, 5), max_tokens=1)]
"""The least: every process must ask for something, because none wakes the engine of another."""
WITH = {
    "nothing": [],
    "few": concurrent_requests(3, 3),
    "many": concurrent_requests(50, 50, max_tokens=9),
    "a long prompt": [request(tokens(900, 77), max_tokens=3)],
}
"""What an engine has beside the targets, or in their place."""


class Together:
    """Both engines, of which each step is taken by both."""

    def __init__(self, engines: list[Engine]) -> None:
        self._engines, self._pool = engines, ThreadPoolExecutor(len(engines))

    def step(self, name: str, *requests: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
        """What each engine answers to requests of its own."""
        asked = [
            self._pool.submit(engine.step, name, own or ONE, reset_prefix_cache=True)
            for engine, own in zip(self._engines, requests, strict=True)
        ]
        return [step.result().requests for step in asked]

    def call(self, function: str, *arguments: object) -> None:
        """Call a function in both."""
        for done in [self._pool.submit(engine.call, function, *arguments) for engine in self._engines]:
            done.result()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two sets of weights of a model."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    return [str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPE, seed)) for seed in (0, 1)]


@pytest.fixture(scope="module")
def started(folders: list[str]) -> Iterator[Together]:
    port = str(free_port())

    def engine(rank: int) -> Engine:
        place = {"RANK": str(rank), "RANK_LOCAL": str(rank), "SIZE": "2", "MASTER_IP": "127.0.0.1", "MASTER_PORT": port}
        variables = {f"VLLM_DP_{name}": value for name, value in place.items()}
        variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
        return Engine(folders[0], arguments_of(LIMITS | OF_DEVICE), "1", SETTINGS | variables, patience=200)

    engines = [engine(rank) for rank in range(2)]
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        for entered in [pool.submit(engine.__enter__) for engine in engines]:
            entered.result()
        for engine in engines:
            stack.push(engine.__exit__)
        yield Together(engines)


def test_a_request_has_the_same_bits_whichever_engine_answers_and_whatever_the_other_does(started: Together) -> None:
    alone, _ = started.step("alone", TARGETS[:1], [])
    for number, target in enumerate(TARGETS[1:], 1):
        alone += started.step(f"alone {number}", [target], [])[0]
    for own, beside in WITH.items():
        for others, elsewhere in WITH.items():
            left, _ = started.step(f"{own}, {others}", [*TARGETS, *beside], elsewhere)
            _, right = started.step(f"{others}, {own}", elsewhere, [*TARGETS, *beside])
            assert differing_answers(left[: len(TARGETS)], alone) == []
            assert differing_answers(right[: len(TARGETS)], alone) == []
    both = started.step("both", TARGETS, TARGETS)
    assert [differing_answers(answers, alone) for answers in both] == [[], []]


def test_both_engines_take_other_weights(started: Together, folders: list[str]) -> None:
    before = started.step("before", TARGETS, TARGETS)
    started.call("tests.engine.reloads:by_reload_weights", folders[1])
    replaced = started.step("replaced", TARGETS, [])[0], started.step("replaced there", [], TARGETS)[1]
    started.call("tests.engine.reloads:by_reload_weights", folders[0])
    after = started.step("after", TARGETS, TARGETS)
    assert differing_answers(replaced[0], replaced[1]) == []
    assert len(differing_answers(replaced[0], before[0])) == len(TARGETS)
    assert [differing_answers(one, other) for one, other in zip(after, before, strict=True)] == [[], []]

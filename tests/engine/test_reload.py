"""Weights that are replaced while an engine runs give the bits of an engine that was started with them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engines import OF_DEVICE, request, run, tokens
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = pytest.mark.engine

RELOADS = "tests.engine.reloads"
WAYS = ("by_reload_weights", "by_transfer", "by_buckets", "by_name", "by_hand")
PROMPT = tokens(300, 1)
"""More than a page, so that there is something to find in the prefix cache."""
TOKENS, BEGUN = 16, 5
"""Of an answer, and those that a running request has when its weights are replaced."""
SLEEPS = () if torch.cuda.is_available() else (1, 2)
"""Levels; a GPU sleeps in tests/engine/reload_cuda.py."""
THOUGHTS = '{"reasoning_start_str": "def", "reasoning_end_str": "return self.x"}'
"""What begins a thought and what a budget ends it with: some words of several tokens."""
BUDGETS = (0, 5)
LEFT = 3
"""Tokens after which a request with a budget leaves its row."""
SHAPE = Shape(intermediate=512, layers=2, dtype="bfloat16")


class Replaced:
    """What one engine answers while its weights are replaced: the first two times each, with a cold and a warm cache.

    Args:
        running: started with the first of the checkpoints.
        folders: of checkpoints.
    """

    def __init__(self, running: Engine, folders: list[Path]) -> None:
        self._running, self._folders = running, [str(folder) for folder in folders]
        self.answers: dict[str, list[dict[str, Any]]] = {}
        self._ask("fresh")
        for way in WAYS:
            for which in (1, 0):
                self._call(way, self._folders[which])
                self._ask(f"{way} {which}")
        self._call("call", "nothing")
        self._ask("nothing")
        for level in SLEEPS:
            self._call("sleep", level)
            self._ask(f"sleep {level}")
        self._call("call", "keep")
        for way in ("put_back", "write_in_place"):
            self._call("by_reload_weights", self._folders[1])
            self._ask(f"before {way}")
            self._call("call", way)
            self._ask(way)
        self.running = self._call("replaced_while_it_runs", self._request(), BEGUN, self._folders[1])["completions"]
        [completion] = self.running
        self._ask("as if it had begun so", completion["tokens"][:BEGUN])
        self.thoughts = {budget: [self._think(budget, []), *self._thoughts(budget)] for budget in BUDGETS}
        first = self._request(thinking_token_budget=2 * LEFT, max_tokens=LEFT)
        self.moved = [self._think(None, [], beside) for beside in (None, first)]

    def _call(self, function: str, *arguments: object) -> Any:
        return self._running.call(f"{RELOADS}:{function}", *arguments)

    def _request(self, begun: Sequence[int] = (), **params: Any) -> dict[str, Any]:
        return request([*PROMPT, *begun], **{"max_tokens": TOKENS - len(begun)} | params)

    def _thoughts(self, budget: int) -> Iterator[dict[str, Any]]:
        for step in range(1, TOKENS):
            yield self._think(budget, [step])
        yield self._think(budget, list(range(1, TOKENS, 2)))

    def _think(self, budget: int | None, resets: list[int], beside: dict[str, Any] | None = None) -> dict[str, Any]:
        params = {} if budget is None else {"thinking_token_budget": budget}
        return self._call("with_a_budget", self._request(**params), resets, beside)

    def _ask(self, name: str, begun: Sequence[int] = ()) -> None:
        self.answers[name] = [self._running.step(name, [self._request(begun)]).requests[0] for _ in range(2)]

    def bits(self, name: str, which: int = 0) -> list[dict[str, Any]]:
        """Tokens and logprob bits of an answer."""
        return self.answers[name][which]["completions"]

    def cached(self, name: str) -> list[int]:
        """Tokens that each of the answers found in the prefix cache."""
        return [answer["cached"] for answer in self.answers[name]]


@pytest.fixture(scope="module")
def replaced(tmp_path_factory: pytest.TempPathFactory) -> Replaced:
    folders = [make_checkpoint(tmp_path_factory.mktemp("weights"), SHAPE, seed) for seed in (0, 1)]
    settings = {
        "model": str(folders[0]),
        "max_model_len": 512,
        "max_num_seqs": 8,
        "reasoning_config": THOUGHTS,
        "worker_extension_cls": f"{RELOADS}.Extension",
        "weight_transfer_config": '{"backend": "files"}',
        **OF_DEVICE,
    }
    return run(settings, [], "1", afterwards=lambda running: Replaced(running, folders)).afterwards


@pytest.mark.parametrize("way", WAYS)
def test_replaced_weights_give_the_bits_of_a_fresh_engine(replaced: Replaced, way: str) -> None:
    """The weights of the other checkpoint, and back: every way leads to the same other bits, and back to those of the
    fresh engine.
    """
    assert replaced.bits(f"{way} 1") == replaced.bits("by_reload_weights 1") != replaced.bits("fresh")
    assert replaced.bits(f"{way} 0") == replaced.bits("fresh")


@pytest.mark.parametrize("way", WAYS)
def test_no_key_of_the_old_weights_is_found_in_the_prefix_cache(replaced: Replaced, way: str) -> None:
    for name in (f"{way} 1", f"{way} 0"):
        cold, warm = replaced.cached(name)
        assert cold == 0
        assert warm >= 128
        assert replaced.bits(name, 1) == replaced.bits(name)


@pytest.mark.parametrize("way", ["put_back", "write_in_place"])
def test_weights_written_where_they_lie_serve_at_once(replaced: Replaced, way: str) -> None:
    assert replaced.bits(f"before {way}") == replaced.bits("by_reload_weights 1")
    assert replaced.bits(way) == replaced.bits("fresh")
    assert replaced.cached(way)[0] == 0


def test_a_call_that_replaces_nothing_leaves_the_prefix_cache_alone(replaced: Replaced) -> None:
    assert min(replaced.cached("nothing")) >= 128
    assert replaced.bits("nothing") == replaced.bits("fresh")


@pytest.mark.parametrize("level", SLEEPS)
def test_sleep_takes_nothing_away_on_a_cpu(replaced: Replaced, level: int) -> None:
    """vLLM ignores it there."""
    assert replaced.bits(f"sleep {level}") == replaced.bits("fresh")
    assert replaced.cached(f"sleep {level}")[0] == 0


def test_a_request_that_runs_goes_on_as_if_the_new_weights_had_read_all_before(replaced: Replaced) -> None:
    [whole], [fresh], [rest] = replaced.running, replaced.bits("fresh"), replaced.bits("as if it had begun so")
    for part in ("tokens", "logprobs"):
        assert whole[part][:BEGUN] == fresh[part][:BEGUN]
        assert whole[part][BEGUN:] == rest[part]
    assert whole["logprobs"][BEGUN] != fresh["logprobs"][BEGUN]


@pytest.mark.parametrize("budget", BUDGETS)
def test_a_thought_ends_where_its_budget_does_whenever_all_is_computed_anew(replaced: Replaced, budget: int) -> None:
    alone, *reset = replaced.thoughts[budget]
    [completion] = alone["completions"]
    begin = max(0, budget - 2)
    assert len(alone["end"]) > 1
    assert completion["tokens"][begin : begin + len(alone["end"])] == alone["end"]
    different = [number for number, one in enumerate(reset) if one["completions"] != alone["completions"]]
    assert different == []


def test_a_budget_goes_with_its_request_and_not_with_the_row(replaced: Replaced) -> None:
    alone, in_a_row_with_a_budget = replaced.moved
    assert in_a_row_with_a_budget["completions"] == alone["completions"]

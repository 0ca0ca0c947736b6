"""Prefill by one server and decode by another, which reads keys and values from the memory of the first: the bits of
one server. Skipped without NIXL.
"""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.integration.engine.nixl import KEY
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.server import free_port, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.exhaustive,
    pytest.mark.skipif(find_spec("nixl") is None, reason="needs NIXL"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="no GPU has run it"),
]
SHAPE = Shape(intermediate=512, layers=2, dtype="bfloat16")
LEASE, PAGES = 30, 40
"""Seconds, and how many a cache has: they are soon another request's."""
LENGTHS = (1, 5, 127, 128, 129, 300)
GREEDY, SEEDED = {"temperature": 0}, {"temperature": 1.0, "seed": 7, "presence_penalty": 0.5}
HANDS_OVER = {"do_remote_decode": True, "do_remote_prefill": False}


@dataclass(frozen=True)
class Asked:
    """A server and the model that it serves."""

    url: str
    model: str

    def ask(self, prompt: list[int], **options: Any) -> dict[str, Any]:
        body = {"model": self.model, "prompt": prompt, "max_tokens": 12, "logprobs": 3, **GREEDY, **options}
        return httpx.post(f"{self.url}/completions", json=body, timeout=300).json()

    def hand_over(self, prompt: list[int]) -> dict[str, Any]:
        """What it says of a prompt's pages."""
        return self.ask(prompt, max_tokens=1, kv_transfer_params=HANDS_OVER)["kv_transfer_params"]

    def read(self) -> float:
        """Tokens that it has read from others."""
        lines = httpx.get(f"{self.url.removesuffix('/v1')}/metrics").text.splitlines()
        return sum(
            float(line.split()[-1]) for line in lines if line.startswith("vllm:external_prefix_cache_hits_total")
        )


def bits(answer: dict[str, Any]) -> tuple[Any, ...]:
    [choice] = answer["choices"]
    logprobs = choice["logprobs"]
    return choice["text"], choice["finish_reason"], logprobs["token_logprobs"], logprobs["top_logprobs"]


def prompt(number: int, length: int = 200) -> list[int]:
    return [(number * place * place + 3 * place + length) % 1000 + 10 for place in range(length)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is that servers start with."""
    return pointed(tmp_path_factory.mktemp("models") / "model", seed=0)


def pointed(model: Path, seed: int) -> Path:
    """The same place with weights of a seed: vLLM tells engines apart by it."""
    model.unlink(missing_ok=True)
    model.symlink_to(make_checkpoint(model.parent / f"of {seed}", SHAPE, seed=seed))
    return model


@pytest.fixture(scope="module")
def servers(model: Path) -> Iterator[dict[str, Asked]]:
    """Two of one model, the first of which computes what it could not read."""
    with ExitStack() as stack, ThreadPoolExecutor() as pool:
        policies = {"one": "recompute", "another": "fail"}
        started = {
            name: pool.submit(stack.enter_context, served(model, "1", policy)) for name, policy in policies.items()
        }
        yield {name: Asked(one.result().base_url, str(model)) for name, one in started.items()}


@contextmanager
def third(model: Path, flag: str, seed: int) -> Iterator[Asked]:
    """A server of plain vLLM, or of other weights; each waits on a core, so that there are no more at a time."""
    with served(pointed(model, seed), flag, "fail") as one:
        yield Asked(one.base_url, str(model))


def served(model: Path, flag: str, policy: str) -> Any:
    transfer = {
        "kv_connector": "NixlConnector",
        "kv_role": "kv_both",
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"kv_lease_duration": LEASE, "num_threads": 1},
    }
    arguments = ["--max-model-len", "512", "--max-num-seqs", "8", "--num-gpu-blocks-override", str(PAGES)]
    arguments += ["--enforce-eager"]
    arguments += ["--kv-transfer-config", json.dumps(transfer)]
    side = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port()), "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1"}
    alone = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}  # four engines that wait on two cores
    return serve(str(model), arguments, {FLAG: flag, **alone, **side})


@pytest.mark.parametrize("options", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_prefill_by_one_server_and_decode_by_another_are_one_server(
    servers: dict[str, Asked], options: dict[str, Any]
) -> None:
    """One after the other, and beside each other; the reader computes what it read too late on a busy machine."""
    one, another = servers["another"], servers["one"]
    number = 7 + len(options)

    def handed_over(each: list[int]) -> dict[str, Any]:
        return another.ask(each, kv_transfer_params=one.hand_over(each), **options)

    for concurrent in (1, 4):
        prompts = [prompt(number + concurrent, length) for length in LENGTHS]
        before = another.read()
        with ThreadPoolExecutor(concurrent) as pool:
            found = list(pool.map(handed_over, prompts))
        assert another.read() - before > sum(LENGTHS) / 2, "but for what a busy machine has not answered in time"
        assert [bits(answer) for answer in found] == [bits(one.ask(each, **options)) for each in prompts]


def test_samples_of_one_request_and_a_second_reader_have_the_bits_of_one_server(servers: dict[str, Asked]) -> None:
    """The pages are read once, and for the others computed: they may be another request's by then."""
    one, another, asked = servers["another"], servers["one"], prompt(45)
    handed, options = one.hand_over(asked), SEEDED | {"n": 3}
    found, alone = another.ask(asked, kv_transfer_params=handed, **options), one.ask(asked, **options)
    parts = [[(choice["text"], choice["logprobs"]) for choice in answer["choices"]] for answer in (found, alone)]
    assert parts[0] == parts[1]
    for number in range(71, 87):
        one.ask(prompt(number, 400))
    before = another.read()
    assert bits(another.ask([*asked, 11], kv_transfer_params=handed)) == bits(one.ask([*asked, 11]))
    assert another.read() == before


def test_what_plain_vllm_hands_over_is_computed(servers: dict[str, Asked], model: Path) -> None:
    with third(model, "0", seed=0) as plain:
        assert_computed(plain, servers)


def test_what_has_other_weights_is_computed_and_nothing_but_the_key_keeps_it_apart(
    servers: dict[str, Asked], model: Path
) -> None:
    mine, another, asked = servers["one"].hand_over(prompt(43))[KEY], servers["another"], prompt(41)
    with third(model, "1", seed=1) as other:
        assert_computed(other, servers)
        before = another.read()
        found = another.ask(asked, kv_transfer_params={**other.hand_over(asked), KEY: mine})
        assert another.read() > before
        assert bits(found) != bits(servers["one"].ask(asked))


def assert_computed(giver: Asked, servers: dict[str, Asked]) -> None:
    another, asked = servers["another"], prompt(len(giver.url) + 61)
    before = another.read()
    found = another.ask(asked, kv_transfer_params=giver.hand_over(asked))
    assert another.read() == before
    assert bits(found) == bits(servers["one"].ask(asked))


def test_what_was_read_behind_the_end_of_a_lease_is_an_error_or_computed_as_the_reader_is_told(
    servers: dict[str, Asked],
) -> None:
    pairs = (servers["one"], servers["another"]), (servers["another"], servers["one"])
    asked = prompt(47), prompt(49)
    handed = [giver.hand_over(each) for (giver, _), each in zip(pairs, asked, strict=True)]
    time.sleep(LEASE + 3)
    for number in range(51, 67):  # whose pages are those that were let go of
        for giver, _ in pairs:
            giver.ask(prompt(number, 400))
    failed, computed = (
        reader.ask(each, kv_transfer_params=params)
        for (_, reader), each, params in zip(pairs, asked, handed, strict=True)
    )
    assert failed["error"]["code"] == 500
    assert bits(computed) == bits(servers["another"].ask(asked[1]))
    assert bits(servers["another"].ask(asked[0])) == bits(servers["one"].ask(asked[0])), "it goes on"

"""The canary of a real server among requests: a bit that flips in the memory of its engine is seen."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from safetensors import safe_open

from scripts.fleet.processes import processes
from tests.faults.memory import flip
from tests.server.conftest import TOOLS
from vllm_batch_invariant.integration.engine.witness import CANARIES, DIFFERENCES, RUNS
from vllm_batch_invariant.verify.harness.server import Server, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.exhaustive,
    pytest.mark.skipif(torch.cuda.is_available(), reason="writes into the memory of a process, and not of a GPU"),
]
TENSOR = "model.embed_tokens.weight"


@pytest.fixture
def watched(model: Path) -> Iterator[Server]:
    """A server that computes its canary every two seconds."""
    variables = {"VLLM_BATCH_INVARIANT": "1", "VLLM_BATCH_INVARIANT_CANARY": "0.03", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with serve(str(model), TOOLS, variables) as running:
        yield running


def counted(server: Server) -> tuple[float, float]:
    """Runs of the canary, and differences."""
    page = httpx.get(f"{server.base_url[:-3]}/metrics", trust_env=False).text
    found = [re.search(rf"^{name}_total\{{.*\}} (\S+)$", page, re.MULTILINE) for name in (RUNS, DIFFERENCES)]
    return tuple(float(one[1]) if one else 0.0 for one in found)  # type: ignore[return-value]


def test_a_flipped_bit_of_a_weight_is_counted_among_requests(watched: Server, model: Path) -> None:
    ended, answers = threading.Event(), []

    def talk() -> None:
        while not ended.is_set():
            asked = {"model": str(model), "prompt": "many words " * 9, "max_tokens": 40, "temperature": 1.0}
            answer = httpx.post(f"{watched.base_url}/completions", json=asked, trust_env=False, timeout=60)
            answers.append(answer.status_code)

    others = [threading.Thread(target=talk) for _ in range(4)]
    for other in others:
        other.start()
    try:
        wait(lambda: counted(watched)[0] >= 3)
        assert counted(watched)[1] == 0
        with safe_open(model / "model.safetensors", "pt") as file:
            token = CANARIES[0].token_ids(file.get_slice(TENSOR).get_shape()[0])[0]
            row = file.get_tensor(TENSOR)[token]
        held = row.view(torch.uint8).numpy().tobytes()
        assert sum(flip(process, held) for process in processes(watched.process)) > 0
        wait(lambda: counted(watched)[1] >= 2)
    finally:
        ended.set()
        for other in others:
            other.join()
    assert set(answers) == {200}
    assert "The canary has other bits than at the start: canary 'greedy' at token" in watched.log.read_text()
    fingerprint = httpx.get(f"{watched.base_url}/batch_invariant", trust_env=False).json()["fingerprint"]
    assert fingerprint  # as before: nobody was told of other weights


def wait(met, seconds: float = 60) -> None:
    """Until a condition is met."""
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end
        time.sleep(0.2)

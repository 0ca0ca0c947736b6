"""Workers on two nodes give the bits of workers on one; a node whose mode is off is refused."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.server import two_nodes
from vllm_batch_invariant.envs import FLAG
from vllm_batch_invariant.integration.engine.endpoint import PATH
from vllm_batch_invariant.verify.harness.server import serve


def has_namespaces() -> bool:
    try:
        made = subprocess.run([*two_nodes.NAMESPACES, "ip", "link", "set", "lo", "up"], capture_output=True)
    except OSError:
        return False
    return made.returncode == 0


pytestmark = [
    pytest.mark.server,
    pytest.mark.exhaustive,
    pytest.mark.skipif(torch.cuda.is_available(), reason="the workers have CPUs"),
    pytest.mark.skipif(not has_namespaces(), reason="needs network namespaces"),
]
SETTINGS = ["--distributed-executor-backend", "mp", "--max-model-len", "512"]
KINDS = ["--tensor-parallel-size", "--pipeline-parallel-size"]


def answers(client: httpx.Client) -> list[Any]:
    """The witness, then of 16 requests, greedy and with seeds, the answers alone and those among the others."""
    model = client.get("/v1/models").json()["data"][0]["id"]

    def answer(index: int) -> Any:
        asked = {
            "prompt": f"The order of additions {index} " * (1 + index % 7),
            "temperature": index % 2,
            "seed": index,
        }
        told = {"model": model, "max_tokens": 12, "logprobs": 5, "ignore_eos": True}
        reply = client.post("/v1/completions", json=asked | told)
        reply.raise_for_status()
        choice = reply.json()["choices"][0]
        return [choice["text"], choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"]]

    alone = [answer(index) for index in range(16)]
    with ThreadPoolExecutor(16) as pool:
        return [client.get(PATH).json().get("witness"), alone, list(pool.map(answer, range(16)))]


def on_two_nodes(folder: Path, model: Path, other: str, *arguments: str) -> list[Any]:
    """The answers; empty where no server starts."""
    variables = {"TWO_NODES_FOLDER": str(folder), "VLLM_CPU_KVCACHE_SPACE": "1"}
    command = two_nodes.command(model, "1", other, *SETTINGS, *arguments)
    made = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True, timeout=400)
    return json.loads(made.stdout.splitlines()[-1])


@pytest.mark.parametrize("kind", KINDS)
def test_workers_on_two_nodes_have_the_bits_of_workers_on_one(model: Path, tmp_path: Path, kind: str) -> None:
    witness, alone, among = on_two_nodes(tmp_path, model, "1", kind, "2")
    assert "falling back to torch.distributed" in (tmp_path / "node-0.log").read_text(), "they share no memory"
    assert among == alone
    assert len({*map(str, alone)}) == len(alone)
    cores = sorted(os.sched_getaffinity(0))
    variables = {FLAG: "1", "VLLM_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with (
        serve(str(model), [*SETTINGS, kind, "2"], variables) as here,
        httpx.Client(base_url=here.base_url.removesuffix("/v1"), trust_env=False, timeout=120) as client,
    ):
        assert answers(client) == [witness, alone, alone]


def test_a_node_whose_mode_is_off_is_refused(model: Path, tmp_path: Path) -> None:
    assert on_two_nodes(tmp_path, model, "0", "--tensor-parallel-size", "2") == []
    assert "workers of several nodes that do not all say that the mode is on" in (tmp_path / "node-0.log").read_text()

"""A real server with two engines of one model: whichever of them answers, a request has the same bits."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.engine.engines import OF_DEVICE, arguments_of
from tests.server.test_server import PROMPT
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.server import Server, serve

ON_GPU = torch.cuda.is_available()
pytestmark = [
    pytest.mark.server,
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs 2 GPUs"),
]

SIZES = {"hidden": 512, "intermediate": 1536, "layers": 3, "heads": 8, "kv_heads": 2, "head_size": 64}
EXPERTS = {"experts": 8, "expert_intermediate": 256}
"""Which engines of one server share on GPUs; on a CPU vLLM cannot gather the tokens of all."""
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture(scope="module", params=["dense", "experts"] if ON_GPU else ["dense"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(max_length=1024, **SIZES | (EXPERTS if request.param == "experts" else {}))
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape)


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[Server]:
    settings = ["--data-parallel-size", "2", *arguments_of(OF_DEVICE)]
    with serve(str(model), settings, {"VLLM_BATCH_INVARIANT": "1"} | CORES) as running:
        yield running


def answers(server: Server, model: Path) -> tuple[list[Any], list[Any], dict[str, float]]:
    """Of one request alone by either engine; of many like it, half of them by an engine of the server's choice, among
    others; and how many requests each engine answered.
    """

    async def ask(client: httpx.AsyncClient, engine: int | None, **more: Any) -> Any:
        asked = {"model": str(model), "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "logprobs": 5} | more
        headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
        found = await client.post(f"{server.base_url}/completions", json=asked, headers=headers)
        answer = found.raise_for_status().json()
        return answer["system_fingerprint"], answer["choices"][0]["text"], answer["choices"][0]["logprobs"]

    async def session() -> tuple[list[Any], list[Any], dict[str, float]]:
        async with httpx.AsyncClient(trust_env=False, timeout=300) as client:
            alone = [await ask(client, engine) for engine in (0, 1)]
            others = [
                ask(client, None, prompt="many " * (1 + i % 40), temperature=0.8, max_tokens=8) for i in range(30)
            ]
            asked = [ask(client, engine) for engine in (0, 1, None, None) * 4]
            together = (await asyncio.gather(*others, *asked))[len(others) :]
            metrics = (await client.get(f"{server.base_url[:-3]}/metrics")).text
        return alone, together, _finished(metrics)

    return asyncio.run(session())


def _finished(metrics: str) -> dict[str, float]:
    lines = [line for line in metrics.splitlines() if line.startswith("vllm:request_success_total{")]
    found = {"0": 0.0, "1": 0.0}
    for line in lines:
        found[line.partition('engine="')[2][0]] += float(line.rpartition(" ")[2])
    return found


def test_either_engine_gives_the_same_bits_alone_and_among_others(engines: Server, model: Path) -> None:
    alone, together, finished = answers(engines, model)
    assert min(finished.values()) > 8, finished
    assert "-batch-invariant-" in alone[0][0]
    assert alone[1] == alone[0]
    assert [answer for answer in together if answer != alone[0]] == []


@pytest.mark.skipif(ON_GPU, reason="on a GPU this model is too small for plain vLLM to vary")
def test_plain_vllm_fails_the_same_comparison(model: Path) -> None:
    arguments = ["--data-parallel-size", "2", "--dtype", "float32"]
    with serve(str(model), arguments, {"VLLM_BATCH_INVARIANT": "0"} | CORES) as running:
        alone, together, _ = answers(running, model)
    assert any(answer != alone[0] for answer in together)

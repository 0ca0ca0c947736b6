"""A real server with two engines of one dense model: whichever of them answers, a request has the same bits."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from tests.engine.engines import only_where_asked_for
from tests.server.test_server import PROMPT
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.server import Server, serve

pytestmark = [
    pytest.mark.server,
    pytest.mark.engine,
    pytest.mark.skipif(torch.cuda.is_available(), reason="data parallelism is refused on a GPU"),
]

SIZES = {"hidden": 512, "intermediate": 1536, "layers": 3, "heads": 8, "kv_heads": 2, "head_size": 64}
CORES = {"VLLM_CPU_OMP_THREADS_BIND": "0|1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture(scope="module")
def model(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    only_where_asked_for(pytestconfig)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), Shape(max_length=1024, **SIZES))


@pytest.fixture(scope="module")
def engines(model: Path) -> Iterator[Server]:
    with serve(str(model), ["--data-parallel-size", "2"], {"VLLM_BATCH_INVARIANT": "1"} | CORES) as running:
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


def test_plain_vllm_fails_the_same_comparison(model: Path) -> None:
    arguments = ["--data-parallel-size", "2", "--dtype", "float32"]
    with serve(str(model), arguments, {"VLLM_BATCH_INVARIANT": "0"} | CORES) as running:
        alone, together, _ = answers(running, model)
    assert any(answer != alone[0] for answer in together)

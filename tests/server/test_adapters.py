"""Adapters that a client loads into a real server: each request has the bits that it has beside nobody."""

import asyncio
from collections.abc import Iterator, Sequence
from pathlib import Path

import httpx
import pytest

from tests.engine.adapters import written
from tests.server.test_server import Answer, Client, completion, run
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.server import Server, serve

COVERED = reviews.ran().lora["cpu"]
pytestmark = [
    pytest.mark.server,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
ROOM = ("--enable-lora", "--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", "16")
VARIABLES = {"VLLM_BATCH_INVARIANT": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True", "VLLM_CPU_KVCACHE_SPACE": "1"}


@pytest.fixture(scope="module")
def adapted(model: Path) -> Iterator[Server]:
    with serve(str(model), [*ROOM], VARIABLES) as running:
        yield running


def told(server: Server, what: str, **body: object) -> httpx.Response:
    """What the server says to a call about adapters."""
    return httpx.post(f"{server.base_url}/{what}_lora_adapter", json=body, timeout=60, trust_env=False)


def answers(server: Server, names: Sequence[str]) -> list[Answer]:
    """Of the adapters of these names, asked together; "" is the model."""

    async def ask(client: Client, model: str) -> list[Answer]:
        return await asyncio.gather(*(completion(client, name or model) for name in names))

    return run(server, ask)


def test_adapters_come_go_and_change_and_no_answer_does(
    server: Server, adapted: Server, model: Path, tmp_path: Path
) -> None:
    first, second = (written(tmp_path / name, model, 8 * seed, seed) for seed, name in ((1, "first"), (2, "second")))
    for name, folder in (("one", first), ("two", second)):
        assert told(adapted, "load", lora_name=name, lora_path=str(folder)).status_code == 200
    alone = [answers(adapted, [name])[0] for name in ("one", "two", "")]
    assert alone[2] == answers(server, [""])[0]  # one without LoRA
    assert len({str(answer) for answer in alone}) == 3
    assert answers(adapted, ["two", "", "one", "one", "", "two"]) == [alone[i] for i in (1, 2, 0, 0, 2, 1)]

    assert told(adapted, "unload", lora_name="two").status_code == 200
    with pytest.raises(Exception, match="two"):
        answers(adapted, ["two"])
    assert told(adapted, "load", lora_name="three", lora_path=str(second)).status_code == 200
    assert answers(adapted, ["three", "one"]) == [alone[1], alone[0]]

    written(first, model, 16, 2)
    with pytest.raises(Exception, match=r"500|Internal"):
        answers(adapted, ["one"])
    assert told(adapted, "load", lora_name="one", lora_path=str(first), load_inplace=True).status_code == 200
    assert answers(adapted, ["", "one", "three"]) == [alone[2], alone[1], alone[1]]

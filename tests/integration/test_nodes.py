"""Workers of several nodes are of one kind, or the engine does not start."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.engine.endpoint import METHOD
from vllm_batch_invariant.integration.parallel import nodes
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.provenance import EXACT

OF_ALL = {"attention": {"splits": 256}, "experts 1": {"top_k": 2}}
SAID = {
    "mode": True,
    "versions": {"torch": "2"},
    "engine": {"dtype": "bf16"},
    "device": {"name": "A"},
    "reductions": OF_ALL,
}


def executor(*found: dict[str, Any]) -> Any:
    def collective_rpc(method: str) -> list[dict[str, Any]]:
        assert method == METHOD
        if not all(found):
            raise RuntimeError("no such method")
        return list(found)

    return SimpleNamespace(collective_rpc=collective_rpc)


def test_workers_of_one_kind_start_also_on_other_processors() -> None:
    nodes.check(executor(SAID, SAID, SAID | {"device": {"name": "B"}}))


def test_stages_may_have_layers_of_their_own() -> None:
    of_stage = {"attention": OF_ALL["attention"], "experts 1": {"top_k": 4}, "linear (layer 9)": {"n": 5}}
    nodes.check(executor(SAID, SAID | {"reductions": of_stage}))


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (SAID | {"versions": {"torch": "3"}}, "with unlike versions"),
        (SAID | {"engine": {"dtype": "fp32"}}, "with unlike engine"),
        (SAID | {"reductions": OF_ALL | {"attention": {"splits": 512}}}, "with unlike reductions"),
        (SAID | {"reductions": OF_ALL | {EXACT: {"format": "x"}}}, "with unlike reductions"),
        (SAID | {"mode": None, "engine": {}}, "with unlike mode and engine"),
        ({}, "do not all say that the mode is on"),
    ],
)
def test_a_worker_of_another_kind_is_refused(other: dict[str, Any], said: str) -> None:
    with pytest.raises(NotCovered, match=f"workers of several nodes .*{said}|workers of several nodes that {said}"):
        nodes.check(executor(SAID, other))


@pytest.mark.parametrize("count", [1, 2])
def test_an_engine_with_workers_on_other_nodes_asks_them(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class Core:
        vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(nnodes=count))
        model_executor = executor(SAID, {})

        def _initialize_kv_caches(self) -> str:
            return "made"

    monkeypatch.setattr(patch_points, "ENGINE_CORE", SimpleNamespace(get=lambda: Core))
    nodes.install()
    if count == 1:
        assert Core()._initialize_kv_caches() == "made"
    else:
        with pytest.raises(NotCovered, match="set VLLM_BATCH_INVARIANT=1 on every node"):
            Core()._initialize_kv_caches()

"""Which KV connectors the start-up check lets pass, and what is put right of vLLM's connector of files."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_batch_invariant.envs import UNTRIED
from vllm_batch_invariant.integration import coverage
from vllm_batch_invariant.integration.engine import kv_connectors
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.side_table import beside

ROWS = [row for row in coverage.REFUSED if "KV connectors" in row.name or "ExampleConnector" in row.name]
ID = "0f8fad5b-d9cb-469f-a165-70867728950e"


def found(connector: str | None, version: str = "0.32.0", device: str = "cpu", **changes: Any) -> list[str]:
    transfer = {
        "kv_connector": connector,
        "kv_connector_extra_config": changes.pop("extra", {}),
        "engine_id": changes.pop("engine_id", ID),
        "kv_load_failure_policy": changes.pop("policy", "fail"),
        "kv_connector_module_path": changes.pop("module", None),
    }
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    model = dict.fromkeys(
        ("is_moe", "is_multimodal_model", "is_attention_free", "is_hybrid", "has_inner_state"), False
    ) | {"quantization": None, "runner_type": "generate", "enable_prompt_embeds": False, "enable_sleep_mode": False}
    cache = {"cache_dtype": "auto", "kv_offloading_size": None}
    config = SimpleNamespace(
        device_config=SimpleNamespace(device_type=device),
        kv_transfer_config=SimpleNamespace(**transfer) if connector else None,
        parallel_config=SimpleNamespace(**{name: changes.pop(name, size) for name, size in parallel.items()}),
        cache_config=SimpleNamespace(**{name: changes.pop(name, value) for name, value in cache.items()}),
        speculative_config=changes.pop("speculative_config", None),
        model_config=SimpleNamespace(get_sliding_window=lambda: changes.get("window"), **model | changes),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(patch_points, "installed_version", lambda: version)
        return [what for row in ROWS if (what := row.found(config))]


def test_files_pass_on_a_cpu_with_the_version_that_has_run() -> None:
    assert len(ROWS) == 3
    assert found("ExampleConnector", extra={"shared_storage_path": "/kv"}) == found(None) == []
    assert found("ExampleConnector", version="0.31.0") == [
        "the KV connector ExampleConnector on a CPU with vLLM 0.31.0"
    ]


@pytest.mark.parametrize("name", ["ExampleConnector", "OffloadingConnector", "SimpleCPUOffloadConnector"])
def test_on_a_gpu_every_known_connector_passes_with_the_version_that_has_run(name: str) -> None:
    assert not found(name, "0.33.0", "cuda")
    assert found(name, "0.32.0", "cuda") == [f"the KV connector {name} on a GPU with vLLM 0.32.0"]


def test_memory_of_one_engine_is_refused_on_a_cpu() -> None:
    """vLLM's needs a GPU."""
    assert found("OffloadingConnector") == ["the KV connector OffloadingConnector on a CPU"]


@pytest.mark.parametrize("name", ["NixlConnector", "NixlPullConnector"])
def test_an_engine_reads_another_ones_memory_on_a_cpu_and_untried_on_a_gpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert found(name, extra={"backends": ["UCX"], "num_threads": 2, "kv_lease_duration": 60}) == []
    assert found(name, policy="recompute") == []
    for setting in ("bidirectional_kv_xfer", "enforce_handshake_compat"):
        assert found(name, extra={setting: True}) == [f"the KV connector {name} with its setting {setting}"]
    assert found(name, "0.33.0", "cuda") == [f"the KV connector {name} on a GPU"]
    monkeypatch.setenv(UNTRIED.name, "1")
    assert found(name, "0.33.0", "cuda") == []
    assert found(name, "0.33.0", "cuda", window=128) == [f"the KV connector {name} beside windows of attention"]


@pytest.mark.parametrize("name", ["LMCacheConnectorV1", "NixlPushConnector", "MultiConnector", "another"])
def test_other_connectors_are_refused_by_name(name: str) -> None:
    [said] = found(name)
    assert said.startswith(f"the KV connector {name}")
    assert ("compress" in said) == name.startswith("LMCache")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"extra": {"lossy": 1}}, "with its setting lossy"),
        ({"module": "mine"}, "with kv_connector_module_path=mine"),
        ({"policy": "recompute"}, "with kv_load_failure_policy=recompute"),
        ({"engine_id": "one"}, "with engine_id=one"),
        ({"tensor_parallel_size": 2}, "beside tensor parallelism 2"),
        ({"speculative_config": object()}, "beside speculative decoding"),
        ({"cache_dtype": "fp8"}, "beside a KV cache in fp8"),
        ({"quantization": "awq"}, "beside quantisation awq"),
        ({"is_hybrid": True}, "beside layers that keep states"),
        ({"window": 128}, "beside windows of attention"),
        ({"use_mla": True}, "beside latent attention"),
        ({"enable_prompt_embeds": True}, "beside embeddings as prompts"),
        ({"enable_sleep_mode": True}, "beside sleep"),
    ],
)
def test_what_has_not_run_with_files_is_found(changes: dict[str, Any], said: str) -> None:
    assert found("ExampleConnector", **changes) == [f"the KV connector ExampleConnector {said}"]


@dataclass
class Step:
    """vLLM's ``SchedulerOutput``, as far as it is read."""

    scheduled_new_reqs: list[Any]
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)


def test_of_new_requests_those_are_stored_whose_prompts_a_step_completes() -> None:
    new = [
        SimpleNamespace(req_id=name, num_computed_tokens=computed, prompt_token_ids=[1] * 100)
        for name, computed in (("whole", 0), ("behind a prefix", 64), ("begun", 0), ("loads", 0))
    ]
    scheduled = {"whole": 100, "behind a prefix": 36, "begun": 60, "loads": 60}
    build = kv_connectors.with_whole_prompts(lambda self, step: [one.req_id for one in step.scheduled_new_reqs])
    holder = SimpleNamespace(_requests_need_load={"loads": None})
    assert build(holder, Step(new, scheduled)) == ["whole", "behind a prefix", "loads"]


def test_a_preempted_request_looks_for_nothing_and_none_for_fewer_than_none() -> None:
    matched = kv_connectors.of_prompts(lambda self, request, computed: (request.stored - computed, False))
    for preemptions, computed, tokens in ((0, 32, 64), (0, 112, 0), (1, 32, 0)):
        assert matched(None, SimpleNamespace(num_preemptions=preemptions, stored=96), computed) == (tokens, False)


class Files:
    """Stores as vLLM's connector does: a file a layer, in a folder by the prompt."""

    def __init__(self, store: Path) -> None:
        self.store = store

    def folder(self, token_ids: Any, mm_hashes: list[str], create_folder: bool = False) -> str:
        return str(self.store / token_ids)

    folder = kv_connectors.under_the_key(folder)

    def save(self, layer: str) -> None:
        (Path(self.folder("prompt", [], True)) / layer).touch()

    save = kv_connectors.apart(save)
    register = kv_connectors.with_layers(lambda self, caches: None)
    wait = kv_connectors.published(lambda self: None)


def test_a_folder_is_found_under_its_key_when_it_has_all_layers(tmp_path: Path) -> None:
    files = Files(tmp_path)
    with pytest.raises(RuntimeError, match="has no key"):
        files.folder("prompt", [])
    beside(files).kv_key = "key"
    files.register({"a": None, "b": None})
    for layers, is_there in (("a", False), ("ab", True), ("ab", True)):
        for layer in layers:
            files.save(layer)
        files.wait()
        assert Path(files.folder("prompt", [])).exists() == is_there
        assert [path.name for path in (tmp_path / "key").iterdir()] == ["prompt"] * is_there
    beside(files).kv_key = "another"
    assert not Path(files.folder("prompt", [])).exists()


def test_a_load_that_vllm_would_leave_out_ends_the_engine() -> None:
    loaded = []
    load = kv_connectors.complete(lambda self, context, **kwargs: loaded.append(context.attn_metadata))
    requests = [SimpleNamespace(is_store=False)]
    files = SimpleNamespace(_get_connector_metadata=lambda: SimpleNamespace(requests=requests))
    load(files, SimpleNamespace(attn_metadata=None), attn_metadata={"layer": 1})
    assert loaded == [{"layer": 1}]
    with pytest.raises(RuntimeError, match="would leave out"):
        load(files, SimpleNamespace(attn_metadata=None))
    requests[0].is_store = True
    load(files, SimpleNamespace(attn_metadata=None))
    assert loaded[1:] == [None]

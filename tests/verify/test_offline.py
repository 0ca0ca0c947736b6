"""A load in an engine's process is told to the command as plain data, and sizes of KV caches are chosen for it."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_batch_invariant.verify.answers import Answer, GeneratedToken, RequestSpec
from vllm_batch_invariant.verify.harness import engine, worker
from vllm_batch_invariant.verify.harness.engine import kv_cache_space
from vllm_batch_invariant.verify.harness.load import Run
from vllm_batch_invariant.verify.harness.metrics import Reading
from vllm_batch_invariant.verify.harness.worker import Engine, EngineFailed
from vllm_batch_invariant.verify.reproduce import offline

ROOT = Path(__file__).parents[2]
A, B = (
    Answer.of(text, [GeneratedToken("1", -0.5, (("1", -0.5), ("2", value)))])
    for text, value in (("a", 0.0), ("b", -0.0))
)
READINGS = [Reading(1, {1.0: 4, float("inf"): 1}, 5, 10.0), Reading(3, {1.0: 4, float("inf"): 2}, 9, 11.0)]


def test_a_run_survives_the_way_between_two_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run((A, B, A), 2.5, 3, 1, 0, "", "logprobs none/5")

    def run_offline(llm: Any, spec: RequestSpec, plan: Any, log: Any, on_sample: Any) -> Run:
        assert (spec.max_tokens, len(plan) >= 3) == (7, True)
        for reading in READINGS:
            log.add(reading)
        return run

    monkeypatch.setattr(engine, "run_offline", run_offline)
    llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=SimpleNamespace(max_model_len=512)))
    request = {"spec": vars(RequestSpec(max_tokens=7)), "samples": 4, "concurrency": 2, "seed": 0}
    got, log = offline.run_of(json.loads(json.dumps(offline.run(llm, request))))
    assert got == run
    assert [answer.bits for answer in got.answers] == [A.bits, B.bits, A.bits]
    assert A.bits != B.bits
    assert (log.readings, [reading.when for reading in log.readings]) == (READINGS, [10.0, 11.0])


def test_engines_are_stepped_in_one_loop() -> None:
    """What a command asks of an engine is a schedule for ``harness.drive``, and a reading of its steps."""
    sources = (ROOT / "vllm_batch_invariant").rglob("*.py")
    stepping = [path.stem for path in sources if "engine.step()" in path.read_text()]
    assert stepping == ["drive"]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "DRIVER", "tests.verify.progress_driver")
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


@pytest.mark.usefixtures("driver")
def test_progress_of_a_call_comes_before_its_result() -> None:
    told: list[dict[str, int]] = []
    with Engine("x/y") as running:
        assert running.call("tests.verify.progress_driver:count", 3, on_progress=told.append) == "3 were told"
        assert [one["place"] for one in told] == [0, 1, 2]
        with pytest.raises(EngineFailed, match=r"no answer in 0 s"):
            running.call("tests.verify.progress_driver:hang", patience=0.1)


QWEN = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}

QWEN_8B = {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
QWEN_8B |= {"max_position_embeddings": 40960}


@pytest.mark.parametrize(
    ("config", "arguments", "space"),
    [
        (QWEN | {"max_position_embeddings": 2048}, (), "1"),
        (QWEN_8B, (), "6"),
        (QWEN_8B, ("--dtype=float32",), "12"),
        (QWEN_8B | {"torch_dtype": "float32"}, (), "12"),
        (QWEN | {"max_position_embeddings": 1 << 20}, ("--max-model-len", "512"), "1"),
        (QWEN | {"max_position_embeddings": 2048}, ("--kv-cache-memory-bytes=1000",), None),
        (QWEN | {"max_position_embeddings": 2048}, ("--gpu-memory-utilization", "0.2"), None),
        (None, (), "4"),
    ],
)
def test_an_engine_gets_a_small_kv_cache_where_nobody_chose_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, config: Any, arguments: tuple[str, ...], space: str | None
) -> None:
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    if config:
        (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_cache_space(str(tmp_path), arguments) == ({"VLLM_CPU_KVCACHE_SPACE": space} if space else {})
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "7")
    assert kv_cache_space(str(tmp_path), arguments) == {}

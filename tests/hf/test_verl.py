"""What this package has for verl, with verl's own classes; those tests are skipped without it."""

import asyncio
import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.engine.engines import PATHS
from tests.hf.models import model
from tests.hf.test_refusals import refuses
from vllm_batch_invariant import verl
from vllm_batch_invariant.seeds import sample_seed

needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="needs verl 0.9: pip install verl --no-deps")


def test_every_sample_of_a_step_and_every_turn_of_it_has_a_seed_of_its_own() -> None:
    values = [
        verl.rollout_seed(seed, weights, priority, length)
        for seed in (42, 43)
        for weights in (None, 0, 1, 11)
        for priority in range(8)
        for length in (10, 110)
    ]
    assert len(set(values)) == len(values)
    assert verl.rollout_seed(42, 1, 7, 10) == sample_seed(42, "1 7 10")


def test_a_function_that_nobody_has_read_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(verl.READ, "read", (verl.digest_of(inspect.getsource(read)),))
    verl.check(read)
    read.__qualname__ = "other"
    monkeypatch.setitem(verl.READ, "other", verl.READ["read"][:0])
    refuses(lambda: verl.check(read), "a verl with another other: .*; install verl 0.9.1 or 0.9.0, or leave ")


def read() -> None:
    """Stands for a function of verl's."""


def test_a_digest_follows_what_a_function_says_and_not_how_far_it_is_indented() -> None:
    text = "def one():\n    return 1\n"
    indented = "    def one():\n        return 1\n"
    assert verl.digest_of(text) == verl.digest_of(indented) != verl.digest_of(text.replace("1", "2"))


@pytest.mark.parametrize(
    ("section", "setting", "said"),
    [
        ("engine", {"strategy": "fsdp"}, "the strategy fsdp in verl's actor: .*; set actor.strategy=fsdp2"),
        ("engine", {"ulysses_sequence_parallel_size": 2}, "sequence parallelism"),
        ("model", {"use_fused_kernels": True}, "use_fused_kernels"),
        ("model", {"use_liger": True}, "use_liger"),
        ("model", {"lora_rank": 8}, "adapters"),
    ],
)
def test_settings_with_which_the_logprobs_would_be_others_are_refused(
    section: str, setting: dict[str, Any], said: str
) -> None:
    usual = {
        "engine": {"strategy": "fsdp2", "ulysses_sequence_parallel_size": 1},
        "model": {"use_fused_kernels": False, "use_liger": False, "lora_rank": 0},
    }
    made = {name: SimpleNamespace(**values) for name, values in usual.items()}
    verl.check_settings(**made)
    made[section] = SimpleNamespace(**usual[section] | setting)
    refuses(lambda: verl.check_settings(**made), said)


@needs_verl
def test_verls_engine_has_the_logprobs_of_the_rollout_before_and_after_a_step_and_its_own_has_not(
    tmp_path: Path,
) -> None:
    checkpoint = tmp_path / "checkpoint"
    model().save_pretrained(checkpoint)
    found = json.loads(run("tests.hf.verl_engine", str(checkpoint)))
    assert found["before"] == found["after"] == [0, 0]
    assert all(different > 0 for different in found["stock"])
    assert found["gradient_norm"] > 0
    assert found["moved"] > 0


@needs_verl
def test_verls_server_gives_a_group_one_seed_and_ours_every_sample_its_own_whichever_replica_serves_it() -> None:
    found = json.loads(run("tests.hf.test_verl"))
    assert found["registered"] == ["SeededReplica", "OnPolicyFSDPEngine"]
    assert [len(set(replica)) for replica in found["stock"]] == [1, 1]
    first, second = found["ours"]
    assert first == second
    assert len(set(first)) == 8
    assert found["given"] == [3] * 8


def run(module: str, *arguments: str) -> str:
    """What a module prints last, in a process of its own."""
    command = [sys.executable, "-m", module, *arguments]
    environment = {**os.environ, "PYTHONPATH": PATHS}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


async def seeds_of_a_group(kind: type, replica: int, **given: int) -> list[int]:
    """The seeds with which a server of verl's asks its engine for eight samples of a prompt, under full_determinism."""
    asked: list[Any] = []

    class Engine:
        async def generate(self, sampling_params: Any, **_: Any) -> Any:
            asked.append(sampling_params)
            yield SimpleNamespace(outputs=[])

    async def admitted(_: str) -> None:
        return None

    server = object.__new__(kind)  # without a GPU, Ray and an engine of its own
    server.engine, server.replica_rank, server.global_steps = Engine(), replica, 3
    server._disaggregation_role, server._admitting = "null", 0
    server._park_until_admitted = admitted
    rollout = {"max_model_len": 64, "response_length": 8, "prompt_length": 8, "seed": 42, "full_determinism": True}
    server.config = type("Config", (SimpleNamespace,), {"get": lambda self, name, other=None: other})(**rollout)
    server.model_config = SimpleNamespace(processor=None, lora_rank=0, lora={})
    for priority in range(8):
        await server.generate([5, 6, 7], {"temperature": 1.0, **given}, f"det-{priority}", priority=priority)
    return [params.seed for params in asked]


def main() -> None:
    """Print what two replicas ask for, and what is registered."""
    from tests.hf.verl_engine import name_vllm

    name_vllm()
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.rollout.replica import get_rollout_replica_class
    from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer

    from vllm_batch_invariant.verl import plugin  # noqa: F401 - which registers

    server = verl.seeded_server()
    groups = {"stock": vLLMHttpServer, "ours": server}
    found = {name: [asyncio.run(seeds_of_a_group(kind, rank)) for rank in (0, 1)] for name, kind in groups.items()}
    found["given"] = asyncio.run(seeds_of_a_group(server, 0, seed=3))
    engine = EngineRegistry._engines["language_model"]["fsdp2"]["cuda", "nvidia"]
    print(json.dumps(found | {"registered": [get_rollout_replica_class("vllm").__name__, engine.__name__]}))


if __name__ == "__main__":
    main()

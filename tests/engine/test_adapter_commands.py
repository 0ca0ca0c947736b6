"""The commands on engines whose requests have LoRA adapters: a check holds, and finds a fault; a bisection finds
nothing, and names the product that has the fault.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.adapters import EXPANDS, SHRINKS, written
from tests.engine.engines import CHECK, EAGER_ON_GPU, OF_DEVICE, SETTINGS, arguments_of, run
from tests.engine.test_adapters import IN_ENGINE, ROOM, pytestmark  # noqa: F401 - where adapters are covered
from vllm_batch_invariant.verify.answers import RequestSpec
from vllm_batch_invariant.verify.check.engine import AdaptersRun, check_engine
from vllm_batch_invariant.verify.check.guarantees import ADAPTERS, APART, CONCURRENT, cases_of_adapters
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.harness.worker import Engine
from vllm_batch_invariant.verify.outcome import Outcome, Status
from vllm_batch_invariant.verify.reproduce import offline

LIMITS = {"max_model_len": 768, "max_num_seqs": 64, "skip_tokenizer_init": True, **ROOM, **OF_DEVICE}


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("adapters")
    return [str(written(folder / name, checkpoint, rank, rank)) for name, rank in (("A", 8), ("B", 16))]


def results_of() -> CheckResults:
    return CheckResults("VLLM_BATCH_INVARIANT=1", cases_of_adapters(CHECK))


def test_a_check_with_adapters_tests_every_case_and_holds(
    checkpoint: Path, folders: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    found = results_of()
    check_engine(str(checkpoint), arguments_of(LIMITS), "1", CHECK, found, lambda _: None, folders)
    assert [
        (case.name, case.detail) for case in found.cases if case.required and case.outcome is not Outcome.HOLDS
    ] == []
    assert found.status is Status.REPRODUCIBLE
    assert {ADAPTERS, APART} <= {*found.samples}
    assert found.info["adapters"] == folders
    assert "2 adapters in turn and none" in found.proof[CONCURRENT]
    assert not found.proof[APART].startswith("0 ")


def test_a_check_finds_rows_with_the_adapter_of_others(checkpoint: Path, folders: list[str]) -> None:
    def check(engine: Engine) -> dict[str, str]:
        faulty = AdaptersRun(engine, "as served", CHECK, results_of(), lambda _: None, folders)
        faulty.again()
        engine.call(f"{IN_ENGINE}:plant", "a row has its neighbour's adapter")
        faulty.with_concurrent_requests()
        return {case.name: case.outcome for case in faulty.results.cases}

    outcomes = run({"model": str(checkpoint), **LIMITS}, [], "1", afterwards=check).afterwards
    assert outcomes[CONCURRENT[1]] is outcomes[ADAPTERS[1]] is Outcome.BREAKS


def test_a_load_through_llm_has_adapters(checkpoint: Path, folders: list[str]) -> None:
    """The target has the first; concurrent requests have each in turn, and none."""
    spec = RequestSpec(prompt="def", max_tokens=6, ignore_eos=True, adapters=tuple(folders))
    request = {"samples": 12, "concurrency": 6, "seed": 0}

    def load(engine: Engine) -> list[int]:
        asked = [request | {"spec": vars(one)} for one in (spec, replace(spec, adapters=()))]
        done = [offline.run_of(engine.call(offline.RUN, one))[0] for one in asked]
        assert [one.failed_others for one in done] == [0, 0]
        assert done[0].answers[0] != done[1].answers[0]
        return [len({*one.answers}) for one in done]

    settings = {"model": str(checkpoint), **LIMITS, "skip_tokenizer_init": False}
    assert run(settings, [], "1", afterwards=load).afterwards == [1, 1]


@pytest.fixture(scope="module")
def bisected(checkpoint: Path, folders: list[str]) -> dict[str, Any]:
    settings = {"model": str(checkpoint), "max_model_len": 512, **ROOM, **OF_DEVICE, **EAGER_ON_GPU}
    return run(settings, [], "1", bisection=("adapters", folders)).bisected


def test_a_bisection_of_requests_with_adapters_finds_nothing(bisected: dict[str, Any]) -> None:
    for name in ("", "none"):
        assert bisected[name]["found"] is None
        assert bisected[name]["coverage"]["compared"] > 150
    assert "and the adapter " in bisected[""]["verdict"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the faults are of the CPU's operation")
@pytest.mark.parametrize(("fault", "product"), [(SHRINKS, "lora.shrink"), (EXPANDS, "lora.expand")])
def test_a_bisection_names_the_product_of_a_fault(bisected: dict[str, Any], fault: str, product: str) -> None:
    found = bisected[fault]["found"]
    key = found["divergence"]["key"]
    assert (key["module"], key["operation"]) == ("model.layers.0.self_attn.qkv_proj", product)
    assert list(found["operands_differ"]) == []
    assert found["repeats"]

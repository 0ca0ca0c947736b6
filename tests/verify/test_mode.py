"""The commands say which mode answered: with the flag at 1 and this plugin left out it is vLLM's own."""

import asyncio

import pytest
from rich.console import Console

from tests.fakes.server import Page, fake_server
from vllm_batch_invariant.integration.engine import install
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.check.report import Report, print_report
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.harness import mode
from vllm_batch_invariant.verify.harness.client import connect


@pytest.mark.parametrize(
    ("environment", "answered"),
    [
        ({}, mode.NONE),
        ({"VLLM_BATCH_INVARIANT": "0", "VLLM_PLUGINS": "batch_invariant"}, mode.NONE),
        ({"VLLM_BATCH_INVARIANT": "1"}, mode.OURS),
        ({"VLLM_BATCH_INVARIANT": "1", "VLLM_PLUGINS": "other,batch_invariant"}, mode.OURS),
        ({"VLLM_BATCH_INVARIANT": "1", "VLLM_PLUGINS": "other"}, mode.THEIRS),
        ({"VLLM_BATCH_INVARIANT": "1", "VLLM_PLUGINS": ""}, mode.THEIRS),
    ],
)
def test_of_a_server_that_is_started(environment: dict[str, str], answered: str) -> None:
    assert mode.of_started(environment) == answered


def test_of_an_engine_it_is_what_its_worker_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_BATCH_INVARIANT", raising=False)
    assert mode.of_engine() == mode.NONE
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    point = patch_points.INIT_BATCH_INVARIANCE
    monkeypatch.setattr(point.module(), point.attribute, lambda: None)
    assert mode.of_engine() == mode.THEIRS
    monkeypatch.setattr(point.module(), point.attribute, install.install_worker)
    assert mode.of_engine() == mode.OURS


@pytest.mark.parametrize(
    ("pages", "answered"),
    [
        ({}, mode.UNKNOWN),
        ({"batch_invariant": Page({"mode": True})}, mode.OURS),
        ({"batch_invariant": Page({"mode": None})}, mode.UNKNOWN),
        ({"metrics": Page(f'# TYPE {mode.METRIC} gauge\n{mode.METRIC}{{version="0.1.0"}} 1.0\n')}, mode.OURS),
        ({"metrics": Page(f'# TYPE {mode.METRIC} gauge\n{mode.METRIC}{{version="0.1.0"}} 0.0\n')}, mode.UNKNOWN),
        ({"metrics": Page("<html>")}, mode.UNKNOWN),
    ],
)
def test_of_a_server_that_runs_it_is_what_it_reports(pages: dict[str, Page], answered: str) -> None:
    async def ask(address: str) -> str:
        async with connect(address, None) as server:
            return await mode.of_server(server)

    with fake_server(**pages) as address:
        assert asyncio.run(ask(address)) == answered


def test_a_report_says_it_in_a_line_of_its_own() -> None:
    run = CheckResults("VLLM_BATCH_INVARIANT=1", ())
    run.info = {"mode": mode.THEIRS}
    console = Console(record=True, width=200)
    print_report(console, Report("model", "quick", (), "now", 1.0, (run,)))
    assert f"mode: {mode.THEIRS}" in console.export_text().splitlines()

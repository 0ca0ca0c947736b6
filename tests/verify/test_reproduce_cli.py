"""A run against a server that is no test. The servers here speak HTTP and have no model."""

from pathlib import Path

import pytest

from tests.fakes.server import LISTED, MODELS, Page, completion, fake_server
from tests.verify.commands import ended

ONE_RUNS = Page('# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{engine="0"} 1.0\n')


def test_identical_answers_from_an_engine_that_ran_them_one_by_one_are_no_test(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = tmp_path / "report.json"
    with fake_server(models=MODELS, metrics=ONE_RUNS, completions=completion(LISTED)) as url:
        load = ("--samples", 3, "--concurrency", 2)
        status, out, err = ended(capsys, "reproduce", "--base-url", url, *load, "--json", report)
    assert (status, out) == (2, "")
    assert "not a test: the engine never ran more than 1 request at a time" in err
    assert not report.exists()

"""``check --junit``: each case is a test, and tests fail exactly where the exit status is not 0."""

from pathlib import Path
from xml.etree import ElementTree as ET

from tests.fakes.server import LISTED, METRICS, MODELS, completion, fake_server
from tests.verify.test_check_cli import cases, ends, fake_engine

__all__ = ["fake_engine"]
FORMAT = {
    "testsuites": ({"name", "time"}, {"testsuite"}),
    "testsuite": (
        {"name", "tests", "failures", "errors", "skipped", "time", "timestamp"},
        {"properties", "testcase"},
    ),
    "properties": (set(), {"property"}),
    "property": ({"name", "value"}, set()),
    "testcase": ({"classname", "name"}, {"failure", "error", "skipped", "system-out"}),
    **dict.fromkeys(("failure", "error", "skipped"), ({"type", "message"}, set())),
    "system-out": (set(), set()),
}
"""Attributes and children of each element that Jenkins's schema, junit-10.xsd, allows, as far as they are written."""


def written(path: Path) -> ET.Element:
    root = ET.parse(path).getroot()
    for element in root.iter():
        attributes, children = FORMAT[element.tag]
        assert (set(element.attrib), {child.tag for child in element} - children) == (attributes, set()), element.tag
    return root


def counts(root: ET.Element) -> list[int]:
    """Of tests, failures, errors and skipped tests, as the suite says; the elements say the same."""
    [suite] = root
    tests = suite.findall("testcase")
    found = [sum(test.find(kind) is not None for test in tests) for kind in ("failure", "error", "skipped")]
    assert [suite.get(name) for name in ("failures", "errors", "skipped")] == list(map(str, found))
    assert suite.get("tests") == str(len(tests))
    return [len(tests), *found]


def test_every_case_of_the_report_is_a_test_that_passes_where_it_holds(capsys, tmp_path: Path) -> None:
    status, _, _ = ends(
        capsys, "x/y", "--quick", "--json", f"{tmp_path}/r.json", "--junit", f"{tmp_path}/r.xml",
        "--serve-args", "--seed 3",
    )  # fmt: skip
    root = written(tmp_path / "r.xml")
    reported = cases(tmp_path / "r.json")
    assert status == 0
    assert counts(root) == [len(reported), 0, 0, 0]
    found = {test.get("name"): (test.get("classname"), test.findtext("system-out")) for test in root.iter("testcase")}
    assert found == {
        name: (f"vllm-batch-invariant.{case['guarantee']}", case["detail"]) for name, case in reported.items()
    }
    properties = {one.get("name"): one.get("value") for one in root.iter("property")}
    assert {"target": "x/y", "preset": "quick", "arguments": "--seed 3", "flag": "1"}.items() <= properties.items()


def test_a_case_that_breaks_is_a_failure_with_the_token(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "breaks")
    status, _, _ = ends(capsys, "x/y", "--quick", "--junit", f"{tmp_path}/r.xml")
    root = written(tmp_path / "r.xml")
    _, failures, errors, _ = counts(root)
    assert (status, errors) == (1, 0)
    assert failures > 0
    [test] = [test for test in root.iter("testcase") if test.get("name") == "with concurrent requests"]
    failure = test.find("failure")
    assert "of them with other bits: with 1 other" in failure.get("message")
    assert failure.text.startswith("token 3, with 1 other: 100 instead of ")


def test_a_case_that_had_to_be_provoked_and_was_not_is_an_error(capsys, monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_ENGINE", "never-preempts")
    status, _, _ = ends(capsys, "x/y", "--quick", "--junit", f"{tmp_path}/r.xml")
    root = written(tmp_path / "r.xml")
    assert (status, counts(root)[1:]) == (2, [0, 1, 0])
    [error] = root.iter("error")
    assert "did not preempt" in error.get("message")


def test_why_an_engine_did_not_start_is_in_the_file(capsys, monkeypatch, tmp_path: Path) -> None:
    """Without a file, a CI server would show no test at all."""
    monkeypatch.setenv("FAKE_ENGINE", "no-start")
    status, _, _ = ends(capsys, "x/y", "--quick", "--junit", f"{tmp_path}/r.xml")
    root = written(tmp_path / "r.xml")
    tests, failures, errors, skipped = counts(root)
    assert (status, failures, errors, skipped) == (2, 0, tests, 0)
    assert all("the engine did not start: no such model" in error.get("message") for error in root.iter("error"))


def test_what_no_client_can_provoke_on_a_server_is_skipped(capsys, tmp_path: Path) -> None:
    with fake_server(models=MODELS, metrics=METRICS, completions=completion(LISTED)) as url:
        status, _, _ = ends(capsys, "--base-url", url, "--quick", "--junit", f"{tmp_path}/r.xml")
    root = written(tmp_path / "r.xml")
    assert (status, counts(root)[1:3]) == (0, [0, 0])
    [test] = [test for test in root.iter("testcase") if test.get("name") == "preemption"]
    assert "a client does not choose the server's KV cache" in test.find("skipped").get("message")

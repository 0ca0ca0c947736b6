"""A check as JUnit XML: a test for each case, for the servers of continuous integration."""

from typing import Any
from xml.etree import ElementTree as ET

from ..outcome import Outcome
from ..printing import printable  # XML has no control characters, which a server's error may have
from .guarantees import CaseResult
from .report import Report
from .results import CheckResults

PACKAGE = "vllm-batch-invariant"
"""What the class of every test begins with; the guarantee follows."""
_ELEMENTS = {Outcome.BREAKS: "failure", Outcome.NOT_TESTED: "error"}


def as_junit(report: Report) -> str:
    """The report as XML: a suite for each setting, in it a test for each case.

    A case that breaks is a failure and one that had to be tested and was not is an error, so the tests fail exactly
    where the check's exit status is not 0; one that this kind of check cannot test is skipped.
    """
    name = printable(f"{PACKAGE} check of {report.target}")
    root = ET.Element("testsuites", name=name, time=f"{report.seconds:.1f}")
    for run in report.runs:
        root.append(_suite(report, run))
    ET.indent(root, " ")
    return ET.tostring(root, "unicode", xml_declaration=True) + "\n"


def _suite(report: Report, run: CheckResults) -> ET.Element:
    cases = run.cases
    kinds = [_kind(case) for case in cases]
    counts = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    attributes = {"name": printable(run.label), "tests": str(len(cases))}
    attributes |= {name: str(kinds.count(kind)) for name, kind in counts.items()}
    suite = ET.Element("testsuite", attributes, time=f"{report.seconds:.1f}", timestamp=report.began)
    about: dict[str, Any] = {}
    for name, value in run.info.items():
        about |= {f"{name}.{part}": of for part, of in value.items()} if isinstance(value, dict) else {name: value}
    about |= {"target": report.target, "preset": report.preset, "arguments": " ".join(report.arguments)}
    properties = ET.SubElement(suite, "properties")
    for name, value in about.items():
        ET.SubElement(properties, "property", name=name, value=printable(str(value)))
    suite.extend(map(_test, cases))
    return suite


def _kind(case: CaseResult) -> str:
    """The element inside a test; empty for a test that passes."""
    return _ELEMENTS.get(case.outcome, "") if case.required or case.outcome is Outcome.BREAKS else "skipped"


def _test(case: CaseResult) -> ET.Element:
    test = ET.Element("testcase", classname=f"{PACKAGE}.{case.guarantee}", name=printable(case.name))
    if kind := _kind(case):
        element = ET.SubElement(test, kind, type=case.outcome.value, message=printable(case.detail))
        element.text = printable(case.difference)
    else:
        ET.SubElement(test, "system-out").text = printable(case.detail)
    return test

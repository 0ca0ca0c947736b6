"""What somebody has read is data: every name in one list, one reader, and a function known by its text."""

import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

from scripts.import_graph import imports
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import sources

SUBJECTS = ("calls", "claims", "fields", "functions", "layers", "ran", "variables")
FORWARD = "    def forward(self, x):\n        return self.last(self.first(x))\n"
OTHER = "    def forward(self, x):\n        return self.first(self.last(x))\n"
LAYER = "class Layer:\n"


def test_the_package_brings_every_file_and_reads_each() -> None:
    there = {file.name for file in files(reviews).iterdir() if file.name.endswith(".toml")}
    assert there == {f"{subject}.toml" for subject in SUBJECTS}
    for subject in SUBJECTS:
        assert tomllib.loads(Path(reviews.__file__).with_name(f"{subject}.toml").read_text()) == reviews.table(subject)
    assert all((reviews.calls(), reviews.claims(), reviews.classes(), reviews.layers(), reviews.ran()))
    assert len(reviews.fields()) > 15
    assert len(reviews.variables().known) > 200


def test_readers_of_reviews_know_nothing_else_of_the_package() -> None:
    readers, imported = {reviews.__name__, sources.__name__}, imports()
    found = {other for name in readers for other in imported[name]}
    assert {other for other in found if other.startswith("vllm_batch_invariant")} <= readers


def _lists(found: Any) -> Iterator[list[str]]:
    """The lists of names in a table, each as it is written."""
    if isinstance(found, dict):
        for inside in found.values():
            yield from _lists(inside)
    elif isinstance(found, list) and all(isinstance(line, str) for line in found):
        yield found


@pytest.mark.parametrize("subject", ["fields", "claims", "layers"])
def test_a_list_has_no_name_twice(subject: str) -> None:
    table = reviews.table(subject)
    twice = [
        name
        for lists in _lists(table)
        for name, times in Counter(name for line in lists for name in line.split()).items()
        if times > 1
    ]
    assert twice == []


@pytest.mark.parametrize("review", [*reviews.fields().values(), reviews.claims(), reviews.variables()])
def test_a_name_has_one_verdict(review: reviews.Review) -> None:
    assert not review.known & review.refused
    assert not (review.known | review.refused) & {*review.default_only}


def test_a_verdict_is_one_of_three_words_or_none() -> None:
    review = reviews.Review.of(
        {"known": {"why": ["free other", "VLLM_ROCM_*"]}, "refused": ["denied"], "default_only": {"fixed": [1, 2]}}
    )
    given = {name: review.verdict(name) for name in ("free", "other", "VLLM_ROCM_X", "denied", "fixed", "later")}
    assert given == {
        "free": "known",
        "other": "known",
        "VLLM_ROCM_X": "known",
        "denied": "refused",
        "fixed": "default only",
        "later": None,
    }
    assert review.default_only["fixed"] == (1, 2)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module with a layer whose forward method was read."""
    (tmp_path / "module_with_a_layer.py").write_text(LAYER + FORWARD)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "module_with_a_layer", raising=False)
    made = __import__("module_with_a_layer")
    read = {"Layer.forward": (sources.digests(LAYER + FORWARD)["Layer.forward"],)}
    monkeypatch.setattr(sources, "functions", lambda use: {made.__name__: read} if use == "forwards" else {})
    yield made
    sys.modules.pop(made.__name__)


def test_a_function_is_known_by_its_text_and_not_by_the_names_that_it_reads(module: ModuleType) -> None:
    forward = module.Layer.forward
    assert sources.is_read("forwards", forward)
    assert not sources.is_read("sampling", forward)
    Path(module.__file__).write_text(LAYER + OTHER)
    other: dict[str, Any] = {}
    exec(compile(LAYER + OTHER, module.__file__, "exec"), other)
    assert {*other["Layer"].forward.__code__.co_names} == {*forward.__code__.co_names}, "the names are the same"
    assert not sources.is_read("forwards", forward)


def test_a_function_that_somebody_has_put_there_was_not_read(module: ModuleType) -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.last(self.first(x))

    assert not sources.is_read("forwards", forward)
    forward.__module__, forward.__qualname__ = module.__name__, "Layer.forward"
    assert not sources.is_read("forwards", forward)
    named = forward.__code__.replace(co_qualname="Layer.forward")
    assert not sources.is_read("forwards", FunctionType(named, {"__name__": module.__name__}))
    assert not sources.is_read("forwards", print)


def test_every_function_that_is_read_for_a_faster_form_is_in_the_installed_vllm_as_it_was_read() -> None:
    pytest.importorskip("vllm")
    assert {use: sources.unread(use, sources.installed) for use in ("forwards", "decoders", "drafter")} == {
        "forwards": {},
        "decoders": {},
        "drafter": {},
    }

"""The page of Python functions is what the docstrings say, and what can be imported."""

import ast
from importlib import import_module

import pytest

from scripts import api_reference
from scripts.api_reference import MODULES, PAGE, Definition, definition, page, prose, public, signature
from vllm_batch_invariant.errors import NotCovered


def test_the_page_is_that_of_the_sources() -> None:
    assert PAGE.read_text() == page(), "run: python -m scripts.api_reference"


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_on_the_page_with_words(module: str) -> None:
    text = PAGE.read_text().partition(f"\n## {module}\n")[2].partition("\n## ")[0]
    for name in public(module):
        node = definition(module, name)
        if node is None:
            assert f"`{name}`" in text
        else:
            assert f"\n### {name}\n" in text
            assert ast.get_docstring(node), f"{module}.{name} has no docstring"


@pytest.mark.parametrize("module", MODULES)
def test_what_is_on_the_page_can_be_imported(module: str) -> None:
    try:
        imported = import_module(module)
    except NotCovered:
        pytest.skip("a trainer is not installed")
    assert [name for name in public(module) if not hasattr(imported, name)] == []


def test_a_change_of_a_signature_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = page()
    found = definition

    def changed(module: str, name: str) -> Definition | None:
        node = found(module, name)
        if name == "sample_seed":
            node.args.args[0].arg = "another"
        return node

    monkeypatch.setattr(api_reference, "definition", changed)
    assert page() == before.replace("sample_seed(seed: int, sample_id", "sample_seed(another: int, sample_id") != before


def test_a_name_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"seeds has no made_up"):
        definition("vllm_batch_invariant.seeds", "made_up")
    with pytest.raises(ValueError, match="has no __all__"):
        public("vllm_batch_invariant.envs")


def test_docstrings_become_markdown() -> None:
    text = (
        "Of :func:`.hf.patch`, ``x``::\n\n    one = 1\n\n    two = 2\n\nRaises:\n    ValueError: why\n        it is.\n"
    )
    expected = "Of `hf.patch`, `x`:\n\n```text\none = 1\n\ntwo = 2\n```\n\nRaises:\n\n- `ValueError`: why it is."
    assert prose(text) == expected
    [function] = ast.parse("async def f(a: int, *, b=2) -> None: pass").body
    assert signature(function) == "async f(a: int, *, b=2) -> None"

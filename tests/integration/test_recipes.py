"""Every variant of vLLM's recipes goes through the start-up check, and the table says what comes out."""

import pytest

from scripts.recipes.table import read
from scripts.trainers import table as trainers
from scripts.trainers.gate import STARTS
from tests.integration.conftest import Published
from tests.integration.known_layers import check_layers

VERDICTS = ("verdict", "with_features", "with_drafts")
_OF_TRAINERS = {row.architecture for row in trainers.read() if row.alone == STARTS}
"""Classes that ``test_trainers.py`` looks at."""


def test_the_table_says_what_the_check_says(published: Published) -> None:
    """``python -m scripts.recipes gate --write`` renews the table."""
    differ = [
        f"{new.recipe} {new.variant} {name}: {getattr(old, name)} -> {getattr(new, name)}"
        for old, new in zip(read(), published.recipes, strict=True)
        for name in VERDICTS
        if getattr(old, name) != getattr(new, name)
    ]
    assert not differ, "\n".join(differ)


@pytest.mark.parametrize(
    "architecture", sorted({row.architecture for row in read() if row.verdict == STARTS} - _OF_TRAINERS)
)
def test_the_layers_of_a_model_that_passes_are_known(architecture: str) -> None:
    check_layers(architecture)


def test_what_most_users_serve_starts(published: Published) -> None:
    starting = {row.checkpoint for row in published.recipes if row.with_features == STARTS}
    assert starting >= {
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-32B-FP8",
        "Qwen/Qwen3.5-27B",
        "meta-llama/Llama-3.1-8B-Instruct",
        "openai/gpt-oss-120b",
    }
    assert len(starting) >= 80
    assert any(row.with_drafts == STARTS for row in published.recipes)

"""The README's example of offline inference is saved as a file and run as it is printed."""

from pathlib import Path

import pytest

from tests.engine.engines import run_example

pytestmark = pytest.mark.engine


def test_the_example_of_the_readme_runs_as_a_file(checkpoint: Path, tmp_path: Path) -> None:
    (tmp_path / "MODEL").symlink_to(checkpoint)
    done = run_example("README.md", "LLM(", tmp_path)
    assert "Matmuls: " in done.stdout + done.stderr, "the mode was not on"
    assert done.stdout.strip()

"""The README's example of offline inference is saved as a file and run as it is printed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.documents import blocks
from tests.engine.engines import ROOT

pytestmark = pytest.mark.engine


def test_the_example_of_the_readme_runs_as_a_file(checkpoint: Path, tmp_path: Path) -> None:
    code = [text for language, text in blocks((ROOT / "README.md").read_text()) if language == "python"]
    [offline] = [text for text in code if "LLM(" in text]
    (tmp_path / "offline.py").write_text(offline)
    (tmp_path / "MODEL").symlink_to(checkpoint)
    # the variable that the README names for a CPU, and what only a checkout needs
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(
        [sys.executable, "offline.py"],
        cwd=tmp_path,
        env={**os.environ, **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Matmuls: " in done.stdout + done.stderr, "the mode was not on"
    assert done.stdout.strip()

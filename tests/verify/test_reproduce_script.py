"""scripts/reproduce.py is the command ``reproduce``, from a checkout in which nothing is installed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.reproduce import arguments_of
from tests.fakes.server import MODELS, fake_server

SCRIPT = Path(__file__).parents[2] / "scripts" / "reproduce.py"


@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["MODEL"], ["reproduce", "MODEL", "--compare"]),
        (["MODEL", "--samples", "9"], ["reproduce", "MODEL", "--samples", "9", "--compare"]),
        (["MODEL", "--plain"], ["reproduce", "MODEL", "--plain"]),
        (["MODEL", "--offline"], ["reproduce", "MODEL", "--offline"]),
        (["--base-url=http://h:1"], ["reproduce", "--base-url=http://h:1"]),
        ([], ["reproduce", "--help"]),
    ],
)
def test_a_model_is_served_without_and_with_the_mode(words: list[str], arguments: list[str]) -> None:
    assert arguments_of(words) == arguments


def test_its_thousand_samples_status_and_words_are_the_commands(tmp_path: Path) -> None:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def said(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, SCRIPT, *words], cwd=tmp_path, env=kept, capture_output=True, text=True, check=False
        )

    helped = said()
    assert (helped.returncode, helped.stderr) == (0, "")
    assert "times the request is sent (default: 1000)" in " ".join(helped.stdout.split())
    with fake_server(models=MODELS) as url:
        asked = said("--base-url", url)
    assert asked.returncode == 2
    assert "lacks vllm:num_requests_running" in asked.stderr


def test_it_runs_the_sources_of_its_checkout_and_none_of_its_neighbours(tmp_path: Path) -> None:
    program = f"import runpy, sys; sys.argv = [{str(SCRIPT)!r}]; sys.path[0] = {str(SCRIPT.parent)!r}\n"
    program += f"try:\n    runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\nexcept SystemExit:\n    pass\n"
    program += "import vllm_batch_invariant; print(vllm_batch_invariant.__file__, sys.path[0], file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=True)
    root = SCRIPT.parents[1]
    assert done.stderr == f"{root / 'vllm_batch_invariant' / '__init__.py'} {root}\n"

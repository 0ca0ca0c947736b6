"""Everything for NPUs lies in one folder, and the rest of the code does not know it."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.documents import ROOT

NAMES = re.compile(r"(?<![A-Za-z])(npu|NPU)|\bAscend|[Aa]scendnpu|vllm.ascend|[\"'./]ascend\b")
MAY = {
    "scripts/run_tests.py": "the parts of make test",
    "scripts/trainers/verl.py": "names of verl's own recipes and settings",
    "tests/conftest.py": "what -m npu collects",
    "tests/test_compare.py": "libraries that are not imported",
    "tests/test_extras.py": "what an extra brings",
    "tests/test_imports.py": "the table of rooms",
}
"""Files outside that name it, and why."""


def naming(root: Path) -> Iterator[str]:
    """Files of code, outside the folders for NPUs, that name them."""
    for folder in ("vllm_batch_invariant", "scripts", "benchmarks", "tests"):
        for path in sorted((root / folder).rglob("*")):
            name = path.relative_to(root)
            if path.suffix in (".py", ".toml") and name.parts[1] != "ascend" and NAMES.search(path.read_text()):
                yield name.as_posix()


def test_nothing_outside_names_it() -> None:
    assert list(naming(ROOT)) == [*MAY]


@pytest.mark.parametrize(
    "line",
    [
        'if device_type == "npu":',
        "from .ascend import install",
        "on an NPU",
        "import torch_npu",
        "vllm_ascend.worker",
        "# an Ascend NPU",
        "_NPU_BLOCK = 128",
        'import_module("vllm_batch_invariant.ascend")',
    ],
)
def test_a_name_is_found(line: str, tmp_path: Path) -> None:
    for folder in ("ops", "ascend"):
        module = tmp_path / "vllm_batch_invariant" / folder / "module.py"
        module.parent.mkdir(parents=True)
        module.write_text(f"{line}\n")
    assert list(naming(tmp_path)) == ["vllm_batch_invariant/ops/module.py"]


@pytest.mark.parametrize("line", ["the inputs ascend", "NUM_INPUTS = 1", "unpublished", "positions, ascending"])
def test_another_word_is_none(line: str, tmp_path: Path) -> None:
    (tmp_path / "vllm_batch_invariant" / "ops").mkdir(parents=True)
    (tmp_path / "vllm_batch_invariant" / "ops" / "module.py").write_text(line)
    assert list(naming(tmp_path)) == []

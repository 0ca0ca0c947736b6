"""The changelog: of this version, and with the sources that decide its bits."""

import re
import shutil
import tomllib
from functools import cache
from pathlib import Path

import pytest

from scripts import bit_sources, compare_witnesses
from scripts.bit_sources import CHANGELOG, OPS, digests, recorded, table

ROOT = CHANGELOG.parent


def test_the_newest_entry_is_of_this_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert re.findall(r"^## \[(.*?)\]", CHANGELOG.read_text(), re.MULTILINE)[0] == version


def test_sources_that_decide_bits_do_not_change_without_a_word() -> None:
    assert recorded(CHANGELOG.read_text()) == table(), (
        "a reduction or a kernel changed: say in CHANGELOG.md, under Bits, whether bits changed against the last "
        "release, and record the digests by: python -m scripts.bit_sources --record"
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(OPS.parent, tmp_path / "package")) / "ops"


@cache
def _as_they_are() -> dict[str, dict[str, str]]:
    return digests()


def changed(copy: Path, file: str, before: str, after: str) -> dict[str, set[str]]:
    """The devices on which each operation's digest changed with one source."""
    path = copy / file
    text = path.read_text()
    assert before in text, f"{file} has no {before!r}"
    path.write_text(text.replace(before, after, 1))
    was, now = _as_they_are(), digests(copy)
    found = {name: {device for device in now[name] if now[name][device] != was[name][device]} for name in now}
    return {name: devices for name, devices in found.items() if devices}


@pytest.mark.parametrize(
    ("file", "before", "after", "devices"),
    [
        ("attention/reduction.py", "= 256", "= 128", {"attention": {"cpu", "cuda"}}),
        ("common/row_reduction.py", "LANES = 64", "LANES = 32", {"common": {*bit_sources.DEVICES}}),
        ("common/rows.py", "import torch", "import torch\nLANES = 32", {}),
        ("common/numba_math.py", "@njit", "@njit(fastmath=True)", {"common": {"cpu"}}),
        ("softmax/cuda.py", "def _", "def _another", {"softmax": {"cuda"}}),
        ("linear/cpu.py", "def prepare_weight", "def prepare", {"linear": {"cpu"}}),
    ],
)
def test_a_change_is_seen_where_it_is(
    copy: Path, file: str, before: str, after: str, devices: dict[str, set[str]]
) -> None:
    assert changed(copy, file, before, after) == devices


@pytest.mark.parametrize("before", ["import torch\n", "@triton.jit\n"])
def test_comments_and_docstrings_are_no_change(copy: Path, before: str) -> None:
    assert changed(copy, "softmax/cuda.py", before, f"# why\n{before}") == {}
    first = (copy / "softmax/cuda.py").read_text().partition('"""')[2].partition('"""')[0]
    assert changed(copy, "softmax/cuda.py", first, "Another sentence.") == {}


def test_recording_replaces_the_first_table_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = "| operation | CPU |\n| --- | --- |\n| linear | 00000000 |\n"
    monkeypatch.setattr(bit_sources, "CHANGELOG", tmp_path / "CHANGELOG.md")
    bit_sources.CHANGELOG.write_text(f"## next\n\n{old}\n## before\n\n{old}")
    assert bit_sources.main(["--record"]) == 0
    assert bit_sources.CHANGELOG.read_text() == f"## next\n\n{table()}\n## before\n\n{old}"
    with pytest.raises(ValueError, match="no table"):
        recorded("nothing")


def test_the_changelog_says_of_each_model_whether_its_witness_changed() -> None:
    newest = CHANGELOG.read_text().partition(recorded(CHANGELOG.read_text()))[0]
    assert compare_witnesses.said_in(newest).keys() == compare_witnesses.MODELS.keys()


def test_what_is_recorded_of_witnesses_is_read_again_and_takes_the_place_of_the_last_record() -> None:
    text = f"## [2]\n\n### Bits\n\nSome.\n\n{table()}\n## [1]\n"
    once = compare_witnesses.with_table(text, "v1", {"dense": False, "experts": True}, "another order")
    assert compare_witnesses.said_in(once) == {"dense": "no", "experts": "yes: another order"}
    again = compare_witnesses.with_table(once, "v1", {"dense": False}, "")
    assert compare_witnesses.said_in(again) == {"dense": "no"}
    assert compare_witnesses.TABLE.sub("", again) == text
    with pytest.raises(ValueError, match="say why"):
        compare_witnesses.with_table(text, "v1", {"dense": True}, "")


@pytest.mark.parametrize(
    ("said", "changed", "is_wrong"),
    [("no", False, False), ("yes: a split", True, False), ("no", True, True), ("yes: a split", False, True)],
)
def test_a_changelog_that_says_something_else_of_a_witness_is_wrong(said: str, changed: bool, is_wrong: bool) -> None:
    assert bool(compare_witnesses.wrong({"dense": said}, {"dense": changed})) is is_wrong
    assert compare_witnesses.wrong({}, {"dense": changed})

"""A file that keeps measurements is a help and never a need: broken, locked or unwritable, it stops nothing."""

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from vllm_batch_invariant import kept_file

BREAK: dict[str, Callable[[Path], object]] = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:-9]),
    "binary": lambda path: path.write_bytes(os.urandom(4096)),
    "no UTF-8": lambda path: path.write_bytes(b'{"content": "\xff", "sha256": ""}'),
    "another shape": lambda path: path.write_text('{"environment": {}, "products": {}}'),
    "a list": lambda path: path.write_text("[]"),
    "a number": lambda path: path.write_text("7"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "a changed value": lambda path: path.write_text(path.read_text().replace("17", "18")),
    "no digest": lambda path: path.write_text('{"content": {"a": 17}}'),
    "a folder": lambda path: (path.unlink(), path.mkdir(), (path / "something").write_text("")),
    "a loop of links": lambda path: (path.unlink(), path.symlink_to(path)),
}


@pytest.fixture(autouse=True)
def nothing_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_file, "_left_alone", set())


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with something in it."""
    kept_file.update(tmp_path / "cache" / "kept.json", lambda content: {"a": 17})
    return tmp_path / "cache" / "kept.json"


def test_what_is_kept_is_read_back_and_changed(path: Path) -> None:
    assert kept_file.read(path) == {"a": 17}
    kept_file.update(path, lambda content: content | {8: (1, 2.5)})
    assert kept_file.read(path) == {"a": 17, "8": [1, 2.5]}
    assert {file.name for file in path.parent.iterdir()} <= {"kept.json", "kept.json.lock"}


def test_a_file_that_is_not_there_is_nothing_and_no_matter(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (None, tmp_path / "none.json", tmp_path / "none" / "none.json", tmp_path / "file" / "none.json"):
        assert kept_file.read(path) is None
    assert log.records == []


@pytest.mark.parametrize("breaks", BREAK.values(), ids=BREAK)
@pytest.mark.parametrize("before", [False, True], ids=["", "once more"])
def test_a_broken_file_is_set_aside_with_one_warning_and_written_anew(
    path: Path, log: pytest.LogCaptureFixture, breaks: Callable[[Path], object], before: bool
) -> None:
    broken = path.with_name("kept.json.broken")
    if before:
        broken.write_text("of last week")
    breaks(path)
    assert kept_file.read(path) is None
    [record] = log.records
    assert record.levelname == "WARNING"
    assert str(path) in record.message
    assert "\n" not in record.message
    assert kept_file.read(path) is None
    assert len(log.records) == 1
    kept_file.update(path, lambda content: {"b": content})
    left_alone = path.is_dir()  # a folder does not go over a file
    assert kept_file.read(path) == (None if left_alone else {"b": None})
    assert left_alone == (before and breaks is BREAK["a folder"])


def test_two_processes_lose_nothing(path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(path, name)) for name in "bcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert kept_file.read(path) == {"a": 17} | {f"{name}{number}": number for name in "bcd" for number in range(20)}


def _write(path: Path, name: str) -> None:
    for number in range(20):
        kept_file.update(path, lambda content, number=number: content | {f"{name}{number}": number})


def test_a_lock_that_another_keeps_is_waited_for_once_and_said(
    path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kept_file, "LOCK_SECONDS", 0.2)
    with FileLock(f"{path}.lock"):
        begin = time.monotonic()
        kept_file.update(path, lambda content: {})
        assert 0.2 <= time.monotonic() - begin < 5
        assert [record.levelname for record in log.records] == ["INFO", "WARNING"]
        assert f"another process has held {path}.lock for more than 0.2 s" in log.records[1].message
        begin = time.monotonic()
        for _ in range(5):
            kept_file.update(path, lambda content: {})
        assert time.monotonic() - begin < 0.2
    assert len(log.records) == 2
    assert kept_file.read(path) == {"a": 17}


def test_a_lock_that_is_free_in_time_is_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_file, "LOCK_SECONDS", 20.0)
    context = multiprocessing.get_context("fork")
    taken = context.Event()
    holder = context.Process(target=_hold, args=(path, taken))
    holder.start()
    assert taken.wait(60)
    kept_file.update(path, lambda content: content | {"b": 1})
    holder.join(60)
    assert kept_file.read(path) == {"a": 17, "b": 1}


def _hold(path: Path, taken: multiprocessing.Event) -> None:
    with FileLock(f"{path}.lock"):
        taken.set()
        time.sleep(0.5)


def test_a_folder_that_cannot_be_written_is_left_alone_with_one_warning(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("mine")
    for _ in range(3):
        kept_file.update(tmp_path / "file" / "kept.json", lambda content: {})
    [record] = log.records
    assert record.levelname == "WARNING"
    assert "is not written" in record.message
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("call", ["mkdir", "replace", "write_text"])
def test_a_disk_that_is_full_or_read_only_is_one_warning_and_leaves_nothing(
    path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture, call: str
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, call, refuse)
    kept_file.update(path, lambda content: {})
    [record] = log.records
    assert "No space left on device" in record.message
    assert kept_file.read(path) == {"a": 17}
    assert {file.name for file in path.parent.iterdir()} <= {"kept.json", "kept.json.lock"}


def test_somebody_elses_file_is_neither_read_nor_moved(
    path: Path, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    def refuse(self: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", refuse)  # root may read everything
        assert kept_file.read(path) is None
        kept_file.update(path, lambda content: {})
    [record] = log.records
    assert "cannot be read (Permission denied)" in record.message
    assert path.read_bytes() == before


def test_a_user_without_a_home_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)  # as for a user id that is not in the password file
    assert kept_file.path_of("kept.json") is None
    kept_file.update(None, lambda content: json.loads("never called"))
    kept_file.set_aside(None, "of no matter")

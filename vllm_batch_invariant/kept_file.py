"""Files of JSON that keep from one start to the next what was measured or hashed. They are a help and never a need: one
that is broken is set aside, a lock is waited for with a limit, and without a folder to write to everything is measured
again. Each of these is a warning, and none an error.
"""

import hashlib
import json
import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from .envs import cache_folder

LOCK_SECONDS = 10.0
"""How long another process may hold a file's lock; it is needed for milliseconds."""
_left_alone: set[Path] = set()
"""Files that this process could not write: it waits and warns once."""

logger = logging.getLogger("vllm.batch_invariant")


def path_of(name: str) -> Path | None:
    """Where a file of that name is kept; None for a user without a home, if ``XDG_CACHE_HOME`` is not set either."""
    try:
        return cache_folder() / name
    except RuntimeError:
        return None


def read(path: Path | None) -> Any:
    """What a file holds; None where there is none. One that is not as :func:`update` wrote it is set aside."""
    if path is None:
        return None
    try:
        stored = json.loads(path.read_bytes())
        content = stored["content"]
        if stored["sha256"] != _digest(content):
            raise ValueError("its digest is not that of its content")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError as error:  # somebody else's, who may read it
        _warn(path, f"{path} cannot be read ({error.strerror}), so what it keeps is measured again")
        return None
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        set_aside(path, error)
        return None
    return content


def update(path: Path | None, change: Callable[[Any], Any]) -> None:
    """Put in a file what ``change`` makes of what it holds, None if that is nothing.

    A file that cannot be written, or whose lock another process keeps, is left alone from then on.
    """
    if path is None or path in _left_alone:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path):
            content = json.loads(json.dumps(change(read(path))))  # as it will be read
            _write(path, {"content": content, "sha256": _digest(content)})
    except Timeout:
        _leave_alone(path, f"another process has held {path}.lock for more than {LOCK_SECONDS:g} s")
    except (OSError, RuntimeError) as error:  # a lock that the file system does not have is the latter
        _leave_alone(path, str(error))


def set_aside(path: Path | None, why: Exception | str) -> None:
    """Rename a broken file, so that it is written anew, and warn; one that is gone already is no matter."""
    if path is None:
        return
    broken = path.with_name(f"{path.name}.broken")
    try:
        path.replace(broken)
    except FileNotFoundError:
        return
    except OSError as error:
        _warn(path, f"{path} is broken ({why}) and cannot be set aside ({error}), so what it keeps is measured again")
    else:
        logger.warning("%s was broken (%s); it is %s now, and what it kept is measured again.", path, why, broken.name)


def _locked(path: Path) -> AbstractContextManager[Any]:
    lock = FileLock(f"{path}.lock")
    try:
        return lock.acquire(timeout=0)
    except Timeout:
        logger.info("Waiting up to %g s for %s.lock, which another process holds.", LOCK_SECONDS, path)
        return lock.acquire(timeout=LOCK_SECONDS)


def _write(path: Path, data: dict[str, Any]) -> None:
    written = path.with_suffix(f".{os.getpid()}")
    try:
        written.write_text(json.dumps(data, indent=1))
        written.replace(path)
    finally:
        written.unlink(missing_ok=True)


def _digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _leave_alone(path: Path, why: str) -> None:
    _warn(path, f"{path} is not written, because {why}: the next start measures again what is missing in it")


def _warn(path: Path, line: str) -> None:
    if path not in _left_alone:
        _left_alone.add(path)
        logger.warning("%s.", line)

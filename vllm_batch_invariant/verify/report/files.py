"""The report files of a run: known to be writable before it starts, and written whole at its end."""

import os
from pathlib import Path

from ..outcome import NoTestError


def why_not_writable(path: Path) -> str:
    """Why a file cannot be written, in words; empty if it can. Nothing is left behind."""
    if not path.absolute().parent.is_dir():
        return "no such folder"
    try:
        # without O_TRUNC: what is in the file stays until there is something to put in its place
        created = not path.exists()
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o666))
        if created:
            path.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def write(path: Path, text: str) -> None:
    """Write a report.

    Raises:
        NoTestError: the disk is full, or the file cannot be written any more.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise NoTestError(f"{path} cannot be written: {error.strerror or error}") from error

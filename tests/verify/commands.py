"""A command as a user types it: how it ends, and what it says."""

from typing import NamedTuple

import pytest

from vllm_batch_invariant.cli import main


class Ended(NamedTuple):
    """The exit status, and what is on stdout and stderr."""

    status: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """On stderr, but the one that names the mode."""
        return [line for line in self.err.strip().splitlines() if not line.startswith("testing ")]


def ended(capsys: pytest.CaptureFixture[str], *arguments: object) -> Ended:
    """Run a command to its end; there is never a traceback."""
    try:
        status = main([*map(str, arguments)])
    except SystemExit as end:
        status = end.code
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    return Ended(status, said.out, said.err)

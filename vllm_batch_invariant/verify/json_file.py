"""What ``--json`` writes: one object, whose ``format`` and ``version`` say how to read it (docs/commands.md)."""

import argparse
import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from .. import envs
from ..version import __version__
from .report.files import write

VERSION = 1
"""Of the formats: it rises when a field changes its name or meaning, and stays when one is added."""
_NAMED = ("VLLM_PLUGINS", "VLLM_CPU_KVCACHE_SPACE", "VLLM_ENABLE_V1_MULTIPROCESSING")
"""Variables of vLLM's that a result may depend on, and that hold no secret."""


@dataclass(frozen=True)
class JsonFile:
    """A file, or stdout as it was when the command began."""

    path: Path | None
    stdout: TextIO

    def write(self, options: argparse.Namespace, status: int, content: Mapping[str, Any]) -> None:
        """Write a result.

        Args:
            options: of the command, with its name (``command``) and when it began (``began``).
            status: the exit status.
            content: the fields of the command.

        Raises:
            NoTestError: the file cannot be written.
        """
        data = {"format": f"vllm-batch-invariant {options.command}", "version": VERSION, "status": int(status)}
        text = json.dumps(data | dict(content) | run(options.began), indent=1, default=str) + "\n"
        if self.path is None:
            self.stdout.write(text)
            self.stdout.flush()
        else:
            write(self.path, text)

    def __str__(self) -> str:
        return "stdout" if self.path is None else str(self.path)


def run(began: datetime) -> dict[str, Any]:
    """When and where a command ran: ISO 8601, seconds, this project's version, and the machine that ran the command,
    which is not that of a server elsewhere.
    """
    names = [*(variable.name for variable in envs.VARIABLES), *_NAMED]
    return {
        "began": began.isoformat(timespec="seconds"),
        "seconds": round((datetime.now().astimezone() - began).total_seconds(), 1),
        "written_by": __version__,
        "environment": {name: os.environ[name] for name in names if name in os.environ},
        "machine": {
            "system": platform.platform(),
            "processor": platform.machine(),
            "cores": os.cpu_count(),
            "python": ".".join(map(str, sys.version_info[:3])),
        },
    }

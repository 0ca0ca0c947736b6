"""Where the site's recordings lie, and where and with what they were made."""

import os
import platform
import re
from datetime import UTC, datetime
from pathlib import Path

import torch

from vllm_batch_invariant import __version__

DATA = Path(__file__).parents[2] / "site" / "data"


def processor() -> str:
    """The kind of CPU, with the vector instructions that PyTorch uses."""
    try:
        named = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        named = None
    return f"{named[1] if named else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"


def here() -> dict[str, str]:
    """The machine and the versions of a recording on a CPU."""
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "vllm-batch-invariant": __version__,
        "date": datetime.now(UTC).date().isoformat(),
    }

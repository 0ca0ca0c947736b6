"""Measurements, and the CSV files that keep them: one row a measurement, the newest run replaces the file."""

import csv
import platform
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import torch

from vllm_batch_invariant import __version__

DATA = Path(__file__).parent / "data"
Bits = Literal["equal", "differ", "-"]
"""Whether the bits held what ours promises: of another provider it is a control. ``-`` where nobody looked."""
_DIGITS = 5


@dataclass(frozen=True)
class Setting:
    """Where and when a run was made."""

    gpu: str
    versions: str
    date: str

    @classmethod
    def here(cls) -> "Setting":
        """The current GPU (or the kind of CPU), the installed versions and today."""
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
        return cls(name, versions(), datetime.now(UTC).date().isoformat())


@dataclass(frozen=True)
class Measurement:
    """One row of a CSV file; its fields are the columns."""

    benchmark: str
    provider: str
    case: str
    """``key=value`` pairs separated by spaces."""
    metric: str
    unit: str
    p50: float
    p20: float
    p80: float
    ratio: float | None
    """p50 against that of ``stock`` in the same run; None where stock was not measured."""
    bits: Bits
    gpu: str
    versions: str
    date: str

    @cached_property
    def keys(self) -> dict[str, str]:
        """The case as a dictionary."""
        return dict(pair.split("=", 1) for pair in self.case.split())


def case_text(**keys: object) -> str:
    """A case as it is written: ``M=8 N=4096``."""
    return " ".join(f"{key}={value}" for key, value in keys.items())


def versions() -> str:
    """The versions that a measurement depends on, in the form of a case."""
    return case_text(
        torch=torch.__version__,
        triton=_installed("triton"),
        cuda=torch.version.cuda,
        vllm=_installed("vllm"),
        **{"vllm-batch-invariant": __version__},
    )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write(path: Path, measurements: Iterable[Measurement]) -> None:
    """Replace the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Measurement)], lineterminator="\n")
        writer.writeheader()
        for measurement in measurements:
            writer.writerow({name: _text(value) for name, value in asdict(measurement).items()})


def update(path: Path, measurements: Sequence[Measurement]) -> None:
    """Replace what a file has of the same cases on the same GPU with the same versions, and leave the rest below."""

    def case(row: Measurement) -> tuple[str, ...]:
        return row.gpu, row.versions, row.provider, row.case, row.metric

    own = {case(row) for row in measurements}
    write(path, [*measurements, *(row for row in (read(path) if path.is_file() else []) if case(row) not in own)])


def _text(value: str | float | None) -> str:
    if value is None:
        return ""
    return f"{value:.{_DIGITS}g}" if isinstance(value, float) else value


def read(path: Path) -> list[Measurement]:
    """The rows of a file that :func:`write` wrote."""
    with path.open(newline="") as file:
        return [
            Measurement(
                **row
                | {name: float(row[name]) for name in ("p50", "p20", "p80")}
                | {"ratio": float(row["ratio"]) if row["ratio"] else None}
            )
            for row in csv.DictReader(file)
        ]


def geometric_means(
    measurements: Iterable[Measurement], keys: Sequence[str] = (), metric: str = "time"
) -> dict[tuple[str, ...], float]:
    """Geometric mean of the ratios of a metric, by (provider, values of the case's ``keys``)."""
    ratios: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for measurement in measurements:
        if measurement.metric == metric and measurement.ratio is not None:
            ratios[measurement.provider, *(measurement.keys[key] for key in keys)].append(measurement.ratio)
    return {group: statistics.geometric_mean(found) for group, found in ratios.items()}

"""Made-up runs of the benchmarks."""

from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.attention_cases import CASES
from benchmarks.record import Measurement, case_text
from benchmarks.shapes import WEIGHT_SHAPES

SLOWDOWN = {"stock": 1.0, "native": 3.0, "ours": 0.9, "ours-triton": 1.2}


@pytest.fixture
def measurements() -> list[Measurement]:
    """Times of every shape at three numbers of rows."""
    return [
        Measurement(
            "linear",
            provider,
            case_text(M=m, N=shape.out_features, K=shape.in_features, dtype="bf16"),
            "time",
            "us",
            p50=10.0 * factor,
            p20=9.5 * factor,
            p80=11.25 * factor,
            ratio=factor * (1.1 if shape.in_features > 4096 else 1.0),
            bits="-" if provider == "stock" else "equal",
            gpu="NVIDIA H200",
            versions="torch=2.11.0+cu130 vllm=0.26.0",
            date="2026-01-31",
        )
        for shape in WEIGHT_SHAPES
        for m in (1, 128, 8192)
        if m <= shape.most_rows
        for provider, factor in SLOWDOWN.items()
    ]


@pytest.fixture
def csv_file(tmp_path: Path, measurements: list[Measurement]) -> Path:
    """The same in a file."""
    path = tmp_path / "linear.csv"
    record.write(path, measurements)
    return path


@pytest.fixture
def attention_measurements() -> list[Measurement]:
    """Times of every case of attention; ours without graphs."""
    return [
        Measurement(
            "attention",
            provider,
            case.text(16) + (" graph=no" if provider == "ours-triton" else ""),
            "time",
            "us",
            p50=10.0 * factor,
            p20=9.5 * factor,
            p80=11.25 * factor,
            ratio=factor if provider == "stock" or case.phase == "decode" else 2.0,
            bits="differ" if provider == "stock" else "equal",
            gpu="NVIDIA H200",
            versions="torch=2.11.0+cu130 vllm=0.26.0",
            date="2026-01-31",
        )
        for case in CASES
        for provider, factor in {"stock": 1.0, "native-triton": 1.5, "ours-triton": 1.25}.items()
    ]

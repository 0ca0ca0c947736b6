"""One real server with the mode on, shared by the server tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.server import Server, serve

SHAPE = Shape(hidden=512, intermediate=1024, layers=2, heads=8, kv_heads=4, head_size=64, dtype="bfloat16")
"""Of the model that is served."""
TOOLS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
"""Arguments without which a server refuses requests with tools that the model may call."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of this project."""
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), SHAPE)


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[Server]:
    """``vllm serve`` as a user starts it."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    with serve(str(model), TOOLS, {"VLLM_BATCH_INVARIANT": "1"}) as running:
        yield running

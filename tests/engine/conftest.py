"""The checkpoint that the engine tests share."""

from pathlib import Path

import pytest

from vllm_batch_invariant.check.checkpoint import Shape, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four layers of hidden size 1024 in bf16: plain vLLM gives one prompt of it several logprob sequences on a CPU."""
    shape = Shape(hidden=1024, intermediate=2048, layers=4, heads=14, kv_heads=2, head_size=64, dtype="bfloat16", max_length=4096)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape)

"""The checkpoint that the engine tests share."""

from pathlib import Path

import pytest

from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model in bf16, of which plain vLLM on a CPU gives one prompt several logprob sequences."""
    heads = {"heads": 14, "kv_heads": 2, "head_size": 64}
    shape = Shape(hidden=512, intermediate=1536, layers=3, dtype="bfloat16", max_length=4096, **heads)
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint"), shape)

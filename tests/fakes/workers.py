"""Tensor-parallel workers that build layers of vLLM's and are alone in their process."""

import pytest


def be_worker(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    """Have vLLM's layers built as those of one worker of several."""
    from vllm import distributed
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    for module in (linear, vocab_parallel_embedding, parameter, distributed):
        monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: rank, raising=False)
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: size, raising=False)

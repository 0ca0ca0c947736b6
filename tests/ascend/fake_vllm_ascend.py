"""vllm-ascend as far as the plugin touches it: it cannot be installed beside a vLLM for the CPU.

The names are those of 0.26.0rc1; ``make test-patch-points`` reads its sources to see that they exist.
"""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

CALLS: list[str] = []
"""What ran, in order."""


class NPUWorker:
    def _init_worker_distributed_environment(self) -> None:
        sys.modules["vllm_ascend.worker.worker"].init_batch_invariance()
        CALLS.append("communicator")


class AscendAttentionBackend:
    @staticmethod
    def get_name() -> str:
        return "CUSTOM"


class AscendAttentionBackendImpl:
    """A layer whose cache is there."""

    def __init__(self, num_heads: int, head_size: int, scale: float, **options: object) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads = options.get("num_kv_heads", num_heads)
        self.sliding_window = options.get("sliding_window")
        self.alibi_slopes, self.sinks = options.get("alibi_slopes"), options.get("sinks")
        self.attn_type = options.get("attn_type", "decoder")
        self.kv_sharing_target_layer_name = options.get("kv_sharing_target_layer_name")
        self.key_cache = torch.arange(9.0).view(9, 1, 1, 1).expand(9, 4, num_heads, head_size).contiguous()
        self.value_cache = -self.key_cache


def install(monkeypatch: pytest.MonkeyPatch, registers: tuple[str, ...] = ()) -> SimpleNamespace:
    """Put the modules where imports find them; its own mode ``registers`` those operators. Returns the modules."""
    CALLS.clear()
    own, worker, attention = (
        ModuleType(f"vllm_ascend.{name}") for name in ("batch_invariant", "worker.worker", "attention.attention_v1")
    )
    own._batch_invariant_LIB, own.torch_sum = None, torch.sum

    def init_batch_invariance() -> None:
        CALLS.append("own mode")
        own._batch_invariant_LIB = torch.library.Library("aten", "IMPL")
        for name in registers:
            own._batch_invariant_LIB.impl(f"aten::{name}", lambda *args: None, "PrivateUse1")
        monkeypatch.setattr(torch, "sum", lambda *args: None)

    own.init_batch_invariance = worker.init_batch_invariance = init_batch_invariance
    worker.NPUWorker = NPUWorker
    attention.AscendAttentionBackend = AscendAttentionBackend
    attention.AscendAttentionBackendImpl = AscendAttentionBackendImpl
    for module in (own, worker, attention):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    for name in ("worker", "attention"):  # they take their bases when they are imported
        monkeypatch.delitem(sys.modules, f"vllm_batch_invariant.ascend.integration.{name}", raising=False)
    return SimpleNamespace(own=own, worker=worker, attention=attention)

"""Attention of a decoder over what an encoder gave as an engine on a GPU plans and computes it, by the kernels in
Triton's interpreter.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("vllm")

from tests.integration.test_cross_attention import Served, check_steps
from vllm_batch_invariant.integration.layers.attention import FixedSplitAttention
from vllm_batch_invariant.integration.layers.attention_cuda import Backend, CudaFixedSplitAttention
from vllm_batch_invariant.ops.attention import certificate
from vllm_batch_invariant.ops.attention.plan import Kernels
from vllm_batch_invariant.ops.devices import DEVICES


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple]]:
    """The CPU passes for an A100 of 5 multiprocessors, whose cache vLLM's kernel would write. What is to be certified
    at start, which has a test of its own.
    """
    properties = SimpleNamespace(multi_processor_count=5, major=8)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    for name in ("device", "device_of"):
        monkeypatch.setattr(torch.cuda, name, lambda device: nullcontext())
    monkeypatch.setattr(CudaFixedSplitAttention, "do_kv_cache_update", FixedSplitAttention.do_kv_cache_update)
    monkeypatch.setitem(DEVICES, "cpu", replace(DEVICES["cpu"], attention="triton"))
    found: list[tuple] = []
    kernels = SimpleNamespace(kernels=Kernels(sm90=False))
    monkeypatch.setattr(certificate, "certify", lambda *given: found.append(given) or kernels)
    yield found


def test_every_token_sees_all_rows_with_the_same_bits_in_any_step(asked: list[tuple]) -> None:
    check_steps(partial(Served, Backend))
    assert [[layer.causal for layer in given[3]] for given in asked] == [[False]] * len(asked)
    assert asked

"""On a GPU rows of a step are grouped by adapter once for all layers, and kernels are compared before they serve."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm.lora.punica_wrapper.punica_base")

from vllm.lora.layers import LoRAMapping

from tests.assertions import assert_near, assert_same_bits
from tests.integration.test_adapters import RANK, SLOTS, A, B, K, N, added, draw
from vllm_batch_invariant.integration.layers import lora_cuda
from vllm_batch_invariant.ops.lora import cpu

TOKENS = 6


class Groups:
    """In the place of the operation's: the slots of all rows that a step may have."""

    def __init__(self, rows: int, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.slots, self.times = torch.full((rows,), -1), 0
        self.of = slots, dtype, device

    def set(self, slots: torch.Tensor) -> None:
        self.slots.fill_(-1)[: len(slots)] = slots
        self.times += 1


@pytest.fixture
def certified(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What was compared, where the GPU's operation is a CPU's."""
    found: list[Any] = []

    def add_adapters(y: torch.Tensor, x: torch.Tensor, a: Any, b: Any, groups: Groups, reduction: Any) -> None:
        assert len(x) >= (groups.slots >= 0).sum(), "rows behind x"
        cpu.add_adapters(y, x, a, b, groups.slots[: len(x)], reduction)

    module = SimpleNamespace(
        RowGroups=SimpleNamespace(empty=Groups), add_adapters=add_adapters, certify=lambda *of: found.append(of)
    )
    monkeypatch.setattr(lora_cuda, "module_for", lambda *_: module)
    lora_cuda._certify.cache_clear()
    return found


def wrapped(*steps: tuple[int, ...]) -> lora_cuda.GpuAdapters:
    """Behind steps with rows of these adapters, of which all are sampled."""
    config = SimpleNamespace(max_loras=3, lora_dtype=torch.float32)
    wrapper = lora_cuda.GpuAdapters(TOKENS, 8, torch.device("cpu"), lora_config=config)
    for step in steps:
        wrapper.update_metadata(LoRAMapping(step, step, is_prefill=True), SLOTS, 4, 100)
    return wrapper


def test_rows_are_grouped_once_for_all_layers(certified: list[Any]) -> None:
    wrapper, x = wrapped((9, 9, 7, 0, 9, 7), (7, 0, 9, 9)), draw(5, K, seed=3)
    for columns in (N, N - 8):
        y = draw(5, columns, seed=4)
        out = y.clone()
        wrapper.add_lora_linear(out, x, (A,), (B[:, :, :columns].contiguous(),), 1.0, (columns,))
        expected = y[[0, 2, 3]] + added(x[[0, 2, 3]], [0, 2, 2])[:, :columns]
        assert_near(out[[0, 2, 3]], expected, 4)
        assert_same_bits(out[[1, 4]], y[[1, 4]], "without an adapter, and padding")
    assert wrapper._groups.times == 2
    assert wrapper._groups.of == (3, torch.float32, torch.device("cpu"))
    assert [one[:3] for one in certified] == [(K, (N,), RANK), (K, (N - 8,), RANK)]
    wrapper.add_lora_linear(draw(5, N), x, (A,), (B,), 1.0, (N,))
    assert len(certified) == 2


def test_fewer_rows_than_those_of_the_step_are_not_taken_for_all(certified: list[Any]) -> None:
    wrapper, x, y = wrapped((7, 0, 9, 9)), draw(2, K, seed=3), torch.zeros(2, N)
    wrapper.add_lora_linear(y, x, (A,), (B,), 1.0, (N,))
    assert_near(y[:1], added(x[:1], [0]), 4)
    assert not y[1].any()
    assert certified


def test_a_step_without_adapters_launches_nothing_and_leaves_none_to_graphs(certified: list[Any]) -> None:
    wrapper = wrapped((7, 9), (0, 0), (0, 0, 0))
    assert wrapper._groups.times == 2
    assert (wrapper._groups.slots < 0).all()
    y = torch.full((3, N), -0.0)
    wrapper.add_lora_linear(y, draw(3, K), (A,), (B,), 1.0, (N,))
    wrapper.add_lora_logits(y, draw(3, K), A, B, 1.0)
    wrapper.add_lora_embedding(y, draw(3, RANK), B)
    assert y.signbit().all()
    assert not certified


def test_logits_and_embeddings_are_compared_too(certified: list[Any]) -> None:
    wrapper, states, y = wrapped((7, 0, 9)), draw(3, K, seed=6), torch.zeros(3, N)
    wrapper.add_lora_logits(y, states, A, B, 1.0)
    assert_near(y[[0, 2]], added(states[[0, 2]], [0, 2]), 4)
    wrapper.add_lora_embedding(torch.zeros(3, N), draw(3, RANK), B)
    assert [one[:3] for one in certified] == [(K, (N,), RANK), (RANK, (N,), RANK)]

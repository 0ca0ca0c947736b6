"""What is compared when a model with a delta rule or a state space is loaded on a GPU, in Triton's interpreter."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from tests import interpreted_dot
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.delta_rule import DeltaPages, DeltaRuleReduction, DeltaStates, certificate, cuda

pytestmark = pytest.mark.interpreted
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request and numbers of requests that the interpreter has time for, and products as of a tensor core."""
    monkeypatch.setattr(InterpreterBuilder, "create_dot", interpreted_dot.in_steps)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "the interpreter")
    monkeypatch.setattr(certificate, "_LENGTH", 19)
    few, many = cuda.SCHEDULES["head"].decode[1], cuda.SCHEDULES["head"].decode[16]
    for gates, schedules in cuda.SCHEDULES.items():
        monkeypatch.setitem(cuda.SCHEDULES, gates, replace(schedules, decode={1: few, 2: many}))
    monkeypatch.setattr(cuda, "_MANY", 2)


def certified(solve: bool = True, drafts: int = 0, dtype: torch.dtype = torch.float16, gates: str = "head") -> int:
    return certificate.certify(1, 2, DeltaRuleReduction.of(32, 16, dtype, solve, gates), drafts, CPU)


@pytest.mark.parametrize(
    "given",
    [(), (False,), (True, 3), (True, 0, torch.float32), (True, 0, torch.float16, "channel")],
    ids=["delta rule", "state space", "drafts", "fp32", "gates of channels"],
)
def test_schedules_of_equal_bits_pass(given: tuple[Any, ...]) -> None:
    assert certified(*given) > 5000


@pytest.mark.parametrize(
    ("solve", "gates"),
    [(True, "head"), (False, "head"), (True, "channel")],
    ids=["delta rule", "state space", "gates of channels"],
)
def test_what_tokens_get_is_rounding_error(solve: bool, gates: str) -> None:
    """So the order of additions shows in most of it."""
    reduction = DeltaRuleReduction.of(32, 16, torch.float16, solve, gates)
    request = certificate._Request.of(1, 2, reduction, 0, CPU)
    _, out = certificate._Copies(request, 1).step([request.tokens])
    terms = certificate._LARGE**2 / (1 if not solve else 32**0.5)
    assert out[1:].ne(0).float().mean() > 0.9
    assert out.abs().max() < 1e-3 * terms


def by_kernel(monkeypatch: pytest.MonkeyPatch, name: str, fault: Callable[..., Any]) -> None:
    """Have a kernel's launches run with a method of the interpreter changed."""
    launch = cuda.launch

    def launched(kernel: Any, *operands: Any, **named: Any) -> None:
        with monkeypatch.context() as patch:
            if kernel is getattr(cuda, name):
                fault(patch)
            launch(kernel, *operands, **named)

    monkeypatch.setattr(cuda, "launch", launched)


def all_at_once(self: Any, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
    """An instruction that adds all of K."""
    total = d.data + a.data.astype(np.float64) @ b.data.astype(np.float64)
    return TensorHandle(total.astype(d.data.dtype), d.dtype.scalar)


KERNELS = [("decode_delta_rule_kernel", 0), ("verify_delta_rule_kernel", 3), ("prefill_delta_rule_kernel", 0)]


@pytest.mark.parametrize(
    ("kernel", "drafts", "gates"), [(*one, "head") for one in KERNELS] + [(*KERNELS[0], "channel")]
)
def test_another_instruction_of_one_kernel_is_found(
    monkeypatch: pytest.MonkeyPatch, kernel: str, drafts: int, gates: str
) -> None:
    by_kernel(monkeypatch, kernel, lambda patch: patch.setattr(InterpreterBuilder, "create_dot", all_at_once))
    with pytest.raises(NotCovered, match="has other results than prefill"):
        certified(drafts=drafts, gates=gates)


def after_each_step(monkeypatch: pytest.MonkeyPatch, changed: Callable[[DeltaPages, DeltaStates], None]) -> None:
    """Have pages changed behind steps of no more tokens than decode has."""
    right = certificate.delta_rule

    def delta_rule(*operands: Any) -> torch.Tensor:
        out, (states, reduction) = right(*operands), operands[5:7]
        if states.longest <= 1 + reduction.drafts(states.rows):
            changed(reduction.pages(states.states, 1, 2, states.rows), states)
        return out

    monkeypatch.setattr(certificate, "delta_rule", delta_rule)


def test_a_state_that_decode_keeps_in_bf16_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    after_each_step(monkeypatch, lambda parts, _: parts.low.zero_())
    with pytest.raises(NotCovered, match=r"decode of 1 at once has other (results|low) than prefill"):
        certified()


def test_a_draft_that_is_accepted_and_lost_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost(parts: DeltaPages, states: DeltaStates) -> None:
        parts.k[states.pages, (states.context_lens + states.longest - 1) % states.rows] = 0

    after_each_step(monkeypatch, lost)
    with pytest.raises(NotCovered, match=r"verify of 1 at once has other (results|k) than prefill"):
        certified(drafts=3)

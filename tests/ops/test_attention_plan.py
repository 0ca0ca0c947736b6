"""What a plan of attention decides on the host, where a CUDA graph cannot follow the batch."""

from types import SimpleNamespace

import pytest
import torch

from vllm_batch_invariant.ops.attention import AttentionReduction

pytest.importorskip("triton")

from vllm_batch_invariant.ops.attention import triton


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> triton.Planner:
    """One for 132 multiprocessors, whose kernel does nothing."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.device("cpu"))
    monkeypatch.setattr(triton, "plan_kernel", {(count,): lambda *_, **__: None for count in range(1, 600)})
    shape = triton.Shape(32, 8, 128, torch.bfloat16, AttentionReduction.of_device("cuda"))
    return triton.Planner(shape, torch.device("cpu"), 512, 8192, 100_000)


def plan(planner: triton.Planner, requests: int, tokens: int, most: int) -> triton.Plan:
    numbers = torch.zeros(requests + 1, dtype=torch.int32)
    return planner.plan(numbers, numbers[1:], tokens, most)


@pytest.mark.parametrize("tokens", [2, 3, 4, 8, 16, 100, 256, 512])
def test_every_mix_with_the_same_padded_sizes_has_the_same_plan(tokens: int, planner: triton.Planner) -> None:
    requests = min(tokens - 1, 256)
    captured = plan(planner, requests, tokens, 2 if requests > 1 else tokens)
    for most in range(2 if requests > 1 else tokens, tokens + 1):
        assert plan(planner, requests, tokens, most) == captured, most


@pytest.mark.parametrize("requests", [1, 2, 64, 512])
def test_a_step_of_decode_launches_for_small_blocks_only(requests: int, planner: triton.Planner) -> None:
    decode = plan(planner, requests, requests, 1)
    assert (decode.small, decode.large_programs, decode.kept_rows) == (True, 0, 4)


def test_a_prefill_alone_launches_for_large_blocks_only(planner: triton.Planner) -> None:
    alone = plan(planner, 1, 5000, 5000)
    assert not alone.small
    assert alone.large_programs > 0


def test_the_lists_hold_the_blocks_of_any_step(planner: triton.Planner) -> None:
    """Requests of 17 rows and more are large: the most blocks there can be are those of many requests just above."""
    for tokens in (5, 40, 512, 8192):
        for of_each in (5, 6, 31, 32, 33, 64, 65, 5000):
            requests = min(tokens // of_each, 512)
            blocks = requests * -(-of_each * planner.shape.group // planner.large.rows)
            assert blocks <= planner._most_blocks(tokens, requests), (tokens, of_each)

"""What a plan of attention decides on the host, where a CUDA graph cannot follow the batch."""

from types import SimpleNamespace

import pytest
import torch

from vllm_batch_invariant.ops.attention import AttentionReduction

pytest.importorskip("triton")

from vllm_batch_invariant.ops.attention import plan as planning


@pytest.fixture
def planner(monkeypatch: pytest.MonkeyPatch) -> planning.Planner:
    """One for 132 multiprocessors, whose kernel does nothing."""
    properties = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(planning, "plan_kernel", SimpleNamespace(run=lambda *_, **__: None))
    shape = planning.AttentionShape(32, 8, 128, torch.bfloat16, AttentionReduction.of_device("cuda"))
    return planning.Planner(shape, torch.device("cpu"), 512, 8192, 100_000)


def plan(planner: planning.Planner, requests: int, tokens: int, most_tokens: int) -> planning.Plan:
    numbers = torch.zeros(requests + 1, dtype=torch.int32)
    return planner.plan(numbers, numbers[1:], tokens, most_tokens)


@pytest.mark.parametrize("requests", [1, 2, 64, 512])
def test_a_step_of_decode_launches_for_small_blocks_only(requests: int, planner: planning.Planner) -> None:
    decode = plan(planner, requests, requests, 1)
    assert (decode.has_decode, decode.prefill_ctas, decode.partial_rows) == (True, 0, 4)


def test_a_request_alone_may_have_few_rows_or_many(planner: planning.Planner) -> None:
    """A CUDA graph of 64 tokens serves a prompt of 3 tokens as well as one of 64."""
    alone = plan(planner, 1, 64, 64)
    assert (alone.has_decode, alone.prefill_ctas > 0, alone.partial_rows) == (True, True, 16)


def test_no_large_block_is_launched_for_tokens_that_are_few_rows_together(planner: planning.Planner) -> None:
    assert plan(planner, 3, 4, 4).prefill_ctas == 0
    assert plan(planner, 3, 5, 5).prefill_ctas > 0


@pytest.mark.parametrize(("most", "launches"), [(2, False), (4, False), (5, True), (8, True)])
def test_a_verify_step_launches_for_large_blocks_only_if_its_requests_have_many_rows(
    most: int, launches: bool, planner: planning.Planner
) -> None:
    verify = plan(planner, 64, 64 * most, most)
    assert (verify.has_decode, verify.prefill_ctas > 0, verify.partial_rows) == (True, launches, 16)


def test_a_verify_step_of_32_rows_a_request_is_decode_like_where_blocks_are_wide(planner: planning.Planner) -> None:
    kernels = planning.Kernels(sm90=False, decode_rows=planning.WIDE_DECODE_ROWS)
    wide = planning.Planner(planner.shape, planner.device, 512, 8192, 100_000, kernels=kernels)
    assert wide.decode_schedule.block_m == 32
    found = {most: plan(wide, 8, 8 * most, most) for most in (1, 2, 4, 5, 8, 9)}
    assert {most: one.partial_rows for most, one in found.items()} == {1: 4, 2: 16, 4: 16, 5: 32, 8: 32, 9: 32}
    assert [most for most, one in found.items() if one.prefill_ctas] == [9]


@pytest.mark.parametrize(
    ("verify_len", "wide"), [(1, False), (4, False), (5, True), (8, True), (9, False)], ids="{} tokens".format
)
def test_wide_blocks_are_tried_first_where_the_longest_verify_step_needs_and_fits_them(
    verify_len: int, wide: bool, planner: planning.Planner, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert planner.shape.queries_per_kv == 4
    monkeypatch.setattr(planning.sm90, "covers", lambda *_: True)
    found = list(planning.Kernels.candidates(planner.shape, planner.device, verify_len=verify_len))
    usual = [planning.Kernels(True), planning.Kernels(False), planning.Kernels(False, decode_rows=0)]
    assert found == [planning.Kernels(True, planning.WIDE_DECODE_ROWS)] * wide + usual


def test_the_lists_hold_the_blocks_of_any_step(planner: planning.Planner) -> None:
    """Requests of 17 rows and more are large: the most blocks there can be are those of many requests just above."""
    for tokens in (5, 40, 512, 8192):
        for of_each in (5, 6, 31, 32, 33, 64, 65, 5000):
            requests = min(tokens // of_each, 512)
            blocks = requests * -(-of_each * planner.shape.queries_per_kv // planner.prefill_schedule.block_m)
            assert blocks <= planner._max_prefill_blocks(tokens, requests), (tokens, of_each)

"""The prefill kernel for Hopper GPUs has the bits of the Triton kernel, whatever a tile of keys holds, and whether one
program walks the splits of a block or several share them.
"""

import math
from collections.abc import Iterator

import pytest
import torch

from tests.ops.attention.cases import Chunk, Heads, Request, packed, paged
from vllm_batch_invariant.ops.attention import AttentionReduction, certificate, paged_attention, sm90
from vllm_batch_invariant.ops.attention.plan import Kernels, Planner
from vllm_batch_invariant.ops.attention.shapes import AttentionShape

STEPS = {
    "short prompts": [(0, n) for n in (17, 63, 64, 65, 100, 127, 128, 129, 191, 192, 193, 255, 256, 257, 1000)],
    "a long prompt": [(0, 4097)],
    "a chunk behind many keys": [(9000 - 64, 9000)],
    "chunks behind keys and a few rows": [(n - 40, n) for n in (41, 300, 2049, 5000)] + [(299, 300), (510, 513)],
    "whole blocks in parts": [(33_000 - 300, 33_000)],
}
"""Of each request of a step the first new token and the end."""
ADDED = {
    "nothing": {},
    "a window": {"sliding_window": 300},
    "a narrow window and sinks": {"sliding_window": 65, "sinks": True},
}
"""What a layer adds to plain causal attention."""
USUAL = AttentionReduction.of_device("cuda", "triton")
ENDS_AT_EVERY_STEP = AttentionReduction(256, ((64, 512),))
"""Splits of one step of the softmax, then of four."""

pytestmark = pytest.mark.usefixtures("sm90")


@pytest.mark.parametrize(
    ("heads", "page_size", "reduction"),
    [
        (Heads(32, 8, 128, torch.bfloat16), 16, USUAL),
        (Heads(14, 2, 64, torch.bfloat16), 64, USUAL),
        (Heads(4, 4, 128, torch.float16), 256, USUAL),
        (Heads(16, 1, 64, torch.float16), 32, ENDS_AT_EVERY_STEP),
        (Heads(6, 2, 128, torch.bfloat16), 128, ENDS_AT_EVERY_STEP),
        (Heads(16, 8, 256, torch.bfloat16), 16, USUAL),
        (Heads(14, 2, 256, torch.float16), 64, USUAL),
        (Heads(3, 1, 256, torch.bfloat16), 128, ENDS_AT_EVERY_STEP),
    ],
    ids=str,
)
@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED.keys())
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS.keys())
def test_it_has_the_bits_of_the_triton_kernel(heads, page_size, reduction, added, steps):
    chunks = [Chunk(Request(heads, stop, stop), start, stop) for start, stop in steps]
    tensors = paged(chunks, page_size, filler=torch.nan)
    query, keys, values, table, seq_lens, starts = (tensor.cuda() for tensor in tensors)
    shape = AttentionShape(heads.query, heads.kv, heads.size, heads.dtype, reduction)
    keys_of_all, window = sum(stop for _, stop in steps), added.get("sliding_window")
    sinks = {"sinks": torch.linspace(-2, 4, heads.query, dtype=heads.dtype).cuda()} if "sinks" in added else {}
    by_sm90, by_triton = (
        Planner(shape, query.device, len(steps), len(query), keys_of_all, kernels=kernels, window=window)
        for kernels in (Kernels(sm90=True), Kernels(sm90=False))
    )

    def attend(planner: Planner) -> torch.Tensor:
        plan = planner.plan(starts, seq_lens, len(query), len(query))
        out = torch.full_like(query, torch.nan)
        return paged_attention(
            query, keys, values, table, seq_lens, starts, scale=0.1, reduction=reduction, implementation="triton",
            out=out, plan=plan, **(added | sinks),
        )  # fmt: skip

    launches = [attend(by_sm90) for _ in range(3)]
    assert not by_sm90.semaphores.any()
    expected = attend(by_triton)
    assert not expected.isnan().any()
    for launch in launches:
        assert torch.equal(launch, expected)


SEQUENCES = ([1, 2, 17, 63, 64, 65, 128, 129, 300, 1000], [4097], [2629, 3], [1] * 40)


@pytest.fixture
def not_yet_compared() -> Iterator[None]:
    certificate.kernels_of_packed.cache_clear()
    yield
    certificate.kernels_of_packed.cache_clear()


@pytest.mark.parametrize("lengths", SEQUENCES, ids=str)
@pytest.mark.parametrize("size", [64, 80, 96, 128])
@pytest.mark.parametrize(("dtype", "query", "kv"), [(torch.bfloat16, 16, 16), (torch.float16, 12, 4)])
def test_rows_that_see_all_of_their_sequence_have_the_bits_of_the_triton_kernel(
    dtype: torch.dtype, query: int, kv: int, size: int, lengths: list[int]
) -> None:
    heads = Heads(query, kv, size, dtype)
    asked = [Request(heads, length, number) for number, length in enumerate(lengths)]
    for one in asked:
        one.query, one.key, one.value = one.query.cuda(), one.key.cuda(), one.value.cuda()
    expected = packed(asked, "triton", reduction=USUAL, strided=True, padding=70)
    kernels = certificate.kernels_of_packed(AttentionShape(query, kv, size, dtype, USUAL), asked[0].query.device)
    assert kernels.sm90
    for _ in range(2):
        rows = packed(asked, "triton", reduction=USUAL, strided=True, padding=70, kernels=kernels)
        assert not any(row.isnan().any() for row in rows[:-1])
        assert all(torch.equal(row, other) for row, other in zip(rows[:-1], expected[:-1], strict=True))


@pytest.mark.usefixtures("not_yet_compared")
def test_other_bits_are_seen_before_an_encoder_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = AttentionShape(4, 4, 64, torch.bfloat16, USUAL)
    launch = sm90.launch_prefill

    def wrong(call, out, *others):
        launch(call, out, *others)
        out[-1, -1, -1] = math.pi

    monkeypatch.setattr(sm90, "launch_prefill", wrong)
    assert not certificate.kernels_of_packed(shape, torch.device("cuda", 0)).sm90

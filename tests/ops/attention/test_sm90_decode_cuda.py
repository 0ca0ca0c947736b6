"""The decode kernel for Hopper GPUs has the bits of the Triton kernel, whoever merges the splits of a head, over
numbers and codes.
"""

from dataclasses import replace

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.ops.attention.cases import Chunk, Heads, Request, call_of, paged
from tests.ops.quantise.test_kept import assert_kept
from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention
from vllm_batch_invariant.ops.attention.cuda import paged_attention as attention_on_gpu
from vllm_batch_invariant.ops.attention.plan import DECODE_ROWS, WIDE_DECODE_ROWS, Kernels, Planner
from vllm_batch_invariant.ops.attention.shapes import AttentionShape
from vllm_batch_invariant.ops.common.kv_cache import E4M3
from vllm_batch_invariant.ops.quantise import QuantiseReduction

GROUP_OF_EIGHT = Heads(8, 1, 128, torch.bfloat16)
LENGTHS = {
    "heads in many parts": (33000,),
    "heads in two parts": tuple(500 + 37 * number for number in range(140)),
    "whole heads": tuple(range(1, 900, 3)),
    "long and short": (300, 12000, 1, 64, 65, 2049, 257),
    "as long as each other": (9000,) * 20,
}

pytestmark = pytest.mark.usefixtures("sm90")


def any_codes(*shape: int) -> torch.Tensor:
    """Every finite code as often as another, subnormal ones and both zeros among them."""
    finite = torch.tensor([code for code in range(256) if code & 127 != 127], dtype=torch.uint8, device="cuda")
    draw = torch.Generator("cuda").manual_seed(len(shape) + shape[0])
    return finite[torch.randint(len(finite), shape, generator=draw, device="cuda")].view(E4M3)


@pytest.mark.parametrize(
    ("stored", "page_size", "tokens", "rows"),
    [
        (None, 64, 1, DECODE_ROWS),
        (None, 64, 2, DECODE_ROWS),
        (None, 64, 4, WIDE_DECODE_ROWS),
        (E4M3, 64, 1, DECODE_ROWS),
        (E4M3, 16, 2, DECODE_ROWS),
    ],
    ids=str,
)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize(
    "heads",
    [
        GROUP_OF_EIGHT,
        Heads(14, 2, 64, torch.bfloat16),
        Heads(4, 4, 128, torch.float16),
        Heads(4, 2, 64, torch.float16),
        Heads(12, 4, 128, torch.bfloat16),
    ],
    ids=str,
)
def test_it_has_the_bits_of_the_triton_kernel_at_every_launch(heads, lengths, stored, page_size, tokens, rows):
    known = {length: Request(heads, length, length) for length in set(lengths)}
    chunks = [Chunk(known[length], max(length - tokens, 0), length) for length in lengths]
    query, keys, values, table, seq_lens, starts = (tensor.cuda() for tensor in paged(chunks, page_size))
    shape = AttentionShape(
        heads.query, heads.kv, heads.size, heads.dtype, AttentionReduction.of_device("cuda", "triton"), stored
    )
    scales, scale = (), 0.1
    if stored is not None:
        keys, values = any_codes(*keys.shape), any_codes(*values.shape)
        scales, scale = (torch.tensor(0.013, device="cuda"), torch.tensor(0.021, device="cuda")), 0.01
    by_sm90, by_triton = (
        Planner(shape, query.device, len(lengths), len(query), sum(lengths), kernels=Kernels(sm90, rows))
        for sm90 in (True, False)
    )

    def attend(planner: Planner) -> torch.Tensor:
        plan = planner.plan(starts, seq_lens, len(query), tokens)
        options = {"scale": scale, "reduction": shape.reduction, "implementation": "triton", "plan": plan}
        out = torch.full_like(query, torch.nan)
        return paged_attention(query, keys, values, table, seq_lens, starts, *scales, out=out, **options)

    launches = [attend(by_sm90) for _ in range(4)]
    assert not by_sm90.semaphores.any()
    expected = attend(by_triton)
    for launch in launches:
        assert torch.equal(launch, expected)


@pytest.mark.parametrize("by_sm90", [True, False], ids=["gluon", "triton"])
@pytest.mark.parametrize("scales", [None, (0.25, 8.0)], ids=["numbers", "codes"])
@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())
@pytest.mark.parametrize("heads", [GROUP_OF_EIGHT, Heads(4, 4, 128, torch.float16), Heads(12, 4, 128, torch.bfloat16)])
def test_it_keeps_the_codes_that_its_rows_are_quantised_to(heads, lengths, tokens, scales, by_sm90):
    """Also of a row that is not finite; and rows have the bits that they have without codes."""
    known = {length: Request(heads, length, length) for length in set(lengths)}
    chunks = [Chunk(known[length], max(length - tokens, 0), length) for length in lengths]
    reduction = AttentionReduction.of_device("cuda", "triton")
    operands = tuple(tensor.cuda() for tensor in paged(chunks, 64))
    operands[0][0, 0] = torch.nan
    call = call_of(operands, reduction, scale=0.1)
    if scales:
        call = replace(call, cache=call.cache.coded(*scales))
    shape, codes = AttentionShape.of(call), QuantiseReduction.of_dtype(heads.dtype, E4M3, 128)
    rows = len(call.query)
    planner = Planner(shape, call.query.device, len(lengths), rows, sum(lengths), kernels=Kernels(by_sm90, DECODE_ROWS))

    def attend(codes: QuantiseReduction | None) -> torch.Tensor:
        plan, out = planner.plan(call.query_start_loc, call.seq_lens, rows, tokens), torch.empty_like(call.query)
        attention_on_gpu(call, out, plan, codes)
        return out.flatten(1)

    alone = attend(None)
    assert_same_bits(attend(None), alone)
    for _ in range(3):
        assert_kept(attend(codes), alone, codes)

"""Small cases of every kernel of ours, for compute-sanitizer: `python -m tests.ops.sanitized [outside]`.

With ``outside`` a kernel reads beyond its tensor, which the sanitizer must see.
"""

import sys

import torch
import triton
import triton.language as tl

from tests.ops.attention.cases import Chunk, Heads, Request, paged
from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention
from vllm_batch_invariant.ops.common.kv_cache import CacheSlots
from vllm_batch_invariant.ops.linear import linear
from vllm_batch_invariant.ops.norm import rms_norm
from vllm_batch_invariant.ops.norm_rotary import norm_rotary
from vllm_batch_invariant.ops.reduce import mean
from vllm_batch_invariant.ops.softmax import log_softmax


@triton.jit
def _read_kernel(numbers, out, place):
    tl.store(out, tl.load(numbers + place))


def _attend(heads: Heads, page_size: int, chunks: list[tuple[int, int]], **options: object) -> None:
    """Chunks are pairs of a request's length and its new tokens; what is not written is NaN."""
    made = [Chunk(Request(heads, length, length), length - tokens, length) for length, tokens in chunks]
    tensors = [tensor.cuda() for tensor in paged(made, page_size, filler=torch.nan)]
    reduction = AttentionReduction.of_device("cuda", "triton")
    out = paged_attention(*tensors, scale=0.1, reduction=reduction, implementation="triton", **options)
    assert not out.isnan().any()


def _attention() -> None:
    for heads in (Heads(8, 1, 128, torch.bfloat16), Heads(14, 2, 64, torch.float16)):
        for page_size in (16, 64):
            _attend(heads, page_size, [(700, 1), (3000, 1), (1, 1)])
            _attend(heads, page_size, [(300, 300), (700, 1), (400, 130)])
            _attend(heads, page_size, [(3000, 60), (700, 1)])
    _attend(Heads(4, 2, 80, torch.bfloat16), 16, [(300, 300), (700, 1)], sliding_window=37)


def _others() -> None:
    x = torch.randn(9, 4096, device="cuda", dtype=torch.bfloat16)
    for rows in (1, 9):
        linear(x[:rows], torch.randn(192, 4096, device="cuda", dtype=torch.bfloat16))
        rms_norm(x[:rows], x[0], 1e-6, x[:rows].clone())
        mean(x[:rows], -1)
        log_softmax(torch.randn(rows, 151_936, device="cuda"))
    qkv, weight = torch.randn(3, 6 * 128, device="cuda", dtype=torch.bfloat16), x[0, :128].contiguous()
    angles, positions = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16), torch.arange(3, device="cuda")
    norm_rotary(qkv, positions, weight, weight, angles, 1e-6, 4, 1)
    caches = torch.zeros(3, 1, 16, 256, device="cuda", dtype=torch.bfloat16).chunk(2, dim=-1)
    norm_rotary(qkv, positions, weight, weight, angles, 1e-6, 4, 1, CacheSlots(*caches, 23 * positions + 1))


def main() -> None:
    if sys.argv[1:] == ["outside"]:
        numbers = torch.zeros(16, device="cuda")
        _read_kernel[(1,)](numbers, torch.zeros(1, device="cuda"), 1 << 20)
    else:
        _attention()
        _others()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()

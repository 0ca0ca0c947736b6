"""Triton compiles a kernel anew for some values of its arguments; none of them may follow the batch."""

from collections import Counter, defaultdict
from itertools import product

import pytest
import torch

from tests.assertions import DTYPES, ROW_COUNTS
from tests.ops.attention.cases import Chunk, Heads, Request, paged
from tests.ops.linear.cases import HALVES, launch, turned
from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.common.kv_cache import CacheSlots
from vllm_batch_invariant.ops.dispatch import module_for
from vllm_batch_invariant.ops.linear import LinearReduction, schedule
from vllm_batch_invariant.ops.linear.spec import GATED
from vllm_batch_invariant.ops.norm import rms_norm
from vllm_batch_invariant.ops.norm_rotary import norm_rotary
from vllm_batch_invariant.ops.reduce import mean
from vllm_batch_invariant.ops.softmax import log_softmax


@pytest.fixture
def compiled(monkeypatch):
    """How often each kernel was not found among those that this process has compiled."""
    triton_gemm = pytest.importorskip("triton")
    counter = Counter()
    monkeypatch.setattr(triton_gemm.knobs.runtime, "jit_cache_hook", lambda **call: counter.update([call["fn"].name]))
    return counter


def calls(counter: Counter, kernel: str) -> int:
    return sum(count for name, count in counter.items() if name.endswith(kernel))


@pytest.fixture
def variants(monkeypatch):
    """The variants of the GEMM kernels that Triton is asked for. None is compiled or run."""
    triton_gemm = pytest.importorskip("triton")
    from vllm_batch_invariant.ops.linear import triton_kernels

    homes = {"gemm_tma_kernel": triton_kernels, "gemm_ptr_kernel": triton_kernels}
    if Gpu.of(0).has_wgmma:
        from vllm_batch_invariant.ops.linear import sm90_kernel

        homes["gemm_sm90_swap_ab_kernel"] = sm90_kernel
    asked = {name: set() for name in homes}

    def note(**call) -> bool:
        asked[call["fn"].name.rpartition(".")[2]].add(call["key"])
        return True

    for name, home in homes.items():
        kernel = getattr(home, name)
        monkeypatch.setattr(kernel, "device_caches", defaultdict(kernel.create_binder))
    monkeypatch.setattr(triton_gemm.knobs.runtime, "jit_cache_hook", note)
    return asked


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [544, 300, 77])
def test_row_kernels_are_compiled_once_for_all_batch_sizes(length, dtype, compiled):
    x = torch.ones(1000, length, dtype=dtype, device="cuda")
    for rows in ROW_COUNTS:
        part = x[:rows]
        mean(part, -1)
        log_softmax(part, -1)
        rms_norm(part, x[0], 1e-6, part)
    for kernel in ("_sum_kernel", "_softmax_kernel", "_rms_norm_kernel"):
        assert calls(compiled, kernel) <= 1, kernel


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [16_385, 151_936])
def test_kernels_of_long_rows_are_compiled_once_for_all_batch_sizes(length, dtype, compiled):
    x = torch.ones(300, length, dtype=dtype, device="cuda")
    module = module_for("softmax", "cuda")
    for rows in (1, 2, 3, 4, 5, 15, 16, 17, 299, 300):
        module.log_softmax_backward(x[:rows], log_softmax(x[:rows], -1), -1, dtype)
    for kernel in ("_chunk_kernel", "_merged_softmax_kernel", "_chunk_backward_kernel", "_merged_backward_kernel"):
        assert calls(compiled, kernel) <= 1, kernel


def test_norms_of_heads_are_compiled_once_for_all_batch_sizes_and_strides(compiled):
    size = 128
    qkv, weight = (torch.ones(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((1000, 7 * size), (size,)))
    positions, places = (torch.zeros(size, dtype=torch.int64, device="cuda") for size in (1000, 1001))
    caches = torch.zeros(3, 1, 64, 2 * size, dtype=torch.bfloat16, device="cuda").chunk(2, dim=-1)
    for rows in ROW_COUNTS:
        for heads in (qkv[:rows, : 5 * size], qkv[:rows, 5 * size : 6 * size], qkv[:1, :size].expand(rows, size)):
            rms_norm(heads.unflatten(1, (-1, size)), weight, 1e-6)
        norm_rotary(qkv[:rows], positions[:rows], weight, weight, weight[None], 1e-6, 5, 1)
        slots = CacheSlots(*caches, places[rows % 2 :][:rows])
        norm_rotary(qkv[:rows], positions[:rows], weight, weight, weight[None], 1e-6, 5, 1, slots)
    assert calls(compiled, "._rms_norm_kernel") <= 1
    assert calls(compiled, "_norm_rotary_kernel") <= 2


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("turn_weight", [False, True])
@pytest.mark.parametrize("turn_x", [False, True])
def test_the_tma_kernel_is_compiled_once_a_tile(turn_x, turn_weight, dtype, has_bias, variants):
    from vllm_batch_invariant.ops.linear import triton_gemm

    tiles = set()
    for n, k in ((528, 544), (16, 16), (2048, 72), (8, 16)):
        x = turned(torch.ones(1000, k, dtype=dtype, device="cuda"), turn_x)
        weight = turned(torch.ones(n, k, dtype=dtype, device="cuda"), turn_weight)
        bias = torch.ones(n, dtype=dtype, device="cuda") if has_bias else None
        for m in ROW_COUNTS:
            triton_gemm.mm(x[:m], weight.t(), bias)
            tiles.add(schedule.tma_tile(m, n, k, dtype.itemsize, Gpu.of(0)))
    assert len(tiles) > 1
    assert len(variants["gemm_tma_kernel"]) == len(tiles)
    assert not variants["gemm_ptr_kernel"]


@pytest.mark.usefixtures("sm90")
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_the_narrow_kernel_is_compiled_once_a_tile(dtype, has_bias, variants):
    from vllm_batch_invariant.ops.linear import triton_gemm

    for n, k in ((528, 544), (16, 16), (2048, 72), (8, 16)):
        x, weight = (torch.ones(size, k, dtype=dtype, device="cuda") for size in (1000, n))
        bias = torch.ones(n, dtype=dtype, device="cuda") if has_bias else None
        for m, tile in product(ROW_COUNTS, schedule.NARROW_TILES):
            launch(triton_gemm.gemm_sm90_swap_ab, tile, x[:m], weight.t(), bias)
        reduction = LinearReduction.of_device("cuda", n, k, dtype)
        for m, tile in product(ROW_COUNTS, () if has_bias or n % 16 else schedule.GATED_TILES):
            out = torch.empty(m, n // 2, dtype=dtype, device="cuda")
            triton_gemm.gemm_sm90_swap_ab(x[:m], weight.t(), None, out, reduction, tile, False, GATED)
    gated = 0 if has_bias else len(schedule.GATED_TILES)
    assert len(variants["gemm_sm90_swap_ab_kernel"]) == len(schedule.NARROW_TILES) + gated


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("turn_weight", [False, True])
@pytest.mark.parametrize("turn_x", [False, True])
@pytest.mark.parametrize(("n", "k"), [(2048, 512), (99, 300), (1, 77)])
def test_the_ptr_kernel_is_compiled_once_a_tile(n, k, turn_x, turn_weight, dtype, has_bias, variants):
    from vllm_batch_invariant.ops.linear import triton_gemm

    x = turned(torch.ones(1000, k, dtype=dtype, device="cuda"), turn_x)
    weight = turned(torch.ones(n, k, dtype=dtype, device="cuda"), turn_weight)
    bias = torch.ones(n, dtype=dtype, device="cuda") if has_bias else None
    tiles = set()
    for m in ROW_COUNTS:
        triton_gemm.mm_ptr(x[:m], weight.t(), bias)
        tiles.add(schedule.ptr_tile(m, n, dtype, Gpu.of(0)))
    assert len(variants["gemm_ptr_kernel"]) == len(tiles)


def test_packed_operands_of_any_number_of_rows_share_their_variants(variants):
    from vllm_batch_invariant.ops.linear import triton_gemm

    tiles = set()
    for m in ROW_COUNTS:
        triton_gemm.mm(*(torch.ones(size, 96, dtype=torch.bfloat16, device="cuda") for size in (m, 96)))
        tiles.add(schedule.tma_tile(m, 96, 96, 2, Gpu.of(0)))
    assert len(variants["gemm_tma_kernel"]) == len(tiles)
    for m in ROW_COUNTS:
        triton_gemm.mm(*(torch.ones(size, 96, dtype=torch.float32, device="cuda") for size in (m, 96)))
    assert len(variants["gemm_ptr_kernel"]) == len(schedule.ptr_tiles(torch.float32))


def test_attention_kernels_are_compiled_once_for_all_batches(compiled):
    heads = Heads(6, 2, 48, torch.bfloat16)
    for length in (1, 2, 3, 15, 16, 17, 100, 255, 256, 257, 2000):
        for count in (1, 2, 16):
            chunks = [Chunk(Request(heads, length, seed), max(0, length - 1 - seed), length) for seed in range(count)]
            tensors = [tensor.cuda() for tensor in paged(chunks)]
            paged_attention(*tensors, scale=0.1, reduction=AttentionReduction())
    # Small blocks of one token and of several, large ones with splits walked and shared out.
    assert 1 <= calls(compiled, "attention_kernel") <= 4
    assert calls(compiled, "plan_kernel") == 1

"""Launches every kernel for GPUs that are not here and compiles none: every launch must say what the compiler may fuse,
and no batch may have Triton compile a kernel anew; a program of its own, as :mod:`.compiled_kernels` is.

usage: python -m tests.ops.launched_kernels
"""

import ast
import itertools
from collections import Counter, defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime.jit import JITFunction

from tests.ops.attention.cases import Heads, Request, packed
from tests.ops.compiled_kernels import (
    NO_DRIVER,
    REDUCTION,
    SHARED_MEMORY,
    VARIANTS,
    adapted_experts,
    adapters,
    all_reduces,
    attend,
    channel_gates,
    check,
    check_options,
    codes,
    convolutions,
    decoded_weights,
    delta_rules,
    experts,
    experts_by_library,
    flex,
    gated_groups,
    gated_heads,
    gradients_of_attention,
    gradients_of_rows,
    many_pairs,
    narrow_codes,
    narrow_gemms,
    packed_layer,
    pretend_a_gpu,
    state_spaces,
    turned_heads,
    written_caches,
)
from tests.ops.exact.launches import batch as exact_batch
from vllm_batch_invariant import ops
from vllm_batch_invariant.ops.acceptance.cuda import accept
from vllm_batch_invariant.ops.attention import sm90
from vllm_batch_invariant.ops.common.nvidia_gpus import COMPILED_FOR
from vllm_batch_invariant.ops.linear import triton_gemm as linear
from vllm_batch_invariant.ops.linear.spec import GATED, PRODUCT
from vllm_batch_invariant.ops.norm import GATES
from vllm_batch_invariant.ops.norm import cuda as norm
from vllm_batch_invariant.ops.ranking import cuda as ranking
from vllm_batch_invariant.ops.reduce import cuda as reduce
from vllm_batch_invariant.ops.relu_squared import cuda as relu_squared
from vllm_batch_invariant.ops.silu import cuda as silu
from vllm_batch_invariant.ops.softmax import cuda as softmax
from vllm_batch_invariant.ops.top_k_top_p.cuda import top_k_top_p


def launched_in_sources() -> set[str]:
    """Names of the kernels that some module for NVIDIA GPUs launches, from the sources."""
    compiled, launched = set(), set()
    for path in Path(ops.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in node.decorator_list):
                compiled.add(node.name)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                launched.add(ast.unparse(node.func.value).rpartition(".")[2])
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "launch":
                launched.add(ast.unparse(node.args[0]).rpartition(".")[2])
    return compiled & launched


def row_batch(count: int) -> None:
    for length in (100, 896, 20_000, 152_000):
        x = torch.zeros(count, length, dtype=torch.bfloat16)
        norm.rms_norm(x, x[0], 1e-6, x, None)
        norm.rms_norm(x, x[0], 1e-6, x, None, adds_one=True)
        reduce.mean(x, -1)
        softmax.log_softmax_backward(x, softmax.log_softmax(x, -1, dtype=torch.float32).bfloat16(), -1, x.dtype)
        silu.silu_and_mul(x)
        relu_squared.relu_squared(x)
    turned_heads(count)
    gated_heads(count, *GATES)
    gated_groups(count)


def linear_batch(count: int) -> None:
    """Of operands for each of the kernels."""
    linear.mm(*(torch.zeros(size, 96, dtype=torch.bfloat16) for size in (count, 96)))
    for dtype, n, k in ((torch.float16, 99, 77), (torch.float32, 96, 512), (torch.float64, 1, 30)):
        linear.mm(torch.zeros(count, k, dtype=dtype), torch.zeros(n, k, dtype=dtype).t())
    if NO_DRIVER.capability == 90:
        narrow_gemms((torch.bfloat16,), (PRODUCT, GATED), rows=count)
        narrow_codes(rows=count)


def attention_batch(count: int) -> None:
    """So many keys, so many new tokens, and up to 8 requests."""
    for heads in (Heads(6, 2, 80, torch.bfloat16), Heads(8, 2, 128, torch.float32)):
        attend(heads, 16, count, 1, min(count, 8))
        attend(heads, 64, 300 + count, count)
        attend(heads, 16, count, 1, min(count, 8), in_codes=True)
        packed([Request(heads, count, 1)] * min(count, 8), "triton", reduction=REDUCTION)
    if NO_DRIVER.capability == 90:
        sm90.compiles.cache_clear()
        covers, sm90.covers = sm90.covers, lambda *_: True
        attend(Heads(8, 2, 128, torch.bfloat16), 64, 300 + count, 1, min(count, 8))
        attend(Heads(8, 2, 128, torch.bfloat16), 64, 300 + count, count)
        sm90.covers = covers


def sampling_batch(count: int) -> None:
    logits = torch.zeros(count, 9_000)
    rows = torch.arange(2 * count)
    accept(rows, rows, torch.arange(0, 2 * count + 1, 2, dtype=torch.int32), 2)
    ranking.top_and_ranks(logits, 20, torch.zeros(count, dtype=torch.int64))
    ranking.first(logits)
    top_k_top_p(logits, torch.full((count,), 50), torch.full((count,), 0.5))


def all_reduce_batch(count: int) -> None:
    for hidden, dtype in ((4096, torch.bfloat16), (77, torch.float32)):
        all_reduces(count, hidden, dtype)


def attention_backward_batch(count: int) -> None:
    for heads in (Heads(6, 2, 80, torch.bfloat16), Heads(8, 2, 128, torch.float32)):
        gradients_of_attention(heads, count)


BATCHES = {
    "rows": row_batch,
    "matmuls": linear_batch,
    "attention": attention_batch,
    "sampling": sampling_batch,
    "all-reduce": all_reduce_batch,
    "gradients of attention": attention_backward_batch,
    "gradients of norms and SiLU": gradients_of_rows,
    "experts": experts,
    "many pairs of experts": many_pairs,
    "experts by a library": partial(experts_by_library, 512, 256),
    "adapters": adapters,
    "adapters of experts": adapted_experts,
    "experts of four bits": packed_layer,
    "codes": codes,
    "caches": written_caches,
    "convolutions": convolutions,
    "delta rules": delta_rules,
    "gates of channels": channel_gates,
    "state spaces": state_spaces,
    "weights of integers": lambda _: decoded_weights(),
    "exact arithmetic": exact_batch,
    "around FlexAttention": lambda count: flex(Heads(8, 2, 128, torch.bfloat16), 64, count),
}
"""What launches kernels for a batch of a size, by operation; all but the batch stays."""


def check_what_follows_the_batch() -> None:
    """Launch every kernel for batches of many sizes, compile none, and look whether Triton would compile one anew."""
    asked: dict[tuple, set[tuple]] = defaultdict(set)

    def note(**call: Any) -> bool:
        kernel, made = call["fn"].jit_function, call["compile"]
        parameters = list(enumerate(kernel.params))
        constants = [str(made["constants"].get((index,))) for index, one in parameters if one.is_constexpr]
        signature = [
            kind for kinds in made["signature"].values() for kind in (kinds if type(kinds) is tuple else [kinds])
        ]
        kinds = [kind for kind in signature if not kind.startswith(("i", "u", "fp", "constexpr"))]
        meaning = (kernel.__name__, *constants, *kinds, made["num_warps"], made["num_stages"])
        asked[meaning].add(tuple(map(str, (made["signature"], made["constants"], made["configs"]))))
        return True

    triton.knobs.runtime.jit_cache_hook = note
    kernels = set()
    for gpu, (name, launch) in itertools.product((80, 90, 100), BATCHES.items()):
        NO_DRIVER.capability = gpu
        asked.clear()
        for size in (1, 2, 3, 15, 16, 17, 32, 64, 65, 300):
            launch(size)
        for (kernel, *_), variants in asked.items():
            kernels.add(kernel)
            if len(variants) > 1:
                check(
                    f"{name} on sm_{gpu}: another batch is another {kernel}:\n" + "\n".join(map(str, variants)), False
                )
    missing = launched_in_sources() - kernels
    check(
        f"no batch is another variant of {len(kernels)} kernels{': not ' * bool(missing)}{missing or ''}", not missing
    )


def check_every_launch() -> None:
    """Launch every kernel, compile none, and look at the options."""
    launched = Counter()

    def note(kernel: JITFunction, *_: object, grid: object, warmup: bool, **options: object) -> None:
        check_options(kernel.__name__, options)
        launched[kernel.__name__] += 1

    JITFunction.run = note
    for launch in VARIANTS.values():
        launch()
    missing = launched_in_sources() - launched.keys()
    check(f"every kernel of the sources is launched here{': not ' * bool(missing)}{', '.join(missing)}", not missing)
    known = {10 * major + minor for major, minor in COMPILED_FOR}
    check("every GPU that is covered is compiled for", known == SHARED_MEMORY.keys())
    check(f"{launched.total()} launches of {len(launched)} kernels say whether products are fused", len(launched) > 20)


def main() -> None:
    pretend_a_gpu()
    check_what_follows_the_batch()
    check_every_launch()


if __name__ == "__main__":
    main()

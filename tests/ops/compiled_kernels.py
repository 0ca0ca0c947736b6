"""Compiles the GPU's kernels for GPUs that are not here, with the arguments that the launchers give them, and holds
what they take against what those GPUs have; a program of its own, because it takes the place of Triton's driver.

usage: python -m tests.ops.compiled_kernels                  one variant of each kind; what compiled_variants.json tells
                                                             of them is not compiled again (:mod:`.variants`)
       python -m tests.ops.compiled_kernels --record         and write that file
       python -m tests.ops.compiled_kernels --more           some of each kind, all compiled: one or two minutes
       python -m tests.ops.compiled_kernels --first          what the front end alone makes of each kind: 40 seconds
       python -m tests.ops.compiled_kernels --gluon          every variant in Gluon, and what each takes: 4 minutes
       python -m tests.ops.compiled_kernels --names GPU ...  what there is to compile for each, as JSON
       python -m tests.ops.compiled_kernels --cells [GPU] [CELL ...]    a line of JSON for each cell: with no GPU every
                                                             GPU, with no cell every cell; scripts.check_triton reads it
"""

import argparse
import functools
import hashlib
import itertools
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

import vllm_batch_invariant.ops.attention as attention_package
from scripts.frozen import stripped
from tests.ops.attention.cases import Chunk, Heads, Request, packed, paged
from tests.ops.exact.launches import EVERY_KIND, hopper_products
from tests.ops.exact.ptx import forbidden
from tests.ops.variants import Outcomes, compile_when_asked
from vllm_batch_invariant.ops.acceptance.cuda import accept
from vllm_batch_invariant.ops.all_reduce import cuda as all_reduce
from vllm_batch_invariant.ops.all_reduce.copies import CopySchedule
from vllm_batch_invariant.ops.all_reduce.cuda import AllReduce
from vllm_batch_invariant.ops.all_reduce.peers import Peers
from vllm_batch_invariant.ops.attention import (
    AttentionReduction,
    AttentionSpec,
    PagedAttention,
    PagedCache,
    paged_attention,
    sm90,
)
from vllm_batch_invariant.ops.attention import cuda as attention
from vllm_batch_invariant.ops.attention import plan as planning
from vllm_batch_invariant.ops.attention.flex import cuda as flex_cuda
from vllm_batch_invariant.ops.attention.params import causal_options
from vllm_batch_invariant.ops.attention.shared_memory import decode_bytes
from vllm_batch_invariant.ops.attention_backward import cuda as attention_gradients
from vllm_batch_invariant.ops.causal_conv import ConvReduction, ConvStates
from vllm_batch_invariant.ops.causal_conv import cuda as causal_conv
from vllm_batch_invariant.ops.common.compile_errors import reason
from vllm_batch_invariant.ops.common.gpu import Gpu
from vllm_batch_invariant.ops.common.kv_cache import CacheSlots
from vllm_batch_invariant.ops.common.nvidia_gpus import FP8_MMA, attends_by_tma, has_tcgen05
from vllm_batch_invariant.ops.delta_rule import Convolution, DeltaRuleReduction, DeltaStates
from vllm_batch_invariant.ops.delta_rule import cuda as delta_rule
from vllm_batch_invariant.ops.devices import DEVICES
from vllm_batch_invariant.ops.exact.schedule import HOPPER_SCHEDULES
from vllm_batch_invariant.ops.formats import FP8, FP8_BLOCK, MXFP4, PLAIN, Format, integers
from vllm_batch_invariant.ops.formats.fp4 import NVFP4_STEPS
from vllm_batch_invariant.ops.formats.triton_decode import PackedTile
from vllm_batch_invariant.ops.formats.triton_kernels import decode_integers, decode_tiles
from vllm_batch_invariant.ops.kv_cache import cuda as kv_cache
from vllm_batch_invariant.ops.linear import LinearReduction, schedule
from vllm_batch_invariant.ops.linear import triton_gemm as linear
from vllm_batch_invariant.ops.linear.problem import GemmProblem
from vllm_batch_invariant.ops.linear.schedule import GATED_TILES, NARROW_TILES, PACKED_TILES, NarrowTile
from vllm_batch_invariant.ops.linear.spec import GATED, PRODUCT, SPECS, MatmulSpec
from vllm_batch_invariant.ops.lora import LoraReduction
from vllm_batch_invariant.ops.lora import cuda as lora
from vllm_batch_invariant.ops.moe import ExpertAdapters, Experts, MoeReduction, StoredExperts, params
from vllm_batch_invariant.ops.moe import cuda as moe
from vllm_batch_invariant.ops.moe.deep_gemm import ExpertsProblem, GroupedDeepGemm
from vllm_batch_invariant.ops.moe.params import Codes
from vllm_batch_invariant.ops.moe.reduction import UNGATED
from vllm_batch_invariant.ops.norm import NormReduction
from vllm_batch_invariant.ops.norm import cuda as norm
from vllm_batch_invariant.ops.norm_backward import cuda as norm_backward
from vllm_batch_invariant.ops.norm_rotary import Sections
from vllm_batch_invariant.ops.norm_rotary import cuda as norm_rotary
from vllm_batch_invariant.ops.quantise import QuantiseReduction
from vllm_batch_invariant.ops.quantise import cuda as quantise
from vllm_batch_invariant.ops.ranking import cuda as ranking
from vllm_batch_invariant.ops.reduce import cuda as reduce
from vllm_batch_invariant.ops.relu_squared import cuda as relu_squared
from vllm_batch_invariant.ops.scaled_linear import E4M3, GROUP, WGMMA, ScaledLinearReduction
from vllm_batch_invariant.ops.scaled_linear import cuda as scaled_linear
from vllm_batch_invariant.ops.scaled_linear.schedule import E4M3_SCHEDULES, SCHEDULES, ScaledLinearSchedule
from vllm_batch_invariant.ops.scaled_linear.sm90_schedule import SM90_SCHEDULES, Sm90Schedule
from vllm_batch_invariant.ops.silu import cuda as silu
from vllm_batch_invariant.ops.silu_backward import cuda as silu_backward
from vllm_batch_invariant.ops.softmax import cuda as softmax
from vllm_batch_invariant.ops.top_k_top_p.cuda import top_k_top_p

SHARED_MEMORY = {
    80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376
}  # fmt: skip
"""Bytes that a program may have by compute capability times ten: "maximum amount of shared memory per thread block" in
the table of technical specifications of the CUDA C++ programming guide (section "Compute Capabilities").
"""
RESERVED = 1024
"""Bytes of a multiprocessor's shared memory that a program takes beside its own."""
MOST_SPILLED = 512
"""Bytes of a thread's stack. With Triton 3.6 to 3.9 a Gluon kernel has up to 104, and attention with heads of 256 up to
472: prefill has there what it needs once for each block of rows.
"""
GLUON = (
    "prefill_kernel",
    "decode_kernel",
    "gemm_sm90_swap_ab_kernel",
    "scaled_gemm_sm90_kernel",
    "linear_sm90_kernel",
    "grouped_gemm_sm90_kernel",
    "grouped_packed_sm90_kernel",
)
WAIT_FOR_SOME = ("gemm_sm90_swap_ab_kernel", "scaled_gemm_sm90_kernel")
"""Whose wgmmas must not wait for one another."""
READ_BETWEEN_WAITS = (*WAIT_FOR_SOME, "grouped_packed_sm90_kernel", "decode_kernel")
"""Whose accumulators ptxas may read too early."""
PROCESSORS = 132
RECORDED = Path(__file__).with_name("compiled_variants.json")
HALVES = (torch.bfloat16, torch.float16)
FOUR_BITS = integers(4, 32, True, False)
"""That with the most to load."""
REDUCTION = AttentionReduction.of_device("cuda")
ONE_OF_ROWS = tuple({tile.block_m: tile for tile in NARROW_TILES}.values())
"""Of the narrow tiles one for each number of rows."""


def check(name: str, ok: bool) -> None:
    """Say whether a check passed, and after how many seconds of this process's; the first that fails ends it."""
    print("ok" if ok else "FAILED", name, f"({time.process_time():.0f} s)", flush=True)
    if not ok:
        sys.exit(1)


class NoDriver:
    """What Triton asks its driver for when it compiles; numbers the GPUs by their capability."""

    capability = 90

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0


@dataclass(frozen=True)
class Compiled:
    """A kernel as it would be launched."""

    name: str
    gpu: int
    kernel: Any

    def _of(self, what: str, find: Callable[[], Any]) -> Any:
        return OUTCOMES.of(self.kernel, self.name, what, find)

    @property
    def shared(self) -> int:
        """Bytes a program."""
        return self._of("shared", lambda: self.kernel.metadata.shared)

    @property
    def warps(self) -> int:
        return self._of("warps", lambda: self.kernel.metadata.num_warps)

    @property
    def stages(self) -> int:
        return self._of("stages", lambda: self.kernel.metadata.num_stages)

    @property
    def frees_one_place(self) -> bool:
        """As :func:`frees_one_place` says."""
        return self._of("frees_one_place", lambda: frees_one_place(self.kernel.asm["ptx"]))

    @property
    def reads_before_wait(self) -> bool:
        """As :func:`reads_before_wait` says."""
        return self._of("reads_before_wait", lambda: reads_before_wait(self._dumped("-sass")))

    @property
    def waits_for_each(self) -> bool:
        """As :func:`waits_for_each` says."""
        return self._of("waits_for_each", lambda: waits_for_each(self._dumped("-sass")))

    @property
    def asserts(self) -> bool:
        """Whether it may end with an assertion."""
        return self._of("asserts", lambda: "__assertfail" in self.kernel.asm["ptx"])

    @property
    def reduced_layouts(self) -> list[str]:
        """As :func:`reduced_layouts` says."""
        return self._of("reduced_layouts", lambda: reduced_layouts(self.kernel.asm["ttgir"]))

    @property
    def dot_operands(self) -> list[str]:
        """As :func:`dot_operands` says."""
        return self._of("dot_operands", lambda: dot_operands(self.kernel.asm["ttgir"]))

    @property
    def adds_behind(self) -> bool:
        """As :func:`adds_behind` says."""
        return self._of("adds_behind", lambda: adds_behind(self.kernel.asm["ttgir"]))

    def resources(self) -> tuple[int, int]:
        """Registers and bytes of stack of a thread, as the assembler says."""
        registers, stack = self._of("resources", self._resources)
        return registers, stack

    def _resources(self) -> tuple[int, int]:
        [line] = [line for line in self._dumped("-res-usage").splitlines() if "REG:" in line]
        found = dict(item.split(":") for item in line.split())
        return int(found["REG"]), int(found["STACK"])

    def spills_in_loops(self) -> int:
        """Instructions that move registers to and from memory in loops that have no other loop inside."""
        return spills_in_loops(self._dumped("-sass"))

    def _dumped(self, option: str) -> str:
        """What the disassembler that Triton brings says."""
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(self.kernel.asm["cubin"])
            file.flush()
            return subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout

    @property
    def instructions(self) -> tuple[str, ...]:
        """Kinds of the tensor cores' instructions; fp32 has none."""
        return tuple(self._of("instructions", self._instructions))

    @property
    def promotions(self) -> float:
        """As :func:`promotions` says."""
        return self._of("promotions", lambda: promotions(self.kernel.asm["ptx"]))

    def _instructions(self) -> list[str]:
        return sorted(set(re.findall(r"\b(mma\.sync|wgmma\.mma_async|tcgen05\.mma)\b", self.kernel.asm["ptx"])))


def spills_in_loops(sass: str) -> int:
    """As :meth:`Compiled.spills_in_loops`, of assembly: LDL and STL between the target of a branch backwards and the
    branch, where no other such pair lies between.
    """
    lines = [
        (int(line[1], 16), line[2]) for line in re.finditer(r"/\*([0-9a-f]{4,})\*/\s+([^;/]*);", sass)
    ]  # fmt: skip
    branches = ((at, re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)) for at, text in lines)
    loops = {(int(to[1], 16), at) for at, to in branches if to and int(to[1], 16) <= at}
    innermost = [
        (first, last)
        for first, last in loops
        if not any((first, last) != other and first <= other[0] and other[1] <= last for other in loops)
    ]
    moves = [at for at, text in lines if re.search(r"\b(LDL|STL)\b", text)]
    return sum(any(first <= at <= last for first, last in innermost) for at in moves)


compiled: list[Compiled] = []
OUTCOMES = Outcomes()
NO_DRIVER = NoDriver()


def compile_instead_of_running() -> None:
    """From now on a launch compiles the kernel for the GPU of :data:`NO_DRIVER` and notes it, if it is not noted."""
    run = JITFunction.run

    def note(kernel: JITFunction, *args: object, grid: object, warmup: bool, **options: object) -> Any:
        check_options(kernel.__name__, options)
        made = run(kernel, *args, grid=grid, warmup=True, **options)
        if made is not None and not any(one.kernel is made for one in compiled):
            compiled.append(Compiled(kernel.__name__, NO_DRIVER.capability, made))
        return made

    pretend_a_gpu()
    JITFunction.run = note


def leave_out_alike() -> None:
    """From now on a variant is not compiled whose kernel was, over the same dtypes, with the same constants but for
    numbers above 1: the front end reads the same lines. ``make test-triton`` compiles all.
    """
    read: set[tuple] = set()

    def is_alike(**call: Any) -> bool:
        kernel, made = call["fn"].jit_function, call["compile"]
        constants = [made["constants"].get((index,)) for index, one in enumerate(kernel.params) if one.is_constexpr]
        kinds = [kind for kind in map(str, made["signature"].values()) if "*" in kind or "tensordesc" in kind]
        key = (kernel.__name__, *kinds, *(min(one, 2) if type(one) is int else str(one) for one in constants))
        alike = key in read
        read.add(key)
        return alike

    triton.knobs.runtime.jit_cache_hook = is_alike


def check_options(kernel: str, options: dict[str, object]) -> None:
    """Without the option a version of Triton fuses products with additions or not, as it likes."""
    if not isinstance(options.get("enable_fp_fusion"), bool):
        check(f"{kernel}: its launch does not say whether products are fused with additions", False)


def pretend_a_gpu() -> None:
    """Tensors on the CPU are taken for tensors on the GPU of :data:`NO_DRIVER`."""

    def properties(device: object) -> SimpleNamespace:
        return SimpleNamespace(
            name=f"sm_{NO_DRIVER.capability}",
            multi_processor_count=PROCESSORS,
            shared_memory_per_block_optin=SHARED_MEMORY[NO_DRIVER.capability],
            L2_cache_size=50 << 20,
            major=NO_DRIVER.capability // 10,
            minor=NO_DRIVER.capability % 10,
        )

    driver.set_active(NO_DRIVER)
    torch.cuda.device = torch.cuda.device_of = lambda device: nullcontext()
    torch.cuda.get_device_properties = properties
    torch.cuda.get_device_capability = lambda device: divmod(NO_DRIVER.capability, 10)
    DEVICES["cpu"] = replace(DEVICES["cpu"], attention="triton")
    Gpu.of = staticmethod(Gpu.of.__wrapped__)  # it remembers the GPUs of a machine


def attend(
    heads: Heads,
    page: int,
    length: int,
    tokens: int,
    count: int = 1,
    kernels: planning.Kernels | None = None,
    in_codes: bool = False,
    of_tokens: bool = False,
    tail: int = 0,
    writes_codes: bool = False,
    **options: object,
) -> None:
    """Launch what ``count`` requests of so many keys and so many new tokens each need, over numbers or over codes, with
    one scale or one a token and head; or over keys that begin with their values and have a tail. Decode may write codes
    of its result.
    """
    request = Request(replace(heads, size=heads.size + tail), length, 1)
    query, keys, values, table, seq_lens, starts = paged([Chunk(request, length - tokens, length)] * count, page)
    scales = ()
    if in_codes:
        scales = [torch.ones(keys.shape[:3] if of_tokens else ()) for _ in "kv"]
        keys, values = keys.to(E4M3), values.to(E4M3)
    if tail:
        values = keys[..., : heads.size]
    stored = E4M3 if in_codes else None
    shape = planning.AttentionShape(heads.query, heads.kv, heads.size, heads.dtype, REDUCTION, stored, of_tokens, tail)
    window = options.get("sliding_window") if options.keys() <= sm90.KNOWN else None
    known = options.keys() <= (frozenset() if in_codes else sm90.KNOWN)
    planner = planning.Planner(shape, query.device, 8, 1000, 8000, known, kernels, window=window)
    plan = planner.plan(starts, seq_lens, len(query), tokens)
    if writes_codes:
        codes = QuantiseReduction.of_dtype(heads.dtype, E4M3, 128)
        cache = PagedCache(keys, values, table, None, *scales)
        call = PagedAttention(query, cache, seq_lens, starts, AttentionSpec(0.1, **options), REDUCTION)
        attention.paged_attention(call, torch.empty_like(query), plan, codes)
        return
    paged_attention(
        query, keys, values, table, seq_lens, starts, *scales, scale=0.1, reduction=REDUCTION, implementation="triton",
        plan=plan, **options,
    )  # fmt: skip


def decode_and_prefill(heads: Heads, page: int, **options: object) -> None:
    """A step of decode, one of two tokens a request, whose small blocks keep more rows, and a prefill."""
    attend(heads, page, 300, 1, 2, **options)
    attend(heads, page, 300, 2, 2, **options)
    attend(heads, page, 300, 200, **options)


def both_directions(heads: Heads) -> None:
    """Sequences of few tokens and of many that see both sides, over keys without pages and over pages, and tokens that
    see a range.
    """
    for window in ({}, {"sliding_window": 100}):
        for length in (2, 200):
            packed([Request(heads, length, 1)], "triton", reduction=REDUCTION, **window)
        attend(heads, 64, 200, 200, causal=False, **window)
        for tokens in (2, 200):
            attend(heads, 64, 200, tokens, ranges=torch.zeros(tokens, 2, dtype=torch.int32), **window)


def written_caches(count: int) -> None:
    """Keys and values of so many tokens, as codes and as numbers."""
    qkv, scale = torch.zeros(count, 3, 8, 128, dtype=torch.bfloat16), torch.ones(())
    for dtype, scales in ((E4M3, (scale, scale)), (torch.bfloat16, ())):
        cache = torch.zeros(5, 8, 16, 256, dtype=torch.bfloat16).to(dtype).split(128, dim=-1)
        kv_cache.write(qkv[:, 1], qkv[:, 2], CacheSlots(*cache, torch.zeros(count, dtype=torch.int64), *scales))
        if scales:
            of_tokens = torch.ones(2, *cache[0].shape[:3])
            kv_cache.write(qkv[:, 1], qkv[:, 2], CacheSlots(*cache, torch.zeros(count, dtype=torch.int64), *of_tokens))


def convolutions(count: int) -> None:
    """LFM2's with 3 taps, of so many requests with one new token and with more than a program has, and one of 4."""
    for width, gated in ((3, True), (4, False)):
        weight, integers = torch.zeros(1024, width, dtype=torch.bfloat16), torch.zeros(count + 1, dtype=torch.int32)
        held = torch.zeros(count, width - 1, 1024, dtype=torch.bfloat16)
        for longest in (1, 100):
            x = torch.zeros(count * longest, 1024 * (3 if gated else 1), dtype=torch.bfloat16)
            states = ConvStates(held, integers[1:], integers, integers[1:], longest)
            bias = None if gated else weight[:, 0].contiguous()
            causal_conv.causal_conv(x, weight, bias, states, ConvReduction.of(width, x.dtype, gated))


def delta_rules(count: int, dtypes: Sequence[torch.dtype] = (torch.bfloat16,)) -> None:
    """Qwen3.5's, of so many requests with one new token, with drafts and with more than a chunk has."""
    for dtype in dtypes:
        reduction, integers = DeltaRuleReduction.of(128, 128, dtype), torch.zeros(count + 1, dtype=torch.int32)
        for longest, rows in ((1, 16), (4, 32), (100, 16)):
            held = torch.zeros(count, reduction.page_bytes(16, 32, rows), dtype=torch.uint8)
            states = DeltaStates(held, integers[1:], integers, integers[1:], longest, rows)
            a, weight = torch.zeros(count * longest, 32, dtype=dtype), torch.zeros(32)
            mixed = torch.zeros(len(a), 64 * 128, dtype=dtype)
            q, k, g, beta = delta_rule.gdn_inputs(mixed, a, a, weight, weight, 16, 128)
            convolved_inputs(mixed, (a, a, weight, weight), 16, 128, True, integers, longest)
            v = mixed[:, 32 * 128 :].unflatten(1, (32, 128))
            for decode in schedules_of(reduction, longest):
                delta_rule.delta_rule(q, k, v, g, beta, states, reduction, decode=decode)


def schedules_of(reduction: DeltaRuleReduction, longest: int) -> Iterable[delta_rule.DeltaSchedule | None]:
    """Of decode, where a step has no more new tokens; else one that the launcher chooses itself."""
    schedules = delta_rule.SCHEDULES[reduction.gates]
    return {1: schedules.decode.values(), 4: schedules.verify}.get(longest, (None,))


def channel_gates(count: int, dtypes: Sequence[torch.dtype] = (torch.bfloat16,)) -> None:
    """Kimi Linear's, of so many requests with one new token, with drafts and with more than a chunk has."""
    for dtype in dtypes:
        reduction = DeltaRuleReduction.of(128, 128, dtype, gates="channel")
        integers = torch.zeros(count + 1, dtype=torch.int32)
        for longest, rows in ((1, 16), (4, 32), (100, 16)):
            held = torch.zeros(count, reduction.page_bytes(32, 32, rows), dtype=torch.uint8)
            states = DeltaStates(held, integers[1:], integers, integers[1:], longest, rows)
            mixed, b = (
                torch.zeros(count * longest, 96 * 128, dtype=dtype),
                torch.zeros(count * longest, 32, dtype=dtype),
            )
            for least in (None, -5.0):
                of_channels = mixed[:, : 32 * 128], b, torch.zeros(32), torch.zeros(32 * 128)
                q, k, g, beta = delta_rule.kda_inputs(mixed, *of_channels, 128, least)
            v = mixed[:, 64 * 128 :].unflatten(1, (32, 128))
            for decode in schedules_of(reduction, longest):
                delta_rule.delta_rule(q, k, v, g, beta, states, reduction, decode=decode)


def convolved_inputs(
    mixed: torch.Tensor,
    gates: tuple[torch.Tensor, ...],
    key_heads: int,
    key_size: int,
    solve: bool,
    integers: torch.Tensor,
    longest: int,
) -> None:
    """The operands of such a layer behind its convolution, where one launch makes both."""
    if longest > delta_rule.FUSED:
        return
    taps = torch.zeros(mixed.shape[1], 4, dtype=mixed.dtype)
    held = torch.zeros(len(integers) - 1, 3, len(taps), dtype=mixed.dtype)
    states = ConvStates(held, integers[1:], integers, integers[1:], longest)
    convolution = Convolution(taps, None if solve else taps[:, 0].contiguous(), states)
    delta_rule.convolved_inputs(mixed, convolution, gates, key_heads, key_size, solve)


def state_spaces(count: int, dtypes: Sequence[torch.dtype] = (torch.bfloat16,), size: int = 128) -> None:
    """Nemotron-H's, or with states of another size, of so many requests with one new token, with drafts and with more
    than a chunk has.
    """
    for dtype in dtypes:
        reduction = DeltaRuleReduction.of(size, 64, dtype, solve=False)
        integers, of_heads = torch.zeros(count + 1, dtype=torch.int32), torch.zeros(64)
        for longest, rows in ((1, 16), (4, 32), (100, 16)):
            held = torch.zeros(count, reduction.page_bytes(8, 64, rows), dtype=torch.uint8)
            states = DeltaStates(held, integers[1:], integers, integers[1:], longest, rows)
            projected = torch.zeros(count * longest, 64 * 64 + 2 * 8 * size + 64, dtype=dtype)
            mixed, dt = projected[:, :-64], projected[:, -64:]
            g, steps = delta_rule.mamba2_gates(dt, of_heads, of_heads.to(dtype))
            convolved_inputs(mixed, (dt, dt, of_heads, of_heads.to(dtype)), 8, size, False, integers, longest)
            x, b, c = mixed.split([64 * 64, 8 * size, 8 * size], dim=1)
            q, k, v = (one.unflatten(1, (-1, of_head)) for one, of_head in ((c, size), (b, size), (x, 64)))
            for decode in schedules_of(reduction, longest):
                delta_rule.delta_rule(q, k, v, g, steps, states, reduction, of_heads.to(dtype), decode=decode)


def adapters(
    count: int,
    dtype: torch.dtype = torch.bfloat16,
    tiles: Sequence[lora.LoraSchedule | None] = (None,),
    k: int = 2048,
    ranks: Sequence[int] = (16,),
) -> None:
    """So many rows of adapters of some ranks in four slots, of a fused layer, of one product and of an embedding."""
    slots, reduction = torch.zeros(count, dtype=torch.int32), LoraReduction.of_device("cuda", k, dtype)
    x = torch.zeros(count, k, dtype=dtype)
    for rank, columns in itertools.product(ranks, ((2048, 512, 512), (1024,))):
        y, a = torch.zeros(count, sum(columns), dtype=dtype), [torch.zeros(4, 1, rank, k, dtype=dtype)] * len(columns)
        b = [torch.zeros(4, 1, n, rank, dtype=dtype) for n in columns]
        for tile in tiles:
            lora.add_adapters(y, x, a, b, slots, reduction, tile)
    lora.add_expanded(y, torch.zeros(count, ranks[-1], dtype=dtype), b[0], slots, reduction)


def every_adapter() -> None:
    """By every tile, with room for every rank that vLLM has; also of a K that has no whole leaves."""
    for dtype in (*HALVES, torch.float32):
        tiles = [one for one, _ in lora.certified(dtype)]
        adapters(3, dtype, list(dict.fromkeys(tiles)), ranks=(16, 320) if dtype == torch.bfloat16 else (64,))
    adapters(3, k=1100, ranks=(8, 32, 64, 128, 256))
    adapters(300, k=1100, ranks=(8,))


def gradients_of_attention(heads: Heads, count: int) -> None:
    """Those of two sequences of so many tokens each."""
    query, key = (torch.zeros(2 * count, number, heads.size, dtype=heads.dtype) for number in (heads.query, heads.kv))
    attention_gradients.attention_backward(query, query, key, key, [0, count, 2 * count], 0.1)


def experts(count: int, dtype: torch.dtype = torch.bfloat16, here: int = 16, **fields: object) -> None:
    """So many tokens of a small layer of experts, of which so many are here."""
    reduction, bias = MoeReduction(16, 3, dtype, **fields), torch.zeros(16) if fields else None
    rows = 96 * (1 + reduction.is_gated)
    biases = (torch.zeros(16, rows, dtype=dtype), torch.zeros(16, 200, dtype=dtype)) if fields else (None, None)
    weights, ids = moe.route(torch.zeros(count, 16, dtype=dtype), reduction, bias)
    gate_up, down = torch.zeros(here, rows, 200, dtype=dtype), torch.zeros(here, 200, 96, dtype=dtype)
    places = None if here == 16 else torch.zeros(16, dtype=torch.int32)
    of_layer = weights, ids, Experts(gate_up, down, reduction, *biases, places)
    x = torch.zeros(count, 200, dtype=dtype)
    moe.moe(x, *of_layer)
    moe.add_and_norm(moe.products(x, *of_layer), x, x[0], 1e-6)
    moe.group(ids.repeat(20, 1), 16, moe.layer_schedules(dtype, Gpu.of(0))[-1])  # so many that others place them
    moe._activated(torch.zeros(count, rows, dtype=dtype), reduction.activation)  # only the certificate does


def adapted_experts(count: int) -> None:
    """So many tokens of such a layer with adapters, by the GPU's operation for tensors that are on none."""
    reduction, slots = MoeReduction(16, 3, torch.bfloat16), torch.zeros(count, dtype=torch.int64)
    of_token, of_pair = torch.zeros(4, 16, 16, 200), torch.zeros(4, 16, 16, 96)
    ab = ((of_token,) * 2, (of_pair.transpose(2, 3),) * 2), ((of_pair,), (of_token.transpose(2, 3),))
    pairs = (tuple(tuple(one.bfloat16().contiguous() for one in slices) for slices in pair) for pair in ab)
    weights = (torch.zeros(16, *size, dtype=torch.bfloat16) for size in ((192, 200), (200, 96)))
    of_layer = torch.zeros(count, 3), torch.zeros(count, 3, dtype=torch.int64)
    of_gpu = LoraReduction.of_device
    with (
        patch.object(params, "add_adapters", lora.add_adapters),
        patch.object(LoraReduction, "of_device", lambda _, k, dtype: of_gpu("cuda", k, dtype)),
    ):
        adapters = ExpertAdapters(slots, *pairs)
        moe.moe(
            torch.zeros(count, 200, dtype=torch.bfloat16), *of_layer, Experts(*weights, reduction, adapters=adapters)
        )


def many_pairs(count: int) -> None:
    """Of two experts, eight times so many tokens: from 13 on more than 100 pairs of each."""
    x, ids = torch.zeros(8 * count, 128, dtype=torch.bfloat16), torch.zeros(8 * count, 2, dtype=torch.int64)
    gate_up, down = torch.zeros(2, 128, 128, dtype=x.dtype), torch.zeros(2, 128, 64, dtype=x.dtype)
    moe.moe(x, torch.zeros(ids.shape), ids, Experts(gate_up, down, MoeReduction(2, 2, x.dtype)))


@functools.cache
def stored_experts(form: Format, n: int, k: int, count: int) -> StoredExperts:
    """Weights [count, n, k] of zeros as a format stores them, which takes seconds for a layer of a published model."""
    stored = form.stored(torch.zeros(n, k, dtype=torch.bfloat16))
    return StoredExperts(form, tuple(torch.stack([one] * count) for one in stored), torch.bfloat16)


def packed_layer(count: int) -> None:
    """So many tokens of two experts in four bits."""
    x, ids = torch.zeros(count, 128, dtype=torch.bfloat16), torch.zeros(count, 2, dtype=torch.int64)
    for form in (MXFP4, NVFP4_STEPS, integers(4, 128, zeros=True)):
        gate_up, down = stored_experts(form, 256, 128, 2), stored_experts(form, 128, 128, 2)
        moe.moe(x, torch.zeros(ids.shape), ids, Experts(gate_up, down, MoeReduction(2, 2, x.dtype)))


def experts_in_fp8(n: int, k: int, form: Format = FP8_BLOCK) -> StoredExperts:
    """Weights of four experts."""
    codes, shape = torch.zeros(4, n, k, dtype=torch.uint8), (n, 1) if form is FP8 else (-(-n // GROUP), -(-k // GROUP))
    return StoredExperts(form, (codes.view(E4M3), torch.ones(4, *shape)), torch.bfloat16)


def experts_in_codes(hidden: int, intermediate: int, activation: str = "silu") -> None:
    """The products of a layer in FP8, by every tile."""
    rows = intermediate if activation in UNGATED else 2 * intermediate
    for layer, form in itertools.product(moe.layer_schedules(torch.bfloat16, Gpu.of(0), scaled=True), (FP8_BLOCK, FP8)):
        groups = moe.group(torch.zeros(8, 1, dtype=torch.int64), 4, layer)
        for n, k, tile in ((rows, hidden, layer.gate_up), (hidden, intermediate, layer.down)):
            scales = torch.ones(8) if form is FP8 else torch.ones(8, -(-k // GROUP))
            x = Codes(torch.zeros(8, k, dtype=torch.uint8).view(E4M3), scales, torch.bfloat16)
            gate = activation if tile is layer.gate_up else ""
            moe.grouped_gemm(x, experts_in_fp8(n, k, form), None, groups, 8, torch.bfloat16, tile, activation=gate)
    if activation == "silu":
        experts_by_library(hidden, intermediate)


def experts_by_library(hidden: int, intermediate: int, tokens: int = 8) -> None:
    """What stands around DeepGEMM's products of such a layer, of so many tokens; nothing on a GPU without e4m3."""
    if Gpu.of(0).fp8_mma is None:
        return
    products = ScaledLinearReduction.of(1, torch.bfloat16, E4M3, True, Gpu.of(0).fp8_mma)
    sides = experts_in_fp8(2 * intermediate, hidden), experts_in_fp8(hidden, intermediate)
    of_layer = Experts(*sides, MoeReduction(4, 2, torch.bfloat16, products=products))
    problem = ExpertsProblem.of(of_layer)
    if problem is not None:
        library = GroupedDeepGemm()
        library.use(lambda *_: None, "")
        library.serve(problem, tokens)
        with patch.object(moe, "grouped_deep_gemm", library):
            x, ids = torch.zeros(tokens, hidden, dtype=torch.bfloat16), torch.zeros(tokens, 2, dtype=torch.int64)
            moe.moe(x, torch.zeros(tokens, 2), ids, of_layer)


def every_expert_in_codes() -> None:
    if Gpu.of(0).fp8_mma:
        experts_in_codes(2048, 768)
        experts_in_codes(200, 128)
        experts_in_codes(2688, 1856, "relu2_no_mul")


def every_expert() -> None:
    for count, dtype in itertools.product((1, 20, 40, 100, 200, 600, 2000), (*HALVES, torch.float32)):
        experts(count, dtype)
    experts(1, scale=2.5, scoring="sigmoid")
    experts(1, groups=4, top_groups=2, scoring="sigmoid")
    for count, activation in itertools.product((1, 40, 600), ("swigluoai", "gelu", "gelu_tanh", "relu2_no_mul")):
        experts(count, activation=activation)
    for count in (1, 40, 2000):
        experts(count, here=8)
    large_experts()
    packed_experts()
    every_expert_in_codes()


def packed_experts() -> None:
    """The products of layers of published models whose experts are stored in four bits, by the least and largest
    tiles of Triton, and those of Hopper.
    """
    schedules, gpu = moe.layer_schedules(torch.bfloat16, Gpu.of(0)), Gpu.of(0)
    of_models = (
        (MXFP4, 2880, 2880, "swigluoai"),
        (NVFP4_STEPS, 2048, 768, "swigluoai"),
        (integers(4, 128, zeros=True), 2048, 768, "swigluoai"),
        (NVFP4_STEPS, 2688, 1856, "relu2_no_mul"),
    )
    for form, hidden, intermediate, activation in of_models:
        is_packed = moe.is_packed(form, hidden, intermediate, torch.bfloat16, gpu, activation)
        rows = intermediate if activation in UNGATED else 2 * intermediate
        of_hopper = moe.layer_schedules(torch.bfloat16, gpu, True) if is_packed else ()
        for layer in (schedules[0], schedules[-1], *(of_hopper if form.packing == 2 else of_hopper[:1])):
            groups = moe.group(torch.zeros(8, 1, dtype=torch.int64), 4, layer)
            for n, k, tile in ((rows, hidden, layer.gate_up), (hidden, intermediate, layer.down)):
                weight = stored_experts(form, n, k, 4)
                gate = activation if tile is layer.gate_up else ""
                moe.grouped_gemm(
                    torch.zeros(8, k, dtype=torch.bfloat16), weight, None, groups, 8, torch.bfloat16, tile,
                    activation=gate,
                )  # fmt: skip


def large_experts() -> None:
    """The products of layers of published models, by every tile."""
    schedules = moe.layer_schedules(torch.bfloat16, Gpu.of(0))
    cases = [
        *itertools.product(schedules, ((2048, 768), (2880, 2880)), HALVES[:1]),
        (schedules[-1], (2048, 768), HALVES[1]),
    ]
    for layer, (hidden, intermediate), dtype in cases:
        groups = moe.group(torch.zeros(8, 1, dtype=torch.int64), 4, layer)
        x, a = (torch.zeros(8, size, dtype=dtype) for size in (hidden, intermediate))
        gate_up = torch.zeros(4, 2 * intermediate, hidden, dtype=dtype)
        down = torch.zeros(4, hidden, intermediate, dtype=dtype)
        for activation in ("silu", "swigluoai"):
            moe.grouped_gemm(x, gate_up, None, groups, 8, dtype, layer.gate_up, activation=activation)
        moe.grouped_gemm(x, gate_up, None, groups, 8, dtype, layer.gate_up)
        moe.grouped_gemm(a, down, None, groups, 8, dtype, layer.down)


def narrow_gemms(
    dtypes: Sequence[torch.dtype],
    specs: Iterable[MatmulSpec] = (*SPECS, MatmulSpec(k_slices=2)),
    tiles: Sequence[NarrowTile] | None = None,
    rows: int = 33,
) -> None:
    """Every problem of Hopper's narrow kernel, by every tile that may serve it or by those given."""
    for spec, dtype in itertools.product(specs, dtypes):
        problem = GemmProblem(896, 512, dtype, spec, 0)
        every = {tile: None for m in (16, 32, 64, 128, 8192) for tile in schedule.sm90_tiles(problem, m, Gpu.of(0))}
        if not every:
            continue
        if spec.b_format not in (PLAIN, FOUR_BITS):  # of other formats only scales are others
            every = dict.fromkeys(list(every)[:1])
        a, (weight, *scales) = (
            torch.zeros(rows, 512, dtype=dtype),
            spec.b_format.stored(torch.zeros(896, 512, dtype=dtype)),
        )
        bias = torch.zeros(896, dtype=dtype) if spec.epilogue.has_bias else None
        out = torch.empty(rows, problem.columns, dtype=dtype)
        for tile in every if tiles is None else tiles:
            for overlaps in (True,) if tile != NARROW_TILES[0] else (False, True):
                linear.gemm_sm90_swap_ab(a, weight.t(), bias, out, problem.reduction, tile, overlaps, spec, scales)


def gemms() -> None:
    gpu = Gpu.of(0)
    a, weight = (torch.zeros(size, 512, dtype=torch.bfloat16) for size in (200, 896))
    reduction = LinearReduction.of_device("cuda", 896, 512, torch.bfloat16)
    if gpu.has_tma:
        for dtype in (torch.bfloat16, torch.float32):
            for tile in schedule.tma_tiles(dtype.itemsize, gpu):
                linear.gemm_tma(a, weight.t(), None, torch.empty(200, 896, dtype=dtype), reduction, tile)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        reduction = LinearReduction.of_device("cuda", 896, 512, dtype)
        out = torch.empty(1, 200, 896, dtype=dtype)
        shapes = itertools.product((1, 64, 8192), (64, 8192))
        for tile in {schedule.ptr_tile(m, n, dtype, gpu) for m, n in shapes}:
            linear.gemm_ptr(a.to(dtype)[None], weight.to(dtype).t()[None], None, out, reduction, tile)


def codes(count: int, length: int = 208, n: int = 320, dtype: torch.dtype = torch.bfloat16) -> None:
    """Of so many rows, with scales of their own and with a given one, and a product of them, as int8 and as e4m3."""
    x, one, bias = torch.zeros(count, length, dtype=dtype), torch.ones(1), torch.zeros(n, dtype=dtype)
    for kind in (torch.int8, E4M3):
        rows = QuantiseReduction.of_dtype(dtype, kind)
        quantise.quantise(x, one, rows)
        of_rows, weight = quantise.quantise(x, None, rows), torch.zeros(n, length, dtype=torch.uint8).view(kind)
        if kind == torch.int8 or Gpu.of(0).fp8_mma:
            reduction = ScaledLinearReduction.of(length, dtype, kind, mma=Gpu.of(0).fp8_mma)
            for added in (None, bias):
                scaled_linear.scaled_linear(*of_rows, weight, torch.ones(n), added, reduction)
    of_groups = quantise.quantise(x, None, QuantiseReduction.of_dtype(dtype, E4M3, GROUP))
    if Gpu.of(0).fp8_mma:
        reduction = ScaledLinearReduction.of(length, dtype, E4M3, True, Gpu.of(0).fp8_mma)
        blocks = torch.ones(-(-n // GROUP), -(-length // GROUP))
        scaled_linear.scaled_linear(*of_groups, weight, blocks, bias, reduction)


def products_of_e4m3(in_blocks: bool, tiles: Iterable[ScaledLinearSchedule] = E4M3_SCHEDULES, k: int = 512) -> None:
    """By so many tiles, without a bias."""
    weight = torch.zeros(256, k, dtype=torch.uint8).view(E4M3)
    sizes = ((256, -(-k // GROUP)), (2, -(-k // GROUP))) if in_blocks else ((256,), (256,))
    reduction = ScaledLinearReduction.of(k, torch.bfloat16, E4M3, in_blocks, Gpu.of(0).fp8_mma)
    for tile in tiles:
        scales = [torch.ones(size) for size in sizes]
        scaled_linear.scaled_linear(weight, scales[0], weight, scales[1], None, reduction, tile)


def every_product_of_e4m3() -> None:
    """By every tile, with scales of both kinds, also of a K that has no whole groups, where a GPU has such products."""
    for in_blocks, k in itertools.product((False, True), (512, 208)) if Gpu.of(0).fp8_mma else ():
        products_of_e4m3(in_blocks, k=k)


def decoded_weights() -> None:
    """Of integers, with zero points and without, and of FP4."""
    for bits, zeros, dtype in itertools.product((4, 8), (False, True), (torch.bfloat16, torch.float16)):
        words, scales = torch.zeros(9, 24, dtype=torch.int32), torch.zeros(9, 3, dtype=dtype)
        points = torch.zeros(9, 3, dtype=torch.uint8) if zeros else None
        decode_integers(words, scales, points, torch.empty(9, 24 * 32 // bits, dtype=dtype), bits)
    for dtype in (torch.bfloat16, torch.float32):
        form = PackedTile.of(MXFP4, dtype)
        assert form is not None
        codes, scales = torch.zeros(9, 96, dtype=torch.uint8), torch.zeros(9, 6, dtype=torch.uint8)
        decode_tiles((codes, scales), torch.empty(9, 192, dtype=dtype), form)
        form = PackedTile.of(NVFP4_STEPS, dtype)
        assert form is not None
        decode_tiles((codes, torch.zeros(9, 24, dtype=dtype)), torch.empty(9, 192, dtype=dtype), form)


def every_code() -> None:
    """Rows of every dtype, and products of int8 by every tile, also of a K that has no whole steps."""
    for length, dtype in ((208, torch.float32), (4096, torch.bfloat16), (20_000, torch.float16)):
        codes(2, length, dtype=dtype)
    for length in (208, 512):
        weight, scale, reduction = (
            torch.zeros(96, length, dtype=torch.int8), torch.ones(96), ScaledLinearReduction.of(length, torch.bfloat16)
        )  # fmt: skip
        for tile in SCHEDULES:
            scaled_linear.scaled_linear(weight, scale, weight, scale, None, reduction, tile)


def narrow_codes(tiles: Sequence[Sm90Schedule] = SM90_SCHEDULES, rows: int = 33) -> None:
    """Products of e4m3 by tiles of Hopper's kernel, in blocks and with scales of rows and a bias."""
    x, weight = (torch.zeros(count, 400, dtype=torch.uint8).view(E4M3) for count in (rows, 160))
    for in_blocks, dtype in ((True, torch.bfloat16), (False, torch.bfloat16), (True, torch.float32)):
        scales = (torch.ones(rows, 4), torch.ones(2, 4)) if in_blocks else (torch.ones(rows), torch.ones(160))
        bias = torch.zeros(160, dtype=dtype) if dtype == torch.float32 or not in_blocks else None
        reduction = ScaledLinearReduction.of(400, dtype, E4M3, in_blocks, WGMMA)
        for tile in tiles:
            given = x, scales[0], weight, scales[1], bias, reduction, tile
            scaled_linear.scaled_linear(*given, weight_is_constant=in_blocks)


def products_like(x: torch.Tensor) -> moe.Products:
    """Of two experts, whose sums are like x."""
    tokens = len(x)
    ids, made = torch.zeros(tokens, 2, dtype=torch.int64), torch.zeros(2 * tokens, x.shape[1], dtype=x.dtype)
    return moe.Products(made, torch.zeros(tokens, 2), ids, None)


def gradients_of_rows(count: int) -> None:
    """Of norms, as short, as long and longer than one tile of a program, and of SiLU."""
    for length, dtype in ((128, torch.bfloat16), (4096, torch.float32), (12_288, torch.bfloat16)):
        x = torch.zeros(count, length, dtype=dtype)
        norm_backward.rms_norm_backward(x, x[0], 1e-6, x, None, None)
        norm_backward.rms_norm_backward(x, x[0], 1e-6, x, x, x)
        silu_backward.silu_and_mul_backward(torch.zeros(count, 2 * length, dtype=dtype), x)


def rows() -> None:
    """Norms, softmax and sums: what they take follows the row's length."""
    gradients_of_rows(2)
    for length in (128, 5120, 20_000, 152_000):
        x = torch.zeros(2, length, dtype=torch.bfloat16)
        if length <= 20_000:
            norm.rms_norm(x, x[0], 1e-6, x, None)
        if length == 5120:
            norm.rms_norm(x, x[0], 1e-6, x, None, adds_one=True)
            norm.rms_norm(x, x[0], 1e-6, x, None, codes=QuantiseReduction.of_dtype(x.dtype, E4M3, 128))
        softmax.log_softmax(x, -1, dtype=torch.float32)
        softmax.softmax(x, -1)
        reduce.mean(x, -1)
    x = torch.zeros(2, 2 * 12_288, dtype=torch.bfloat16)
    relu_squared.relu_squared(x)
    silu.silu_and_mul(x)
    silu.silu_and_mul(x, codes=QuantiseReduction.of_dtype(x.dtype, E4M3, 128))
    turned_heads(2)
    gated_heads(2, "silu")
    gated_groups(2)


def gated_heads(count: int, *activations: str) -> None:
    """Of 32 heads of so many tokens, with gates that lie behind queries, keys and values."""
    heads, weight = torch.zeros(count, 32, 128, dtype=torch.bfloat16), torch.zeros(128)
    gates = torch.zeros(count, 96 * 128, dtype=torch.bfloat16)[:, 64 * 128 :].unflatten(1, (32, 128))
    for activation in activations:
        norm.gated_rms_norm(heads, weight, 1e-6, gates, activation, True)


def gated_groups(count: int) -> None:
    """Of 8 groups of so many tokens, and of one, normalised behind their gates as Mamba-2's are."""
    projected, weight = torch.zeros(count, 3 * 4096, dtype=torch.bfloat16), torch.zeros(4096, dtype=torch.bfloat16)
    for groups in (8, 1):
        gates, x = (part.unflatten(1, (groups, -1)) for part in projected.chunk(3, dim=1)[:2])
        norm.gated_rms_norm(x.contiguous(), weight.view(groups, -1), 1e-5, gates, "silu", False)


def turned_heads(count: int) -> None:
    """Of 32 and 8 heads of so many tokens, whose keys are returned, and whose keys and values go to pages."""
    qkv, positions = torch.zeros(count, 48 * 128, dtype=torch.bfloat16), torch.zeros(count, dtype=torch.int64)
    weight, angles = torch.zeros(128, dtype=torch.bfloat16), torch.zeros(9, 128)
    caches = torch.zeros(3, 8, 16, 2 * 128, dtype=torch.bfloat16).chunk(2, dim=-1)
    codes, scale = [cache.to(E4M3) for cache in caches], torch.ones(())
    for slots in (None, CacheSlots(*caches, positions), CacheSlots(*codes, positions, scale, scale)):
        norm_rotary.norm_rotary(qkv, positions, weight, weight, angles, 1e-6, 32, 8, slots)
    three, sections = positions.expand(3, -1).contiguous(), Sections(24, 20, 20, interleaved=True)
    norm_rotary.norm_rotary(qkv, positions, None, None, angles, 0.0, 32, 8, slots)
    norm_rotary.norm_rotary(qkv, three, None, None, angles, 0.0, 32, 8, slots, sections)


def launch_on(gpu: int, launch: Callable[..., None], *args: object, **options: object) -> list[Compiled]:
    """What a launcher has compiled for a GPU that had not been."""
    NO_DRIVER.capability = gpu
    before = len(compiled)
    launch(*args, **options)
    return compiled[before:]


def sm90_attention(heads: Heads, page: int, **options: object) -> None:
    """Tensors are on no GPU, so that what looks whether it is a Hopper would say no."""
    sm90._TRIED_PAGE = page
    sm90.compiles.cache_clear()
    covers, sm90.covers = sm90.covers, lambda *_: True
    try:
        decode_and_prefill(heads, page, **options)
    finally:
        sm90.covers = covers


def sm90_packed(heads: Heads) -> None:
    """A sequence of few tokens and one of many that see all of it, over keys without pages."""
    for length in (2, 200):
        kernels = planning.Kernels(sm90=True, decode_rows=0)
        packed([Request(heads, length, 1)], "triton", reduction=REDUCTION, kernels=kernels)


def sm90_verify_steps(heads: Heads, page: int) -> None:
    """Decode and verify steps of an engine whose longest has more rows a request than decode's blocks."""
    kernels = planning.Kernels(sm90=True, decode_rows=planning.WIDE_DECODE_ROWS)
    for tokens in (1, 2, planning.WIDE_DECODE_ROWS * heads.kv // heads.query):
        attend(heads, page, 300, tokens, 2, kernels)


def frees_one_place(ptx: str) -> bool:
    """Whether a loop of a kernel tells that some place in shared memory is free, by a barrier's address from before the
    loop: a ring then waits for ever in its second turn. Triton makes such code where two names of one value are
    carried through a loop.
    """
    lines = ptx.splitlines()
    for at, line in enumerate(lines):
        arrival = re.search(r"mbarrier\.arrive\.shared::cta\.b64 _, \[(%r\d+)]", line)
        if not arrival:
            continue
        label = next(
            before for before in range(at, -1, -1) if not before or re.match(r"\$L__BB\d+_\d+:", lines[before])
        )
        is_loop = any(re.search(rf"\bbra \t?{re.escape(lines[label].split(':')[0])};", after) for after in lines[at:])
        made = any(re.search(rf"\t{arrival[1]},", between) for between in lines[label:at])
        if is_loop and not made:
            return True
    return False


def reads_before_wait(sass: str) -> bool:
    """Whether accumulators of wgmma are read before the wait for the group of instructions that adds to them. ptxas
    12.8 and 12.9 move what reads them to before the last wait where operands lie in registers, and nothing but the
    results shows it.
    """
    groups: list[set[int]] = [set()]  # accumulators of unfinished ones, the oldest first, and of one not committed
    for instruction in re.findall(r"/\*[0-9a-f]{4,}\*/\s+([^;/]*);", sass):
        if multiplied := re.search(r"\b[HQ]GMMA\.64x(\d+)\S* R(\d+), ", instruction):
            first = int(multiplied[2])
            groups[-1].update(range(first, first + int(multiplied[1]) // 2))
            if "gsb0" in instruction:
                groups.append(set())
        elif waited := re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)\b", instruction):
            groups = groups[-1 - int(waited[1], 16) :]
        elif set().union(*groups) & {int(register) for register in re.findall(r"\bR(\d+)", instruction)}:
            return True
    return False


def waits_for_each(sass: str) -> bool:
    """Whether wgmmas wait for one another: where the assembler finds no registers for those that are on their way, it
    makes no more of it than a remark that Triton does not show.
    """
    return 2 * len(re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x0\b", sass)) > len(re.findall(r"\b[HQ]GMMA\.", sass))


def promotions(ptx: str) -> float:
    """How often each sum of 128 products of e4m3 by wgmma is added to in fp32; 0 where there is another product."""
    products = re.findall(r"\b(?:mma\.sync|wgmma\.mma_async|tcgen05\.mma)\S*", ptx)
    of_e4m3 = [re.fullmatch(r"wgmma\S*\.m64n(\d+)k32\.f32\.e4m3\.e4m3", product) for product in products]
    if not all(of_e4m3):
        return 0.0
    steps = sum(int(one[1]) // 2 for one in of_e4m3 if one)  # of 32 products, of a thread's accumulators
    return len(re.findall(r"\b(?:add|fma)\.rn\.f32\b", ptx)) / (steps / 4)


def check_all(what: str, found: list[Compiled], verbose: bool) -> None:
    """Check that each kernel can be loaded, that the assembler had registers enough, and how many there were."""
    for one in found:
        limit = SHARED_MEMORY[one.gpu]
        gluon = one.name in GLUON
        registers, stack = one.resources() if gluon or verbose else (0, 0)
        if verbose:
            print(f"{what}: {one.name}, {one.shared} bytes shared, {registers} registers, {stack} bytes of stack")
        if one.shared > limit:
            check(f"{what}: {one.name} takes {one.shared} bytes of shared memory of {limit}", False)
        if gluon and one.frees_one_place:
            check(f"{what}: {one.name} frees one place of its ring alone", False)
        if one.name in READ_BETWEEN_WAITS and one.reads_before_wait:
            check(f"{what}: {one.name} reads accumulators before the wait for them", False)
        if one.name in WAIT_FOR_SOME and one.waits_for_each:
            check(f"{what}: {one.name} waits for every wgmma before the next", False)
        if gluon and stack > MOST_SPILLED:
            check(f"{what}: {one.name} has {stack} bytes of stack", False)
    check(f"{what}: {', '.join(sorted({one.name for one in found}))}", bool(found))


def check_sm90_attention(heads: Heads, page: int, verbose: bool, **options: object) -> None:
    what = f"attention on a Hopper, {heads}, pages of {page}{', with ' * bool(options)}{', '.join(options)}"
    found = launch_on(90, sm90_attention, heads, page, **options)
    names = [one.name for one in found if one.name not in ("plan_kernel", "attention_kernel")]
    kept = {min(heads.query // heads.kv, planning.DECODE_ROWS), planning.DECODE_ROWS}
    in_codes = "in_codes" in options
    # What is tried adds nothing to plain attention; prefill writes no codes.
    of_prefill = 2 if options.keys() & sm90.KNOWN else 1
    variants = 2 if "writes_codes" in options else of_prefill
    prefills = [] if in_codes or not sm90.prefills(heads.size) else ["prefill_kernel"] * of_prefill
    if sorted(names) != ["decode_kernel"] * variants * len(kept) + prefills:
        check(f"{what}: what is tried is what is launched, got {names}", False)
    stored = E4M3 if in_codes else None
    shape = planning.AttentionShape(heads.query, heads.kv, heads.size, heads.dtype, REDUCTION, stored)
    decodes = [one for one in found if one.name == "decode_kernel"]
    for one, rows in zip(decodes, sorted(kept) * variants, strict=True):
        ctas = sm90.decode_schedule(shape, planning.DECODE_ROWS, rows).ctas_per_sm
        if ctas * (one.shared + RESERVED) > SHARED_MEMORY[90] + RESERVED:
            check(f"{what}: {ctas} CTAs of {one.shared} bytes on a multiprocessor", False)
    check_all(what, found, verbose)


def check_sm90_packed(heads: Heads, verbose: bool) -> None:
    """Check what serves encoders on a Hopper: one kernel, whatever the length."""
    what, found = f"attention of an encoder on a Hopper, {heads}", launch_on(90, sm90_packed, heads)
    names = [one.name for one in found if one.name != "plan_kernel"]
    check(f"{what}: {names}", set(names) == {"prefill_kernel"})
    check_all(what, found, verbose)


def check_attention(gpu: int, heads: Heads, page: int, **options: object) -> list[Compiled]:
    """Check what a GPU attends by, and return it."""
    what = f"attention on sm_{gpu}, {heads}, pages of {page}{', with ' * bool(options)}{', '.join(options)}"
    found = launch_on(gpu, decode_and_prefill, heads, page, **options)
    check_all(what, found, False)
    for problem in problems_of_attention(gpu, heads, page, found, "in_codes" in options, options.get("tail", 0)):
        check(f"{what}: {problem}", False)
    return [one for one in found if one.name == "attention_kernel"]


def check_attention_over_codes(gpu: int, heads: Heads, page: int, **codes: bool) -> None:
    """Tensor cores add the same products in a step as over numbers, else no bits would be those of the cache's numbers,
    and decode's not those of prefill. Where operands of tcgen05.mma lie in memory, a pipeline over numbers begins with
    more products.
    """
    both = ({}, {"in_codes": True, **codes})
    over_numbers, over_codes = (check_attention(gpu, heads, page, **options) for options in both)
    each = (lambda dots: sorted({*dots})) if has_tcgen05(gpu // 10) else list
    wanted, found = ([each(one.dot_operands) for one in made] for made in (over_numbers, over_codes))
    what = f"attention on sm_{gpu}, {heads}, pages of {page}, multiplies codes in the order of numbers"
    check(f"{what}{[*zip(wanted, found, strict=True)] * (wanted != found)}", wanted == found and all(wanted))


def problems_of_attention(
    gpu: int, heads: Heads, page: int, found: list[Compiled], in_codes: bool = False, tail: int = 0
) -> list[str]:
    """Where decode takes another instruction than prefill, and where it takes more memory than it is reckoned with."""
    problems = []
    attention = [one for one in found if one.name == "attention_kernel"]
    kinds = sorted({kind for one in attention for kind in one.instructions})
    if len(kinds) > 1 and gpu != 90:  # on a Hopper an H200 has shown that they agree
        problems.append(f"tensor cores get {' and '.join(kinds)}, whose bits may differ")
    small = planning.decode_schedule(heads.size, heads.dtype, has_tcgen05(gpu // 10))
    for one in attention:
        is_of_decode = one.warps == small.num_warps and (small.num_warps < 8 or heads.size > 256)
        if small.block_m == 16 and is_of_decode and one.stages > 1:
            padded = triton.next_power_of_2(heads.size)
            by_tma, key_tile = attends_by_tma(gpu // 10), REDUCTION.key_tile_of(2, heads.size)
            expected = decode_bytes(small.block_m, one.stages, key_tile, padded, by_tma, in_codes, tail)
            if not 0 <= expected - one.shared <= (4096 if page == 64 or not by_tma or in_codes else expected):
                problems.append(f"{one.shared} bytes where {expected} are reckoned with")
    return problems


def check_some(more: bool) -> None:
    """One variant of each kind; with more those that take the most shared memory where there is the least, and longer
    ones.
    """
    check_sm90_attention(Heads(32, 8, 128, torch.bfloat16), 64, False)
    check_sm90_attention(Heads(32, 8, 128, torch.bfloat16), 64, False, in_codes=True)
    check_sm90_attention(Heads(40, 8, 128, torch.bfloat16), 64, False, writes_codes=True)
    check_sm90_attention(Heads(64, 8, 64, torch.bfloat16), 64, False, sliding_window=100, sinks=torch.zeros(64))
    check_sm90_attention(Heads(16, 8, 256, torch.bfloat16), 64, False, sliding_window=1000)
    check_sm90_packed(Heads(16, 16, 80, torch.bfloat16), False)
    if more:
        check_sm90_attention(Heads(4, 4, 64, torch.float16), 16, False)
        found = launch_on(90, sm90_verify_steps, Heads(8, 2, 128, torch.bfloat16), 64)
        check_all("verify steps on a Hopper", found, False)
    of_warpgroups = tuple({tile.warpgroups: tile for tile in GATED_TILES}.values())
    found = launch_on(90, narrow_gemms, HALVES[:1], (PRODUCT, MatmulSpec(k_slices=2)), ONE_OF_ROWS)
    found += launch_on(90, narrow_gemms, HALVES[:1], (GATED,), of_warpgroups)
    found += launch_on(90, narrow_gemms, HALVES[:1], (MatmulSpec(b_format=FOUR_BITS),), PACKED_TILES[2::14])
    check_all("narrow GEMMs", found, False)
    found = launch_on(90, narrow_codes, (SM90_SCHEDULES[4], *SM90_SCHEDULES[-2:]) if more else SM90_SCHEDULES[4:5])
    check_all("products of e4m3 in Gluon", found, False)
    # four sums are in the code of two accumulators, of which the last is promoted in either of two branches
    check("a sum of 128 products is promoted once, in Gluon", found[0].promotions == 5 / 4)
    check_all("exact products on a Hopper", launch_on(90, hopper_products, 9, True, False, HOPPER_SCHEDULES[:1]), False)
    CUDABackend.make_cubin = lambda *_: b""  # what follows is read in PTX, and the assembler takes most of the time
    check_attention_over_codes(120, Heads(8, 2, 256, torch.bfloat16), 64)
    check_attention_over_codes(90, Heads(8, 2, 64, torch.bfloat16), 64)
    check_attention_over_codes(90, Heads(8, 2, 80, torch.float16), 16)
    for gpu in (89, 90, 100, 120):
        check_attention_over_codes(gpu, Heads(8, 2, 128, torch.bfloat16), 64, of_tokens=True)
    for gpu in (89, 100):
        check_attention_over_codes(gpu, Heads(8, 2, 128, torch.bfloat16), 16)
    check_attention_over_codes(90, Heads(8, 1, 512, torch.bfloat16), 64)
    check_attention_over_codes(89, Heads(8, 1, 512, torch.bfloat16), 16)
    check_attention(90, Heads(16, 1, 512, torch.bfloat16), 64, tail=64)
    check_attention(89, Heads(16, 1, 512, torch.bfloat16), 16, tail=64)
    check_all("heads that are turned, to pages too", launch_on(90, turned_heads, 2), False)
    check_all("written caches", launch_on(90, written_caches, 2), False)
    check_all("convolutions", launch_on(90, convolutions, 2), False)
    check_all("delta rules", launch_on(90, delta_rules, 2), False)
    check_all("gates of channels", launch_on(90, channel_gates, 2), False)
    check_all("state spaces", launch_on(90, state_spaces, 2), False)
    check_adapters(more)
    found = launch_on(90, products_of_e4m3, True) + launch_on(90, products_of_e4m3, False, E4M3_SCHEDULES[1:2])
    check("products of e4m3 on a Hopper are wgmma, promoted once", {one.promotions for one in found} == {1.0})
    found = [one for one in launch_on(90, experts_in_codes, 512, 256) if one.name == moe.grouped_gemm_kernel.__name__]
    times = [one.promotions for one in found]  # beside those of a gate's activation, where it is not once
    check("experts in FP8 on a Hopper are wgmma, promoted", min(times) == 1 and times.count(1) >= len(times) // 2)
    for gpu in (90, 120):
        found = launch_on(gpu, gradients_of_attention, Heads(8, 2, 128, torch.bfloat16), 100)
        check_all(f"gradients of attention on sm_{gpu}", found, False)
    found = launch_on(90, all_reduces, 1, 4096, torch.bfloat16, 4, True)
    ends = [one.name for one in found if one.asserts]
    wanted = ["all_reduce_kernel", "add_copies_norm_kernel", "all_reduce_norm_kernel", "all_reduce_norm_kernel"]
    check("the all-reduce's wait ends with an assertion", ends == wanted)
    check_norms_behind_sums((100, 896, 2048, 4096, 5120) if more else (100, 4096))
    if more:
        check_attention(100, Heads(8, 2, 64, torch.bfloat16), 64)


def check_adapters(more: bool) -> None:
    """Every tile has one instruction, which adds the same products in a step."""
    for gpu in (90, 100) if more else (90,):
        tiles = [*dict.fromkeys(one for one, _ in lora.certified(torch.bfloat16))]
        found = launch_on(gpu, adapters, 3, torch.bfloat16, tiles, ranks=(64,))
        check_all(f"adapters on sm_{gpu}", found, False)
        products = [one for one in found if one.name != moe.place_kernel.__name__]
        kinds = {(kind, *one.instructions) for one in products for kind in one.dot_operands}
        check(f"adapters on sm_{gpu} have one instruction, {kinds}", len(products) > 9 and len(kinds) == 1)
        within = [one.name for one in products if one.name == lora.expand_kernel.__name__ and not one.adds_behind]
        check(f"adapters on sm_{gpu} add to y behind the tensor core's sum, not {within}", not within)


def reduced_layouts(ir: str) -> list[str]:
    """Of each reduction of a kernel's TTGIR, in their order, the shape and where which thread has which element; of
    integers none, whose order decides no bit.
    """
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
    found = re.findall(r'"tt\.reduce".*?\}\) : \(tensor<([^>]*>?)>\) ->', ir, re.DOTALL)
    found = [one for one in found if not re.match(r"[\dx]*xi\d", one)]
    return [re.sub(r"#\w+", lambda name: layouts.get(name[0], name[0]), one) for one in found]


def adds_behind(ir: str) -> bool:
    """Whether a kernel's TTGIR adds something behind its last dot: otherwise the dot may begin with it."""
    return ir.rfind("arith.addf") > max(ir.rfind(dot) for dot in ("tt.dot ", "warp_group_dot ", "tc_gen5_mma "))


def dot_operands(ir: str) -> list[str]:
    """Of each dot of a kernel's TTGIR, in their order, what says which products a tensor core adds in a step: how many
    adjacent elements along K a thread has of both operands, none of one in shared memory, and the instruction.
    """
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", ir, re.MULTILINE))
    found = []
    for types in re.findall(r"\b(?:tt\.dot|warp_group_dot|tc_gen5_mma) .*? : (.*)$", ir, re.MULTILINE):
        layout = "".join(layouts[name] for name in re.findall(r"-> tensor<[^#]*(#\w+)>", types))
        instruction = re.findall(r"versionMajor = \d+|instrShape = \[.*?]", layout)
        widths = [width or "shared" for width in re.findall(r"(?:kWidth = (\d+)|memdesc<\w+)[^*]*", types)]
        found.append(", ".join((*widths, *instruction)))
    return found


def check_norms_behind_sums(widths: Sequence[int]) -> None:
    """A norm behind an all-reduce, or behind experts, adds a row's squares in the threads that a norm alone adds them
    in.
    """
    for hidden, dtype in itertools.product(widths, (torch.bfloat16, torch.float32)):
        x = torch.zeros(3, hidden, dtype=dtype)
        [alone] = launch_on(90, norm.rms_norm, x, x[0], 1e-6, x, None)
        found = launch_on(90, all_reduces, 3, hidden, dtype)
        found += launch_on(90, moe.add_and_norm, products_like(x), x, x[0], 1e-6)
        behind = [one.reduced_layouts for one in found if one.name.endswith("_norm_kernel")]
        name = f"rows of {hidden} in {dtype} lie behind all-reduces and experts as in a norm alone"
        layouts = alone.reduced_layouts
        check(name, len(layouts) > 0 and behind == 4 * [layouts])
        codes = QuantiseReduction.of_dtype(dtype, E4M3, 128)
        coded = launch_on(90, norm.rms_norm, x, x[0], 1e-6, x, None, codes=codes)
        coded += launch_on(90, moe.add_and_norm, products_like(x), x, x[0], 1e-6, codes)
        behind = [one.reduced_layouts for one in coded]
        name = f"rows of {hidden} in {dtype} whose codes are written, too, lie as others in a norm"
        check(name, [found[: len(layouts)] for found in behind] == 2 * [layouts] and all(map(len, behind)))


def check_every_gluon_kernel() -> None:
    """Every variant that a launcher may ask for."""
    for size, dtype in itertools.product(sm90.PREFILL_SCHEDULES, HALVES):
        for page in (16, 32, 64, 128):
            check_sm90_attention(Heads(8, 2, size, dtype), page, True)
            check_sm90_attention(Heads(8, 2, size, dtype), page, True, in_codes=True)
        for group in (1, 2, 3, 7, 8, 16, 32):
            check_sm90_attention(Heads(2 * group, 2, size, dtype), 64, True)
    check_all("narrow GEMMs", launch_on(90, narrow_gemms, HALVES), True)
    check_all("products of e4m3 in Gluon", launch_on(90, narrow_codes), True)


def sampling() -> None:
    logits = torch.zeros(3, 152_000)
    rows = torch.zeros(24, dtype=torch.int64)
    for width in (2, 4, 8, 16):
        accept(rows, rows, torch.tensor([0, 1, 3], dtype=torch.int32), width)
    ranking.top_and_ranks(logits, 20, torch.zeros(3, dtype=torch.int64))
    ranking.first(logits)
    ranking.first(logits.bfloat16())
    k, p = torch.full((3,), 50), torch.full((3,), 0.5)
    for filters in ((k, p), (k, None), (None, p)):
        top_k_top_p(logits, *filters)


def more_rows() -> None:
    """Dtypes, fused additions, heads side by side and gradients, which a start of a server needs none of."""
    for dtype, length in itertools.product((torch.bfloat16, torch.float32), (64, 128, 5120)):
        x = torch.zeros(2, length, dtype=dtype)
        norm.rms_norm(x, x[0], 1e-6, x, None)
        norm.rms_norm(x, x[0], 1e-6, None, 7)
        norm.gated_rms_norm(x, x[0], 1e-6, x, "silu", True)
        norm.rms_norm(
            torch.zeros(3, 5 * length, dtype=dtype)[:, :-length].unflatten(1, (-1, length)), x[0], 1e-6, None, None
        )
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for length in (100, 5120, 300_000):
            x = torch.zeros(2, length, dtype=dtype)
            reduce.sum(x, -1)
            if dtype != torch.float64:
                softmax.softmax_backward(x, x, -1, dtype)
                softmax.log_softmax_backward(x, x, -1, dtype)


def flex(heads: Heads, page: int, count: int = 9, **options: object) -> None:
    """The kernels around FlexAttention, which itself is not compiled."""
    flex_cuda._compiled = lambda scores: lambda query, *_: (query, query[..., 0].float())
    chunks = [Chunk(Request(heads, length, 1), max(0, length - count), length) for length in (300, 20)]
    query, keys, values, *rest = paged(chunks, page)
    cache = torch.cat([keys, values], -1).transpose(1, 2).contiguous().transpose(1, 2)
    attention_package.IMPLEMENTATIONS = (*attention_package.IMPLEMENTATIONS, "flex_cuda")
    attention_package._MODULES["flex_cuda"] = ".flex.cuda"
    paged_attention(
        query, *cache.chunk(2, -1), *rest, scale=0.1, reduction=REDUCTION, implementation="flex_cuda", **options
    )


def sm90_attention_variants() -> None:
    for size, dtype in itertools.product(sm90.PREFILL_SCHEDULES, HALVES):
        for page in (16, 64, 128):
            launch_on(90, sm90_attention, Heads(8, 2, size, dtype), page)
            launch_on(90, sm90_attention, Heads(8, 2, size, dtype), page, in_codes=True)
        for in_codes in (False, True) if size == 128 else ():
            launch_on(90, sm90_attention, Heads(8, 2, size, dtype), 64, in_codes=in_codes, writes_codes=True)
    for group in (1, 3, 8, 32):
        launch_on(90, sm90_attention, Heads(2 * group, 2, 128, torch.bfloat16), 64)
    for size, group in itertools.product(sm90.PREFILL_SCHEDULES, (4, 7)):
        launch_on(90, sm90_verify_steps, Heads(2 * group, 2, size, torch.bfloat16), 64)


def triton_attention_variants() -> None:
    every_option = causal_options(8)
    for page, size in itertools.product((16, 64), (64, 128, 256)):
        launch_on(90, decode_and_prefill, Heads(8, 2, size, torch.bfloat16), page)
        launch_on(90, decode_and_prefill, Heads(8, 2, size, torch.bfloat16), page, in_codes=True)
        launch_on(90, decode_and_prefill, Heads(8, 2, size, torch.bfloat16), page, in_codes=True, of_tokens=True)
    launch_on(90, decode_and_prefill, Heads(8, 2, 128, torch.bfloat16), 16, writes_codes=True)
    for name, value in every_option.items():
        launch_on(90, decode_and_prefill, Heads(8, 2, 128, torch.bfloat16), 16, **{name: value})
    launch_on(90, decode_and_prefill, Heads(8, 2, 256, torch.bfloat16), 16, **every_option)
    launch_on(90, both_directions, Heads(8, 2, 128, torch.bfloat16))
    launch_on(90, decode_and_prefill, Heads(8, 2, 256, torch.float32), 16)
    for dtype in (torch.bfloat16, torch.float32):
        launch_on(90, decode_and_prefill, Heads(8, 2, 512, dtype), 16)
    launch_on(90, decode_and_prefill, Heads(8, 2, 512, torch.bfloat16), 64, in_codes=True)


def flex_variants() -> None:
    launch_on(90, flex, Heads(8, 2, 128, torch.bfloat16), 64)
    launch_on(90, flex, Heads(6, 2, 64, torch.bfloat16), 128, sliding_window=100)
    launch_on(90, flex, Heads(8, 2, 128, torch.bfloat16), 64, sinks=torch.zeros(8))


def linear_variants() -> None:
    launch_on(90, narrow_gemms, HALVES)
    launch_on(90, narrow_codes)
    launch_on(90, gemms)


def all_reduces(count: int, hidden: int, dtype: torch.dtype, ranks: int = 2, tree: bool = False) -> None:
    """The sum over ranks of a partial result of so many tokens, alone and with a norm behind it if that is one launch,
    and sent in one part; the other ranks are not there. And of slices.
    """
    x, addresses = torch.zeros(count, hidden, dtype=dtype), torch.zeros(ranks, dtype=torch.int64)
    memory, in_one_part = torch.zeros(2 * ranks * x.nbytes + 1024, dtype=torch.uint8), CopySchedule(0, x.nbytes, 1)
    add = AllReduce(ranks, lambda _: Peers(1, ranks * [memory], addresses), tree=tree, copies=in_one_part)
    add(x)
    add.expect(x.nbytes)
    add.add_and_norm(add.send(lambda rows: rows, x), x, x[0], 1e-6)
    if add._channels[0].holds_rows(x, NormReduction.of_device("cuda", hidden, dtype)):
        add.add_and_norm(x, x, x[0], 1e-6)
        add.add_and_norm(products_like(x), x, x[0], 1e-6)
    all_reduce.add_ranks(torch.zeros(ranks, count, hidden, dtype=dtype), tree)


def every_all_reduce() -> None:
    for count, hidden, dtype in itertools.product((1, 300), (77, 4096), (torch.bfloat16, torch.float32)):
        all_reduces(count, hidden, dtype)
        all_reduces(count, hidden, dtype, 4, True)


def every_gradient_of_attention() -> None:
    for size, dtype in itertools.product((64, 80, 128, 256), (*HALVES, torch.float32)):
        gradients_of_attention(Heads(8, 2, size, dtype), 100)


def row_variants() -> None:
    for launch in (rows, more_rows, sampling):
        launch_on(90, launch)


def delta_rule_variants() -> None:
    for launch in (delta_rules, channel_gates, state_spaces, partial(state_spaces, size=256)):
        launch_on(90, launch, 3, (*HALVES, torch.float32))


def exact_variants() -> None:
    for launch in EVERY_KIND.values():
        launch_on(90, launch)


VARIANTS = {
    "sm90": sm90_attention_variants,
    "triton": triton_attention_variants,
    "flex": flex_variants,
    "linear": linear_variants,
    "rows": row_variants,
    "all_reduce": partial(launch_on, 90, every_all_reduce),
    "attention_backward": partial(launch_on, 90, every_gradient_of_attention),
    "moe": partial(launch_on, 90, every_expert),
    "causal_conv": partial(launch_on, 90, convolutions, 3),
    "lora": partial(launch_on, 90, every_adapter),
    "delta_rule": delta_rule_variants,
    "kv_cache": partial(launch_on, 90, written_caches, 3),
    "quantise": partial(launch_on, 90, every_code),
    "scaled_linear": partial(launch_on, 90, every_product_of_e4m3),
    "formats": partial(launch_on, 90, decoded_weights),
    "exact": exact_variants,
}
"""By operation, what launches its kernels with all that they are specialised for, on a Hopper."""


def first_variants() -> None:
    """Variants of every kernel, fewer where there are many alike."""
    heads = Heads(32, 8, 128, torch.bfloat16)
    for options in ({}, {"in_codes": True}, {"writes_codes": True}):
        launch_on(90, sm90_attention, heads, 64, **options)
    launch_on(90, sm90_verify_steps, heads, 64)
    launch_on(90, sm90_packed, heads)
    launch_on(90, decode_and_prefill, heads, 16, sinks=torch.zeros(32))
    launch_on(90, decode_and_prefill, heads, 16, in_codes=True, of_tokens=True)
    launch_on(90, narrow_gemms, HALVES[:1], (PRODUCT, MatmulSpec(k_slices=2)), ONE_OF_ROWS)
    launch_on(90, narrow_gemms, HALVES[:1], (GATED,), GATED_TILES[:1])
    launch_on(90, narrow_codes, SM90_SCHEDULES[4:5])
    launch_on(90, gemms)
    for name, launch in VARIANTS.items():
        if name not in ("sm90", "triton", "linear"):
            launch()


@dataclass(frozen=True)
class Cell:
    """What some launches have compiled for a GPU, and what is wrong with it."""

    triton: str
    gpu: int
    name: str
    ir: str
    """Digest of the keys of its variants (:mod:`.variants`)."""
    ptx: str = ""
    """Digest of the PTX of its variants, without names."""
    kernels: list[dict[str, Any]] | None = None
    """Of each variant its name, bytes of shared memory, registers and bytes of stack of a thread, and instructions.
    None where nothing was compiled.
    """
    problems: list[str] = field(default_factory=list)


def every_size(dtype: torch.dtype) -> dict[str, Heads]:
    name = str(dtype).removeprefix("torch.")
    return {f"attention {name} {size}": Heads(8, 2, size, dtype) for size in (*range(64, 257, 16), 512)}


ATTENTION = {
    name: heads for dtype in (torch.bfloat16, torch.float16, torch.float32) for name, heads in every_size(dtype).items()
}
OPTIONS = {f"attention options {size}": Heads(8, 2, size, torch.bfloat16) for size in (64, 128, 256, 512)}
OVER_CODES = {"attention over e4m3 128": Heads(8, 2, 128, torch.bfloat16)}
HOPPER = {
    f"Hopper's attention {str(dtype).removeprefix('torch.')} {size}": Heads(8, 2, size, dtype)
    for size in sm90.PREFILL_SCHEDULES
    for dtype in HALVES
}


EXACT = "exact arithmetic"
"""And codes of eight bits, which have the same bits on every GPU, too."""


def cells_of(gpu: int) -> list[str]:
    """Names of all that there is to compile for a GPU; what is compiled the soonest and says the most comes first."""
    first = [f"attention bfloat16 {size}" for size in (64, 128, 256, 512)]
    names = [
        *first,
        "matmuls",
        "rows",
        "sampling",
        "around FlexAttention",
        EXACT,
        "experts",
        "adapters",
        "all_reduce",
        "gradients of attention",
        *OPTIONS,
        *OVER_CODES,
        "attention float32 256",
        *ATTENTION,
    ]
    if gpu == 90:
        names += ["Hopper's narrow matmuls", *HOPPER]
    return list(dict.fromkeys(names))


def more_gemms() -> None:
    """What :func:`gemms` has not: fp16, biases, operands turned, TF32."""
    gpu = Gpu.of(0)
    a, weight = (torch.zeros(size, 512, dtype=torch.float16) for size in (200, 896))
    reduction = LinearReduction.of_device("cuda", 896, 512, torch.float16)
    out, bias = torch.empty(200, 896, dtype=torch.float16), torch.zeros(896, dtype=torch.float16)
    for tile in schedule.tma_tiles(2, gpu) if gpu.has_tma else ():
        linear.gemm_tma(a, weight.t(), bias, out, reduction, tile)
    for tile in {schedule.ptr_tile(m, n, torch.float16, gpu) for m, n in itertools.product((1, 64, 8192), (64, 8192))}:
        linear.gemm_ptr(a[None], weight.t()[None], bias, out[None], reduction, tile)
    if gpu.has_tma:
        turned = [torch.zeros(512, size, dtype=torch.float16).t() for size in (200, 896)]
        linear.gemm_tma(turned[0], turned[1].t(), None, out, reduction, schedule.tma_tile(200, 896, 512, 2, gpu))
    reduction = replace(LinearReduction.of_device("cuda", 896, 512, torch.float32), precision="tf32")
    for tile in schedule.ptr_tiles(torch.float32):
        linear.gemm_ptr(a.float()[None], weight.float().t()[None], None, out.float()[None], reduction, tile)


def describe(one: Compiled) -> dict[str, Any]:
    registers, stack = one.resources()
    spills = one.spills_in_loops() if stack else 0
    return {
        "kernel": one.name, "shared": one.shared, "registers": registers, "stack": stack, "spills_in_loops": spills,
        "instructions": " ".join(one.instructions),
    }  # fmt: skip


def is_of_halves(one: Compiled) -> bool:
    """Whether a matmul's operands have 16 bits."""
    return any("16" in str(kind) for kind in one.kernel.src.signature.values())


def digest(parts: Iterable[str]) -> str:
    """Of a set of texts: 12 hexadecimal digits."""
    return hashlib.sha256("\0".join(sorted({*parts})).encode()).hexdigest()[:12]


def compile_cell(gpu: int, name: str, known: str | None = None) -> Cell:
    """Compile what a cell names for a GPU, and look for problems; nothing where its IR has the digest that is known."""
    problems: list[str] = []
    found: list[Compiled] = []
    attention: list[tuple[Heads, int, list[Compiled], bool]] = []

    def launch(function: Callable[..., None], *args: object, **options: object) -> list[Compiled]:
        before = len(compiled)
        try:
            launch_on(gpu, function, *args, **options)
        except Exception as error:  # whatever a compiler makes of a kernel
            problems.append(f"does not compile: {reason(error)}")
        found.extend(compiled[before:])
        return compiled[before:]

    if heads := ATTENTION.get(name):
        by_tma = attends_by_tma(gpu // 10) and heads.dtype.itemsize == 2  # else pages of all sizes are read alike
        for page in (16, 64) if by_tma else (16,):
            attention.append((heads, page, launch(decode_and_prefill, heads, page), False))
    elif heads := OVER_CODES.get(name):
        for page, of_tokens in itertools.product((16, 64) if attends_by_tma(gpu // 10) else (16,), (False, True)):
            launched = launch(decode_and_prefill, heads, page, in_codes=True, of_tokens=of_tokens)
            attention.append((heads, page, launched, True))
    elif heads := OPTIONS.get(name):
        every_option = causal_options(8)
        attention.append((heads, 16, launch(decode_and_prefill, heads, 16, **every_option), False))
        attention.append((heads, 1, launch(both_directions, heads), False))
    elif heads := HOPPER.get(name):
        for page in (16, 32, 64, 128):
            launch(sm90_attention, heads, page)
        for group in (1, 3, 8, 32):
            launch(sm90_attention, replace(heads, query=2 * group), 64)
        for group in (4, 7):
            launch(sm90_verify_steps, replace(heads, query=2 * group), 64)
    else:
        for function in OTHERS[name]:
            launch(function)
    ir = digest([*(one.kernel.key for one in found), *problems])
    if ir == known:
        return Cell(triton.__version__, gpu, name, ir)
    for one in [*found]:
        try:
            _ = one.kernel.compiled
        except Exception as error:  # as above
            problems.append(f"{one.name} does not compile: {reason(error)}")
            found.remove(one)
    for heads, page, launched, in_codes in attention:
        problems += problems_of_attention(gpu, heads, page, [one for one in launched if one in found], in_codes)
    kernels = [describe(one) for one in found]
    limit = SHARED_MEMORY[gpu]
    problems += [f"{one.name} takes {one.shared} bytes of shared memory" for one in found if one.shared > limit]
    if name == "matmuls" and has_tcgen05(gpu // 10):
        halves = {kind for one in found if is_of_halves(one) for kind in one.instructions}
        if len(halves) > 1:
            problems.append(f"16-bit tiles get {' and '.join(sorted(halves))}, whose bits may differ")
    of_e4m3 = [one for one in found if one.name == scaled_linear.scaled_linear_e4m3_kernel.__name__]
    kinds = {kind for one in of_e4m3 for kind in one.instructions}
    if of_e4m3 and not all(kind.startswith(FP8_MMA[divmod(gpu, 10)].split()[1]) for kind in kinds):
        problems.append(f"tiles of e4m3 get {' and '.join(sorted(kinds))}, whose bits differ")
    if gpu == 90 and any(one.promotions != 1 for one in of_e4m3):
        problems.append("a sum of 128 products of e4m3 is not promoted once")
    if name == EXACT:
        problems += [f"{one.name} has {what}" for one in found for what in forbidden(one.kernel.asm["ptx"], one.name)]
    ptx = digest(stripped(one.kernel.asm["ptx"], one.name) for one in found)
    return Cell(triton.__version__, gpu, name, ir, ptx, kernels, list(dict.fromkeys(problems)))


OTHERS = {
    "matmuls": (gemms, more_gemms, every_product_of_e4m3),
    "rows": (rows, more_rows),
    "sampling": (sampling,),
    "around FlexAttention": (lambda: flex(Heads(8, 2, 128, torch.bfloat16), 64),),
    "Hopper's narrow matmuls": (lambda: narrow_gemms(HALVES), narrow_codes),
    EXACT: (*EVERY_KIND.values(), every_code),
    "experts": (every_expert,),
    "adapters": (partial(adapters, 3, ranks=(16, 64)), partial(adapters, 300)),
    "all_reduce": (every_all_reduce,),
    "gradients of attention": (every_gradient_of_attention,),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group()
    group.add_argument("--more", action="store_true", help="more variants of each kind, all compiled")
    group.add_argument("--record", action="store_true", help="write what the variants are")
    group.add_argument("--first", action="store_true", help="what the front end makes of each kind, and nothing more")
    group.add_argument("--gluon", action="store_true", help="every variant in Gluon, and what each takes")
    group.add_argument("--cells", nargs="*", metavar="GPU CELL", help="what cells take, a line of JSON each")
    group.add_argument("--names", nargs="+", type=int, metavar="GPU", help="names of the cells of GPUs")
    parser.add_argument(
        "--known", type=json.loads, default={}, metavar="JSON", help="of cells, the IR that need not be compiled"
    )
    parsed = parser.parse_args()
    if parsed.names:
        print(json.dumps({gpu: cells_of(gpu) for gpu in parsed.names}))
        return
    if parsed.cells is not None:
        compile_when_asked()
        compile_instead_of_running()
        for gpu in map(int, parsed.cells[:1] or SHARED_MEMORY):
            for name in parsed.cells[1:] or cells_of(gpu):
                print(json.dumps(asdict(compile_cell(gpu, name, parsed.known.get(name)))), flush=True)
                compiled.clear()
        return
    print("Triton", triton.__version__)
    if parsed.first:
        compile_when_asked()
        compile_instead_of_running()
        leave_out_alike()
        first_variants()
        print(f"{len(compiled)} variants")
        return
    if not parsed.gluon:
        global OUTCOMES
        finds = (
            Compiled, spills_in_loops, frees_one_place, reads_before_wait, waits_for_each, reduced_layouts, promotions,
            dot_operands,
        )  # fmt: skip
        OUTCOMES = Outcomes(RECORDED, finds, anew=parsed.more)
        compile_when_asked()
    compile_instead_of_running()
    if parsed.gluon:
        check_every_gluon_kernel()
    else:
        check_some(parsed.more)
        check(f"{RECORDED.name} says what the compiler does{OUTCOMES.wrong or ''}", not OUTCOMES.wrong)
        print(f"{len(OUTCOMES.compiled)} of {OUTCOMES.counted} variants were compiled")
    if parsed.record:
        OUTCOMES.write()


if __name__ == "__main__":
    main()

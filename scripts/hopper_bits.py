"""Compare the definition of a Hopper's usual arithmetic (``ops/hopper``) with a Hopper, operation by operation.

usage: python -m scripts.hopper_bits FOLDER                            on a GPU of compute capability 9.0; 80 s
       python -m scripts.hopper_bits FOLDER --add --only attention     adds to what this package has confirmed
       python -m scripts.hopper_bits FOLDER --add --only families      those that Gemma and windows add

It needs vLLM for ``noise``, ``gelu_and_mul`` and ``heads_of_256`` alone.
FOLDER gets ``tables.xz`` (the special functions, recorded here, 1 to 2 MB), ``samples.npz`` (operands and results of
each operation, below 2 MB) and ``confirmed.json``: which operations had the definition's bits in every value. The
table that it prints says how many values of each case were equal, and for the first different ones both bits. Copied to
``vllm_batch_invariant/ops/hopper/``, ``tables.xz`` and ``confirmed.json`` open ``receipt verify --without-engine``.
"""

import argparse
import json
import math
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import triton
import triton.language as tl

from vllm_batch_invariant.ops.exact.definition import Floats, bf16, expert_sum, fp32, from_bits, scaled
from vllm_batch_invariant.ops.hopper import confirmed, definition, known_answers, sampling
from vllm_batch_invariant.ops.hopper.confirmed import ALL, OF_CODES, OF_EXPERTS, OF_FAMILIES, Confirmed
from vllm_batch_invariant.ops.hopper.tables import ENTRIES, Tables, ideal, packed, recorded
from vllm_batch_invariant.provenance import installed

_GROUPS = {"families": OF_FAMILIES}
_SHOWN = 3
_MOST_SAMPLES = 1_900_000
"""Bytes."""
EX2_FTZ, EX2, RCP = "ex2.approx.ftz.f32 $0, $1;", "ex2.approx.f32 $0, $1;", "rcp.approx.ftz.f32 $0, $1;"


@triton.jit
def _instruction_kernel(x_ptr, out_ptr, ASM: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    y = tl.inline_asm_elementwise(ASM, "=f,f", [tl.load(x_ptr + offs)], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(out_ptr + offs, y)


@triton.jit
def _function_kernel(x_ptr, y_ptr, out_ptr, NAME: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs)
    if NAME == "exp":
        y = tl.exp(x)
    elif NAME == "exp2":
        y = tl.exp2(x)
    elif NAME == "log":
        y = tl.log(x)
    else:
        y = x / tl.load(y_ptr + offs)
    tl.store(out_ptr + offs, y)


@dataclass
class Comparison:
    """What the GPU has (bf16 or fp32) and what the definition has, of one case of one operation."""

    operation: str
    case: str
    gpu: torch.Tensor
    defined: Floats
    operands: dict[str, np.ndarray] = field(default_factory=dict)
    """To be kept with the GPU's result: bf16 as uint16."""


@dataclass
class Gpu:
    """Where it runs; a device of another name is for trying the script out."""

    device: str = "cuda"

    def put(self, x: np.ndarray, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(dtype).to(self.device)

    def instruction(self, x: Floats, asm: str) -> Floats:
        """Of fp32, as many as a multiple of 1024."""
        given = self.put(x, torch.float32)
        out = torch.empty_like(given)
        _instruction_kernel[(len(x) // 1024,)](given, out, ASM=asm, BLOCK=1024, enable_fp_fusion=False)
        return out.cpu().numpy()

    def function(self, name: str, x: Floats, y: Floats | None = None) -> torch.Tensor:
        given, other = self.put(x, torch.float32), self.put(x if y is None else y, torch.float32)
        out = torch.empty_like(given)
        _function_kernel[(len(x) // 1024,)](given, other, out, NAME=name, BLOCK=1024, enable_fp_fusion=False)
        return out


def record(gpu: Gpu) -> Tables:
    """The tables of this GPU."""
    fractions = (np.arange(ENTRIES) / ENTRIES).astype(fp32)
    exp2 = gpu.instruction(fractions, EX2_FTZ).astype(np.float64) * 2.0**23
    rcp = gpu.instruction(fp32(1) + fractions, RCP).astype(np.float64) * 2.0**24
    return Tables(exp2.astype(np.int32), rcp.astype(np.int32))


def _halves(x: np.ndarray) -> np.ndarray:
    return (np.ascontiguousarray(x, fp32).view(np.uint32) >> 16).astype(np.uint16)


def numbers(rng: np.random.Generator, *shape: int) -> Floats:
    return bf16(rng.standard_normal(shape).astype(fp32))


def functions(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    """The special functions outside what was recorded."""
    count, tables = 1 << 18, _tables()

    def drawn(low: float, high: float) -> Floats:
        """With uniform exponents and both signs."""
        size = np.exp2(rng.uniform(low, high, count))
        return (size * rng.choice((-1.0, 1.0), count)).astype(fp32)

    wide, edges = drawn(-30, 7.3), rng.uniform(-152, 130, count).astype(fp32)
    edges[:8] = 0.0, -0.0, -126.0, -126.00001, -149.0, 128.0, -np.inf, np.inf
    for name, x in (("wide", wide), ("edges", edges)):
        found = torch.from_numpy(gpu.instruction(x, EX2_FTZ))
        yield Comparison("ex2.approx.ftz", name, found, definition.ex2_ftz(x, tables))
        yield Comparison("ex2.approx", name, torch.from_numpy(gpu.instruction(x, EX2)), definition.ex2(x, tables))
        yield Comparison("tl.exp2 (ftz or not?)", name, gpu.function("exp2", x), definition.ex2_ftz(x, tables))
        yield Comparison("tl.exp", name, gpu.function("exp", x), definition.exp(x, tables))
    x = drawn(-125, 125)
    x[:4] = 1, -1, np.inf, 2.0**-126
    yield Comparison("rcp.approx.ftz", "wide", torch.from_numpy(gpu.instruction(x, RCP)), definition.rcp(x, tables))
    a, b = drawn(-140, 127.9), drawn(-140, 127.9)
    yield Comparison("div.full", "wide", gpu.function("div", a, b), definition.divide(a, b, tables))
    a, b = drawn(-20, 20), drawn(-20, 20)
    yield Comparison("div.full", "usual", gpu.function("div", a, b), definition.divide(a, b, tables))
    x = np.abs(drawn(-149, 127.9))
    x[:4] = 0, 1, np.inf, 2.0**-149
    yield Comparison("tl.log", "wide", gpu.function("log", x), definition.ln(x))
    x = rng.uniform(1, 200_000, count).astype(fp32)
    yield Comparison("tl.log", "sums", gpu.function("log", x), definition.ln(x))


def operands(rng: np.random.Generator, m: int, n: int, k: int) -> Iterator[tuple[str, Floats, Floats]]:
    """Kinds of operands of a matmul, [M, K] and [N, K]."""

    def of_exponents(rows: int, low: float, high: float) -> Floats:
        return bf16((rng.standard_normal((rows, k)) * np.exp2(rng.uniform(low, high, (rows, k)))).astype(fp32))

    a, b = numbers(rng, m, k), numbers(rng, n, k)
    yield "normal", a, b
    large, small = a.copy(), b.copy()
    large[:, ::37] *= 64
    small[:, ::53] *= fp32(2.0**-9)
    yield "large and small channels", large, small
    cancelling, same = a.copy(), b.copy()
    cancelling[:, 1::2] = -cancelling[:, ::2][:, : k // 2]
    same[:, 1::2] = same[:, ::2][:, : k // 2]
    same[:, ::5] *= fp32(1 + 2.0**-7)
    yield "cancelling", cancelling, bf16(same)
    yield "one sign", np.abs(a), np.abs(b)
    yield "24 binary orders", of_exponents(m, -12, 12), of_exponents(n, -12, 12)
    yield "100 binary orders", of_exponents(m, -30, 30), of_exponents(n, -20, 20)
    tiny, huge = of_exponents(m, -133, -120), of_exponents(n, 90, 120)
    yield "subnormal times huge", tiny, huge
    yield "subnormal results", of_exponents(m, -80, -60), of_exponents(n, -80, -60)
    yield "subnormal products", of_exponents(m, -133, -110), of_exponents(n, -20, -5)
    yield "overflow", of_exponents(m, 58, 64), of_exponents(n, 58, 64)
    zeros = np.where(rng.random((m, k)) < 0.7, fp32(0), of_exponents(m, -40, -20))
    yield "zero times huge", zeros, np.where(zeros[:1] == 0, of_exponents(n, 60, 120), of_exponents(n, -40, -20))
    signed = np.where(rng.random((m, k)) < 0.5, fp32(-0.0), fp32(0))
    yield "signed zeros", signed, b
    some = a.copy()
    some[1, 3], some[2, 5], some[3, :2], some[4, 0] = np.inf, np.nan, (np.inf, -np.inf), -np.inf
    other = b.copy()
    other[1, 3], other[2] = 0, np.abs(other[2])
    yield "infinities and NaN", some, other


def matmuls(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    from vllm_batch_invariant.ops.linear import triton_gemm
    from vllm_batch_invariant.ops.linear.k_slices import by_mm
    from vllm_batch_invariant.ops.linear.reduction import LinearReduction
    from vllm_batch_invariant.ops.linear.schedule import GATED_TILES, NARROW_TILES
    from vllm_batch_invariant.ops.linear.spec import GATED, MatmulSpec

    for m, n, k in ((64, 64, 96), (16, 32, 520)):
        for kind, a, b in operands(rng, m, n, k):
            found = triton_gemm.accumulate(gpu.put(a), gpu.put(b).t())
            with np.errstate(all="ignore"):
                defined = definition.mma(a, b)
            kept = {"a": _halves(a), "b": _halves(b)} if k == 96 else {}
            yield Comparison("matmul", f"{kind}, fp32, {m}x{n}x{k}", found, defined, kept)
    for m, n, k in ((3, 64, 12_288), (200, 128, 4096), (17, 128, 4864)):
        a, b, bias = numbers(rng, m, k), bf16(numbers(rng, n, k) * fp32(k**-0.5)), numbers(rng, n)
        on = [gpu.put(one) for one in (a, b, bias)]
        product = definition.mma(a, b)
        yield Comparison("matmul", f"TMA, {m}x{n}x{k}", triton_gemm.mm(on[0], on[1].t()), bf16(product))
        yield Comparison("matmul", f"pointers, {m}x{n}x{k}", triton_gemm.mm_ptr(on[0], on[1].t()), bf16(product))
        biased = triton_gemm.mm(on[0], on[1].t(), on[2])
        yield Comparison("matmul", f"TMA, bias, {m}x{n}x{k}", biased, bf16(product + bias))
        yield Comparison("torch.mm, may split K", f"{m}x{n}x{k}", on[0] @ on[1].t(), bf16(product))
        if k == 4864:
            found = by_mm(triton_gemm.mm)(*on[:1], on[1].t(), MatmulSpec(k_slices=2))
            yield Comparison("matmul", f"two slices, {m}x{n}x{k}", found, definition.linear(a, b, k_slices=2))
            out = torch.empty(m, n, dtype=torch.bfloat16, device=gpu.device)
            reduction = LinearReduction.of_device("cuda", n, k, torch.bfloat16)
            found = triton_gemm.gemm_sm90_swap_ab(on[0], on[1].t(), None, out, reduction, NARROW_TILES[4])
            yield Comparison("matmul", f"narrow, {m}x{n}x{k}", found, bf16(product))
            out = torch.empty(m, n // 2, dtype=torch.bfloat16, device=gpu.device)
            found = triton_gemm.gemm_sm90_swap_ab(on[0], on[1].t(), None, out, reduction, GATED_TILES[3], spec=GATED)
            yield Comparison(
                "silu_and_mul", "behind a matmul", found, definition.silu_and_mul(bf16(product), _tables())
            )


_recorded: list[Tables] = []


def _tables() -> Tables:
    return _recorded[0]


def norms(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    from vllm_batch_invariant.ops.norm import cuda
    from vllm_batch_invariant.ops.norm.reduction import NormReduction

    for length in (64, 128, 576, 1024, 2048, 4096, 5120):
        x, residual = (numbers(rng, 33, length) * np.exp2(rng.integers(-3, 4, (33, 1))).astype(fp32) for _ in range(2))
        x[1], x[2, ::2], residual[2] = 0, 100, -residual[2]
        residual[1] = 0
        weight = bf16(fp32(1) + numbers(rng, length) * fp32(0.1))
        reduction = NormReduction.of_device("cuda", length, torch.bfloat16)
        on = [gpu.put(one) for one in (x, weight, residual)]
        out, kept = cuda.rms_norm(on[0], on[1], 1e-6, on[2], None)
        defined = definition.rms_norm(x, weight, 1e-6, residual, reduction)
        few = {"x": _halves(x[:3]), "weight": _halves(weight), "residual": _halves(residual[:3])}
        yield Comparison("rms_norm", f"{length}, residual", out, defined[0], few if length == 4096 else {})
        yield Comparison("rms_norm", f"{length}, sum with residual", kept, defined[1])
        if length in (128, 4096):
            found = cuda.rms_norm(on[0], on[1], 1e-5, None, None)
            yield Comparison("rms_norm", f"{length}", found, definition.rms_norm(x, weight, 1e-5, None, reduction)[0])


def rotations(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    from vllm_batch_invariant.ops.norm.reduction import NormReduction
    from vllm_batch_invariant.ops.norm_rotary import norm_rotary

    llama = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for size, base, scaling in ((128, 1e6, {}), (64, 1e4, {}), (128, 5e5, {}), (64, 5e5, llama), (128, 1e4, {})):
        frequencies, found = _angles(gpu, size, base, scaling)
        defined = definition.inverse_frequencies(size, base, scaling, _tables())
        name = f"{size}, {base:.0f}{', Llama 3' if scaling else ''}"
        yield Comparison("rotary_table", f"frequencies, {name}", frequencies, defined, {})
        angles = frequencies.float().cpu().numpy()
        yield Comparison(
            "rotary_table", f"angles of the GPU's frequencies, {name}", found, definition.rotary_table(4096, angles)
        )
        yield Comparison("rotary_table", f"bf16, {name}", found, definition.rotary_table(4096, defined))
    for heads, kv_heads, size in ((8, 2, 128), (9, 3, 64)):
        qkv = numbers(rng, 40, (heads + 2 * kv_heads) * size)
        weights = [bf16(fp32(1) + numbers(rng, size) * fp32(0.1)) for _ in range(2)]
        positions = rng.integers(0, 4096, 40)
        table = bf16(np.cos(rng.uniform(0, 6, (4096, size))).astype(fp32))
        on = gpu.put(qkv), gpu.put(positions, torch.int64), *(gpu.put(one) for one in (*weights, table))
        q, k = norm_rotary(*on, 1e-6, heads, kv_heads)
        reduction = NormReduction.of_device("cuda", size, torch.bfloat16)
        parts = np.split(qkv.reshape(40, -1, size), (heads, heads + kv_heads), 1)
        for name, found, part, weight in (("queries", q, parts[0], weights[0]), ("keys", k, parts[1], weights[1])):
            normed, _ = definition.rms_norm(part, weight, 1e-6, None, reduction)
            turned = definition.rotate(normed, table[positions])
            yield Comparison("rotate", f"{name}, {heads}/{kv_heads}/{size}", found, turned.reshape(40, -1))


def _angles(gpu: Gpu, size: int, base: float, scaling: dict, factor: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Frequencies, and cosines and sines of 4096 positions, as vLLM computes them on its device."""
    exponents = torch.arange(0, size, 2, dtype=torch.float, device=gpu.device)
    found = 1.0 / (base ** (exponents / size))
    if scaling:
        low, high, length = (
            scaling[name] for name in ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        )
        wave = 2 * math.pi / found
        smooth = (length / wave - low) / (high - low)
        between = (1 - smooth) * found / scaling["factor"] + smooth * found
        longer = torch.where(wave > length / low, found / scaling["factor"], between)
        found = torch.where(wave < length / high, found, longer)
    positions = torch.arange(4096, dtype=torch.float, device=gpu.device)
    angles = torch.einsum("i,j -> ij", positions if factor == 1 else positions / factor, found)
    return found, torch.cat((angles.cos(), angles.sin()), dim=-1).to(torch.bfloat16)


def activations(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    from vllm_batch_invariant.ops.silu import cuda

    x = numbers(rng, 20, 2 * 1536) * np.exp2(rng.integers(-6, 8, (20, 1))).astype(fp32)
    x[0, :6] = 0, -0.0, 100, -100, 300, -300
    found = cuda.silu_and_mul(gpu.put(x))
    kept = {"x": _halves(x[:4])}
    yield Comparison("silu_and_mul", "20x1536", found, definition.silu_and_mul(x, _tables()), kept)


def logprobs(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    from vllm_batch_invariant.ops.ranking import cuda as ranking
    from vllm_batch_invariant.ops.softmax import cuda
    from vllm_batch_invariant.ops.softmax.reduction import SoftmaxReduction

    for length in (1000, 4096, 32_000, 128_256, 151_936):
        logits = numbers(rng, 6, length) * np.array([[0.1], [1], [4], [8], [16], [2]], fp32)
        logits[1, 5] = -np.inf
        logits[5, 7] = logits[5, 100] = logits[5].max() + 1
        logits = bf16(logits)
        reduction = SoftmaxReduction.of_device("cuda", length, torch.float32)
        found = cuda.log_softmax(gpu.put(logits), -1, dtype=torch.float32)
        with np.errstate(invalid="ignore"):
            defined = definition.log_softmax(logits, reduction, _tables())
        yield Comparison(
            "log_softmax", f"{length}", found, defined, {"x": _halves(logits[:2])} if length < 5000 else {}
        )
        first = ranking.first(gpu.put(logits))
        yield Comparison("argmax", f"{length}", first.float(), logits.argmax(-1).astype(fp32))


def filters(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    from vllm_batch_invariant.ops.top_k_top_p import cuda

    logits = numbers(rng, 8, 151_936) * np.array([0.1, 1, 2, 4, 1, 2, 4, 8], fp32)[:, None]
    logits[1, 7] = logits[1, 100] = 9
    asked = [(0, 0.9), (50, 1.0), (40, 0.8), (0, 0.5), (1000, 0.95), (1, 0.3), (0, 1.0), (5, 0.999)]
    ks, ps = (
        gpu.put(np.array([k for k, _ in asked]), torch.int32),
        gpu.put(np.array([p for _, p in asked]), torch.float32),
    )
    found = cuda.top_k_top_p(gpu.put(logits, torch.float32), ks, ps)
    defined = [sampling.top_k_top_p(row, k, p, _tables()) for row, (k, p) in zip(logits, asked, strict=True)]
    yield Comparison("top_k_top_p", "151936", found, np.stack(defined))


def noises(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    """Of vLLM's second model runner, if vLLM is here."""
    try:
        from scripts.hopper_noise import draws, noise
    except ImportError as error:
        print(f"skipped: noise, because of {error}", flush=True)
        return
    for seed, position in ((7, 299), (-3, 5), (2**62, 40_000)):
        found = noise(seed, position, 151_936, gpu.device)
        defined = sampling.noise(seed, position, np.arange(151_936))
        yield Comparison("noise", f"seed {seed}, position {position}", found, defined)
    logits, seeds = numbers(rng, 40, 32_000) * fp32(2), rng.integers(-(2**63), 2**63 - 1, 40)
    positions, temperature = rng.integers(0, 2000, 40), fp32(0.7)
    found = draws(gpu.put(logits, torch.float32), 0.7, seeds, positions)
    defined = [
        sampling.draw(row, temperature, 0, 1.0, int(seed), int(position), _tables())
        for row, seed, position in zip(logits, seeds, positions, strict=True)
    ]
    yield Comparison("noise", "tokens that are drawn", found.float(), np.array(defined, fp32))


def attentions(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention

    reduction = AttentionReduction.of_device("cuda")
    for heads, kv_heads, size, keys, new in (
        (8, 2, 128, 300, 300),
        (8, 2, 128, 300, 1),
        (8, 2, 128, 2900, 2900),
        (9, 3, 64, 700, 200),
        (9, 3, 64, 2500, 1),
        (8, 2, 128, 40_000, 1),
    ):
        for name, size_of_scores in (("", 1.0), (", peaked", 6.0)):
            if size_of_scores > 1 and keys > 3000:
                continue
            q = bf16(numbers(rng, new, heads, size) * fp32(size_of_scores))
            k, v = numbers(rng, keys, kv_heads, size), numbers(rng, keys, kv_heads, size)
            found = _attend(gpu, paged_attention, reduction, q, k, v)
            # The definition of all rows takes long; the last ones see every key.
            some = min(new, max(1, (1 << 19) // (keys * heads)))
            defined = definition.attention(q[-some:], k, v, size**-0.5, _tables())
            kept = {"q": _halves(q), "k": _halves(k), "v": _halves(v)} if keys == 300 and new == 1 else {}
            case = f"{heads}/{kv_heads}/{size}, {new} of {keys}{name}"
            yield Comparison("attention", case, found[-some:], defined, kept)


def _attend(
    gpu: Gpu, paged_attention: Callable, reduction: object, q: Floats, k: Floats, v: Floats, **spec: object
) -> torch.Tensor:
    page, keys = 16, len(k)
    pages = -(-keys // page)

    def cache(x: Floats) -> torch.Tensor:
        filled = np.pad(x, ((0, pages * page - keys), (0, 0), (0, 0)))
        return gpu.put(filled.reshape(pages, page, *x.shape[1:]).transpose(0, 2, 1, 3))

    table = torch.arange(pages, dtype=torch.int32, device=gpu.device)[None]
    lengths, starts = (torch.tensor(one, dtype=torch.int32, device=gpu.device) for one in ([keys], [0, len(q)]))
    return paged_attention(
        gpu.put(q), cache(k), cache(v), table, lengths, starts,
        reduction=reduction, scale=q.shape[-1] ** -0.5, implementation="triton", **spec,
    )  # fmt: skip


def scores(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    """Attention with heads of 256, windows and soft caps, of a prefill and of tokens that are decoded."""
    from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention
    from vllm_batch_invariant.ops.hopper import cpu

    reduction = AttentionReduction.of_device("cuda")
    for operation, heads, size, spec in (
        ("heads_of_256", (8, 4), 256, {}),
        ("windows", (8, 2), 128, {"sliding_window": 200}),
        ("windows", (8, 4), 256, {"sliding_window": 512}),
        ("windows", (9, 3), 64, {"sliding_window": 1}),
        ("capped_scores", (8, 4), 256, {"logits_soft_cap": 50.0}),
        ("capped_scores", (8, 2), 128, {"logits_soft_cap": 3.0, "sliding_window": 100}),
    ):
        for keys, new in ((300, 300), (700, 1), (2900, 1000), (2900, 7), (5000, 1)):
            q, k, v = (numbers(rng, rows, count, size) for rows, count in ((new, heads[0]), *((keys, heads[1]),) * 2))
            q = bf16(q * fp32(3))
            found = _attend(gpu, paged_attention, reduction, q, k, v, **spec)
            how = spec.get("sliding_window"), spec.get("logits_soft_cap")
            defined = cpu.attention(q, k, v, size**-0.5, _tables(), *how)
            kept = {"q": _halves(q[:, :2]), "k": _halves(k[:, :1]), "v": _halves(v[:, :1])} if keys == 700 else {}
            yield Comparison(operation, f"{heads[0]}/{heads[1]}/{size}, {new} of {keys}, {spec}", found, defined, kept)


def families(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    """What Gemma adds, but for attention."""
    from vllm_batch_invariant.ops.norm import cuda
    from vllm_batch_invariant.ops.norm.reduction import NormReduction

    for length in (256, 640, 1152, 3584):
        x, residual, weight = numbers(rng, 33, length), numbers(rng, 33, length), numbers(rng, length)
        reduction = NormReduction.of_device("cuda", length, torch.bfloat16)
        on = [gpu.put(one) for one in (x, weight, residual)]
        out, kept = cuda.rms_norm(on[0], on[1], 1e-6, on[2], None, adds_one=True)
        defined = definition.rms_norm(x, weight, 1e-6, residual, reduction, adds_one=True)
        few = {"x": _halves(x[:3]), "weight": _halves(weight), "residual": _halves(residual[:3])}
        yield Comparison("norm_plus_one", f"{length}, residual", out, defined[0], few if length == 1152 else {})
        yield Comparison("norm_plus_one", f"{length}, sum with residual", kept, defined[1])
        alone = cuda.rms_norm(on[0], on[1], 1e-6, None, None, adds_one=True)
        defined = definition.rms_norm(x, weight, 1e-6, None, reduction, adds_one=True)
        yield Comparison("norm_plus_one", f"{length}", alone, defined[0])
    for hidden in (640, 1152, 3584):
        x, factor = numbers(rng, 50, hidden), torch.tensor(hidden**0.5, dtype=torch.bfloat16, device=gpu.device)
        yield Comparison("scaled_embeddings", f"{hidden}", gpu.put(x) * factor, scaled(x, float(factor)))
    for soft_cap in (30.0, 7.0):
        logits = bf16(numbers(rng, 5, 30_000) * fp32(12))
        logits[0, :5] = 0, -0.0, np.inf, -np.inf, 1e-39
        found = torch.tanh(gpu.put(logits) / soft_cap) * soft_cap
        yield Comparison("capped_logits", f"{soft_cap:g}", found, definition.capped(logits, soft_cap, _tables()))
    for size, base, factor in ((256, 1e6, 8.0), (128, 5e5, 3.0)):
        frequencies = definition.inverse_frequencies(size, base, {}, _tables())
        found = _angles(gpu, size, base, {}, factor)[1]
        yield Comparison(
            "linear_angles", f"{size}, {factor:g}", found, definition.rotary_table(4096, frequencies, factor)
        )


def gelus(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    """vLLM's kernel, of every gate that bf16 has, by vectors and by single elements."""
    from vllm import _custom_ops as _  # noqa: F401 - loads the kernels

    every = from_bits(np.arange(1 << 16, dtype=np.uint16)).reshape(64, 1024)
    usual = bf16((rng.standard_normal((256, 2046)) * 2).astype(fp32))
    for name, gate in (("every gate", every), ("usual, not in vectors", usual[:, :1023]), ("usual", usual[:, :1016])):
        x = np.concatenate((gate, numbers(rng, *gate.shape)), -1)
        x[0, -8:] = -0.0, 0, 1, -1, np.inf, -np.inf, 1e-39, np.nan
        on = gpu.put(x)
        out = torch.empty(gate.shape, dtype=torch.bfloat16, device=gpu.device)
        torch.ops._C.gelu_tanh_and_mul(out, on)
        kept = {"x": _halves(x[:4])} if name == "usual" else {}
        yield Comparison("gelu_and_mul", name, out, definition.gelu_and_mul(x, _tables()), kept)


def large_heads(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    """vLLM's rotation of heads of 256."""
    from vllm import _custom_ops

    q, k, positions = numbers(rng, 40, 4, 256), numbers(rng, 40, 1, 256), rng.integers(0, 4096, 40)
    table = bf16(np.cos(rng.uniform(0, 6, (4096, 256))).astype(fp32))
    on = [gpu.put(one.reshape(40, -1)) for one in (q, k)]
    _custom_ops.rotary_embedding(gpu.put(positions, torch.int64), *on, 256, gpu.put(table), True)
    for name, found, x in (("queries", on[0], q), ("keys", on[1], k)):
        turned = definition.rotate(x, table[positions]).reshape(40, -1)
        yield Comparison("heads_of_256", f"rotated {name}", found, turned)


def products_of_codes(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    """Of e4m3 in blocks: rows that are quantised, and every kind of product that a layer may be served by."""
    from vllm_batch_invariant.ops.linear.problem import ScaledProblem
    from vllm_batch_invariant.ops.quantise import quantise
    from vllm_batch_invariant.ops.scaled_linear import E4M3, GROUP, WGMMA, ScaledLinearReduction, cuda, scaled_linear
    from vllm_batch_invariant.ops.scaled_linear.library import operand_sets
    from vllm_batch_invariant.ops.scaled_linear.sm90_schedule import SM90_SCHEDULES

    x = numbers(rng, 300, 1152) * np.exp2(rng.integers(-30, 30, (300, 1))).astype(fp32)
    x[0], x[1, 5], x[2, ::128], x[3] = 0, 1e30, 1e-38, bf16(x[3] * fp32(2.0**-110))
    x[4, 130], x[5, 600], x[6, :128] = np.inf, np.nan, -0.0
    given = torch.from_numpy(bf16(x)).to(torch.bfloat16)
    found, defined = quantise(given.to(gpu.device), codes=E4M3, group=GROUP), quantise(given, codes=E4M3, group=GROUP)
    of_bits = [one[0].view(torch.uint8).float() for one in (found, defined)]
    yield Comparison("quantise", "codes", of_bits[0], of_bits[1].numpy())
    yield Comparison("quantise", "scales", found[1], defined[1].numpy())
    for m, n, k in ((5, 144, 640), (64, 256, 1024), (300, 272, 4096)):
        reduction = ScaledLinearReduction.of(k, torch.bfloat16, E4M3, True, WGMMA)
        sets = operand_sets(ScaledProblem(n, k, torch.bfloat16, 0), m, torch.device("cpu"))
        for kind, operands in zip(("cancelling", "normal", "one sign"), sets, strict=True):
            on = [one.to(gpu.device) for one in operands]
            bias = torch.from_numpy(numbers(rng, n)).to(torch.bfloat16)
            for own, name in ((None, ""), (bias, " and a bias")):
                made = scaled_linear(*operands, own, torch.bfloat16, mma=WGMMA).float().numpy()
                there = None if own is None else own.to(gpu.device)
                found = scaled_linear(*on, there, torch.bfloat16)
                yield Comparison("scaled_linear", f"{kind}{name}, as chosen, {m}x{n}x{k}", found, made)
                for number in (0, len(SM90_SCHEDULES) // 2, len(SM90_SCHEDULES) - 1):
                    found = cuda.scaled_linear(*on, there, reduction, SM90_SCHEDULES[number])
                    yield Comparison("scaled_linear", f"{kind}{name}, tile {number}, {m}x{n}x{k}", found, made)


def mixtures(gpu: Gpu, rng: np.random.Generator) -> Iterator[Comparison]:
    """Of a router and its experts: few tokens, of whose pairs a program finds its own, and many."""
    from vllm_batch_invariant.ops.hopper import cpu
    from vllm_batch_invariant.ops.moe import Experts, MoeReduction, moe, route
    from vllm_batch_invariant.ops.softmax.reduction import SoftmaxReduction

    for experts, top_k, renormalise in ((128, 8, True), (64, 8, False), (8, 2, True), (60, 4, True)):
        logits = numbers(rng, 200, experts) * fp32(3)
        logits[0], logits[1, 3] = 0, -np.inf
        logits[2, 5] = logits[2, 1] = logits[2].max() + 1
        logits = bf16(logits)
        reduction = MoeReduction(experts, top_k, torch.bfloat16, renormalise=renormalise)
        weights, ids = route(gpu.put(logits), reduction)
        of_row = SoftmaxReduction.of_device("cuda", experts, torch.float32)
        defined = definition.route(logits, top_k, renormalise, of_row, _tables())
        yield Comparison("route", f"{experts} experts, weights", weights, defined[0], {"x": _halves(logits[:3])})
        yield Comparison("route", f"{experts} experts, which", ids.float(), defined[1].astype(fp32))
    for tokens, experts, hidden, inner in ((1, 8, 256, 192), (5, 16, 512, 128), (40, 16, 256, 64), (600, 8, 256, 128)):
        x, w13 = numbers(rng, tokens, hidden), bf16(numbers(rng, experts, 2 * inner, hidden) * fp32(hidden**-0.5))
        w2 = bf16(numbers(rng, experts, hidden, inner) * fp32(inner**-0.5))
        ids = np.argsort(rng.random((tokens, experts)), axis=1)[:, :2]
        weights = rng.random((tokens, 2)).astype(fp32)
        reduction = MoeReduction(experts, 2, torch.bfloat16)
        layer = Experts(gpu.put(w13), gpu.put(w2), reduction)
        found = moe(gpu.put(x), gpu.put(weights, torch.float32), gpu.put(ids, torch.int64), layer)
        made = np.empty((tokens, 2, hidden), fp32)
        for expert in np.unique(ids):
            at, slot = np.nonzero(ids == expert)
            gate_up = definition.linear(x[at], w13[expert], mma=cpu.mma)
            made[at, slot] = definition.linear(definition.silu_and_mul(gate_up, _tables()), w2[expert], mma=cpu.mma)
        yield Comparison(
            "experts", f"{tokens} tokens of {hidden}, {experts} experts of {inner}", found, expert_sum(made, weights)
        )


def as_fp32(found: torch.Tensor) -> Floats:
    return found.detach().float().cpu().numpy()


def different(one: Comparison) -> np.ndarray:
    """Where bits differ; NaN is NaN."""
    found, defined = as_fp32(one.gpu), np.asarray(one.defined, fp32).reshape(one.gpu.shape)
    return (found.view(np.uint32) != defined.view(np.uint32)) & ~(np.isnan(found) & np.isnan(defined))


def _counted(units: np.ndarray) -> dict[int, int]:
    """How often each difference stands there, those beyond 9 units together."""
    values, counts = np.unique(np.clip(units, -9, 9), return_counts=True)
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def report(one: Comparison, seconds: float) -> int:
    """Print a case's line and its first different values; how many there are."""
    where = different(one)
    count = int(where.sum())
    share = f"{count} of {where.size} different" if count else f"{where.size} equal"
    print(
        f"{'DIFFERENT' if count else 'equal    '} {one.operation:22} {one.case:44} {share} ({seconds:.1f} s)",
        flush=True,
    )
    found, defined = as_fp32(one.gpu), np.asarray(one.defined, fp32).reshape(one.gpu.shape)
    for place in np.argwhere(where)[:_SHOWN]:
        at = tuple(place)
        pair = [f"{x[at]:.9g} {x[at].view(np.uint32):08x}" for x in (found, defined)]
        print(f"          at {list(map(int, place))}: the GPU has {pair[0]}, the definition {pair[1]}", flush=True)
    if count:
        units = found.view(np.int32)[where].astype(np.int64) - defined.view(np.int32)[where]
        units = units >> 16 if one.gpu.dtype == torch.bfloat16 else units
        print(f"          units apart: {_counted(units)}", flush=True)
    return count


def about(gpu: Gpu) -> dict[str, str]:
    """The GPU and the versions."""
    if gpu.device != "cuda":
        return {"gpu": gpu.device}
    major, minor = torch.cuda.get_device_capability()
    return {
        "gpu": torch.cuda.get_device_name(),
        "capability": f"{major}.{minor}",
        "torch": str(torch.__version__),
        "cuda": str(torch.version.cuda),
        "triton": triton.__version__,
        "numpy": np.__version__,
        "vllm": installed("vllm"),
    }


class Samples:
    """Operands and the GPU's results, as many as fit."""

    def __init__(self, path: Path) -> None:
        self._path, self._kept, self._bytes = path, {}, 0

    def add(self, one: Comparison) -> None:
        """Operands and result of a case that has operands; of any other one the first values that differ."""
        result = as_fp32(one.gpu)
        name = f"{one.operation}: {one.case}"
        parts = {f"{name}: {key}": value for key, value in one.operands.items()}
        if parts or one.case.startswith("frequencies"):
            parts[f"{name}: result"] = _halves(result) if one.gpu.dtype == torch.bfloat16 else result
        else:
            where = np.flatnonzero(different(one))[:2000]
            if not len(where):
                return
            parts = {f"{name}: places": where.astype(np.int32), f"{name}: result": result.reshape(-1)[where]}
        size = sum(value.nbytes for value in parts.values())
        if self._bytes + size <= _MOST_SAMPLES:
            self._bytes += size
            self._kept |= parts

    def save(self) -> None:
        np.savez_compressed(self._path, **self._kept)


PARTS = {
    functions: (),
    matmuls: ("matmul", "silu_and_mul"),
    activations: ("silu_and_mul",),
    logprobs: ("log_softmax", "argmax"),
    filters: ("top_k_top_p",),
    noises: ("noise",),
    norms: ("rms_norm",),
    rotations: ("rotary_table", "rotate"),
    attentions: ("attention",),
    scores: ("heads_of_256", "windows", "capped_scores"),
    families: ("norm_plus_one", "scaled_embeddings", "capped_logits", "linear_angles"),
    gelus: ("gelu_and_mul",),
    large_heads: ("heads_of_256",),
    products_of_codes: OF_CODES,
    mixtures: OF_EXPERTS,
}
"""What is compared, and the operations that it is of."""


def tables_of(gpu: Gpu, folder: Path) -> Tables:
    """Record this GPU's special functions, and write them."""
    tables, nearest = record(gpu), ideal()
    for name in ("exp2", "rcp"):
        print(f"{name}: units off the nearest: {_counted(getattr(tables, name) - getattr(nearest, name))}", flush=True)
    try:
        (folder / "tables.xz").write_bytes(packed(tables))
    except ValueError as error:
        print(f"FAILED    tables: {error}")
        np.savez_compressed(folder / "tables.npz", exp2=tables.exp2[::64], rcp=tables.rcp[::64])
    return tables


def compare(gpu: Gpu, wanted: set[str], samples: "Samples") -> tuple[dict[str, int], dict[str, int]]:
    """How many values of the wanted operations were compared, and how many of them differ. An operation that could not
    be compared as a whole has one that differs.
    """
    values, wrong = dict.fromkeys(wanted, 0), dict.fromkeys(wanted, 0)
    for number, (part, operations) in enumerate(PARTS.items()):
        if operations and not wanted & {*operations}:
            continue
        at = time.monotonic()
        try:
            for one in part(gpu, np.random.default_rng(number)):
                count = report(one, time.monotonic() - at)
                at = time.monotonic()
                samples.add(one)
                if one.operation in wanted:
                    values[one.operation] += one.gpu.numel()
                    wrong[one.operation] += count
        except Exception:
            print("FAILED", flush=True)
            traceback.print_exc(limit=-6, file=sys.stdout)
            for operation in wanted & {*operations}:
                wrong[operation] += 1
    return values, wrong


def main(arguments: list[str] | None = None, gpu: Gpu | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", nargs="+", choices=(*ALL, *_GROUPS), default=ALL, help="these operations alone")
    parser.add_argument("--add", action="store_true", help="to what this package has confirmed, with its tables")
    options = parser.parse_args(arguments)
    folder, gpu, started = options.folder, gpu or Gpu(), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    machine, before = about(gpu), confirmed.recorded() if options.add else confirmed.NOTHING
    print(json.dumps(machine), flush=True)
    wanted = {name for one in options.only for name in _GROUPS.get(one, (one,))}
    tables = recorded() if options.add else tables_of(gpu, folder)
    _recorded[:] = [tables]
    answers = known_answers.digests(tables, wanted)
    print(f"tables {tables.digest} after {time.monotonic() - started:.1f} s", flush=True)
    known = before.machine, before.tables
    if options.add and known != (machine, tables.digest):
        print(f"what is confirmed is of {known}, so that nothing can be added to it")
        return 1
    samples = Samples(folder / "samples.npz")
    values, wrong = compare(gpu, wanted, samples)
    samples.save()
    definitions = {**before.definition, **answers}
    found = Confirmed(machine, tables.digest, definitions, {**before.values, **values}, {**before.different, **wrong})
    (folder / "confirmed.json").write_text(found.to_json())
    missing = found.missing(ALL)
    print(f"not confirmed: {', '.join(missing) or 'nothing'}; {time.monotonic() - started:.0f} s", flush=True)
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())

"""Shows whether two environments compute the same bits, such as two versions of Triton on one GPU: writes a digest of
every operation's output on fixed operands, and compares two such files.

usage: python -m scripts.compare_bits write FILE [--device cpu | cuda] [--attention I/N]
       python -m scripts.compare_bits compare BEFORE AFTER
"""

import argparse
import hashlib
import json
import sys
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import torch

from benchmarks.record import Setting
from vllm_batch_invariant.ops import dispatch
from vllm_batch_invariant.ops.attention import AttentionReduction, paged_attention
from vllm_batch_invariant.ops.attention.params import causal_options
from vllm_batch_invariant.ops.devices import DEVICES
from vllm_batch_invariant.ops.linear import linear
from vllm_batch_invariant.verify.check.operations import Chunk, Heads, Request, paged

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GEMMS = ((6144, 4096), (4096, 12288), (1000, 896), (151_936, 256))
"""N and K of weights."""
ROWS = (1, 8, 64, 300, 1025)
LENGTHS = (64, 128, 896, 4096, 5120, 20_000, 151_936)
HEADS = ((16, 4), (14, 2), (4, 4))
"""Query and KV heads."""
SIZES = (64, 80, 128, 192, 256)
REQUESTS = (37, 530, 1500)
"""Tokens of the requests of one call."""


def draw(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normal numbers that are the same wherever they are drawn."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def gemms(device: str) -> Iterator[tuple[str, torch.Tensor]]:
    for (n, k), dtype in product(GEMMS, DTYPES):
        weight, bias = draw(n, k, dtype=dtype, seed=1).to(device), draw(n, dtype=dtype, seed=2).to(device)
        for m in ROWS:
            x = draw(m, k, dtype=dtype, seed=m).to(device)
            yield f"linear M={m} N={n} K={k} {dtype}", linear(x, weight)
            yield f"linear M={m} N={n} K={k} {dtype}, bias", linear(x, weight, bias)


def rows(device: str) -> Iterator[tuple[str, torch.Tensor]]:
    norm, softmax, reduce, ranking = (
        dispatch.module_for(name, device) for name in ("norm", "softmax", "reduce", "ranking")
    )
    for length, dtype in product(LENGTHS, DTYPES):
        x = (4 * draw(5, length, dtype=dtype, seed=length)).to(device)
        what = f"N={length} {dtype}"
        if length <= 20_000:
            weight = draw(length, dtype=dtype, seed=3).to(device)
            yield f"rms_norm {what}", norm.rms_norm(x, weight, 1e-6, None, None)
        yield f"softmax {what}", softmax.softmax(x, -1)
        yield f"log_softmax {what}", softmax.log_softmax(x, -1, dtype=torch.float32)
        yield f"softmax_backward {what}", softmax.softmax_backward(x, x.flip(-1), -1, dtype)
        yield f"sum {what}", reduce.sum(x, -1)
        yield f"mean {what}", reduce.mean(x, -1)
        if dtype == torch.float32:
            _, ranks = ranking.top_and_ranks(x, 5, x.argmax(-1))
            yield f"ranks {what}", ranks
            filtered = dispatch.module_for("top_k_top_p", device)
            k, p = (torch.tensor(values * 5, device=device) for values in ((20,), (0.9,)))
            yield f"top_k_top_p {what}", filtered.top_k_top_p(x.clone(), k.int(), p.float())


def attention(device: str, part: slice = slice(None)) -> Iterator[tuple[str, torch.Tensor]]:
    """Prefill, chunks and decode of requests of some lengths, by each implementation of the device; a part of them."""
    kernel, options_of_heads = DEVICES[device].attention, causal_options(HEADS[0][0])
    cases = [
        *product((kernel,), HEADS[:1], SIZES, DTYPES[:2], ({},)),
        *product((kernel, "flex"), HEADS, (128,), DTYPES[:1], ({},)),
        *product((kernel,), HEADS[:1], (128,), DTYPES[:1], [{name: one} for name, one in options_of_heads.items()]),
    ]
    for by, (query_heads, kv_heads), size, dtype, options in cases[part]:
        heads = Heads(query_heads, kv_heads, size, dtype)
        taken = {
            name: draw(query_heads, dtype=torch.float32, seed=4).to(device) if torch.is_tensor(value) else value
            for name, value in options.items()
        }
        requests = [Request(heads, length, length) for length in REQUESTS]
        for kind, tokens in (("decode", 1), ("chunk", 33), ("prefill", REQUESTS[-1])):
            chunks = [Chunk(one, max(0, one.length - tokens), one.length) for one in requests]
            operands = (tensor.to(device) for tensor in paged(chunks, 64))
            out = paged_attention(
                *operands, scale=size**-0.5, reduction=AttentionReduction.of_device(device, by), implementation=by,
                **taken,
            )  # fmt: skip
            yield f"attention {by} {kind} {query_heads}/{kv_heads}/{size} {dtype} {', '.join(options)}".strip(), out


def write(path: Path, device: str, part: slice | None = None) -> None:
    """Compute everything, or a part of attention alone, and write a digest by case; what is there is written after each
    kind of operation.
    """
    digests = {}
    made = {"attention": attention(device, part)} if part else {
        "rows": rows(device), "gemms": gemms(device), "attention": attention(device)
    }  # fmt: skip
    with torch.no_grad():
        for kind, cases in made.items():
            for name, out in cases:
                digests[name] = hashlib.sha256(out.cpu().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
            path.write_text(json.dumps({"versions": Setting.here().versions, "digests": digests}, indent=1))
            print(f"{kind}: {len(digests)} digests so far", flush=True)


def compare(before: Path, after: Path) -> int:
    """Print which cases differ; how many."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    print(f"{old['versions']}\n{new['versions']}")
    both = old["digests"].keys() & new["digests"].keys()
    differing = sorted(name for name in both if old["digests"][name] != new["digests"][name])
    print("\n".join(f"differs: {name}" for name in differing))
    print(f"{len(both) - len(differing)} of {len(both)} outputs have the same bits")
    return len(differing)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write")
    writing.add_argument("file", type=Path)
    writing.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    writing.add_argument("--attention", metavar="I/N", help="every Nth case of attention from I on, and nothing else")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    parsed = parser.parse_args()
    if parsed.command == "write":
        first, _, step = (parsed.attention or "").partition("/")
        write(parsed.file, parsed.device, slice(int(first), None, int(step)) if step else None)
    else:
        sys.exit(1 if compare(parsed.before, parsed.after) else 0)


if __name__ == "__main__":
    main()

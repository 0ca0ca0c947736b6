"""Gradients of causal attention on a CPU, against PyTorch's scaled_dot_product_attention as plain matmuls.

Of both the time and the peak memory. Each measurement has a process of its own, providers alternate.

usage: python -m benchmarks.attention_backward [--lengths N ...] [--runs N]
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from vllm_batch_invariant.ops.attention_backward import attention_backward

from .record import versions

HEADS, KV_HEADS, HEAD_SIZE = 16, 8, 128
SCALE = HEAD_SIZE**-0.5
PROVIDERS = ("stock", "ours")


def stock(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """One sequence, computed again in fp32 and differentiated by autograd."""
    inputs = [tensor.float().transpose(0, 1)[None].requires_grad_() for tensor in (query, key, value)]
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(*inputs, is_causal=True, scale=SCALE, enable_gqa=True)
        torch.autograd.grad(out, inputs, grad.float().transpose(0, 1)[None])


def ours(grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    """The operation."""
    attention_backward(grad, query, key, value, [0, len(query)], scale=SCALE)


def measure(provider: str, length: int) -> tuple[float, float]:
    """Seconds of the second call, and MiB that this process grew by in both, beside the tensors given."""
    call = {"stock": stock, "ours": ours}[provider]
    shapes = [(length, heads, HEAD_SIZE) for heads in (HEADS, HEADS, KV_HEADS, KV_HEADS)]
    tensors = [torch.randn(shape).bfloat16() for shape in shapes]
    call(*(tensor[:64] for tensor in tensors))  # what is compiled or loaded once
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for _ in range(2):
        start = time.perf_counter()
        call(*tensors)
        seconds = time.perf_counter() - start
    return seconds, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096], help="tokens of the sequence")
    parser.add_argument("--runs", type=int, default=3, help="processes of each provider and length")
    parser.add_argument("--one", nargs=2, metavar=("PROVIDER", "LENGTH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(*measure(options.one[0], int(options.one[1])))
        return
    table = Table("tokens", *(f"{one}, {what}" for what in ("s", "MiB") for one in PROVIDERS))
    for length in options.lengths:
        found: dict[str, list[tuple[float, float]]] = {provider: [] for provider in PROVIDERS}
        for _ in range(options.runs):
            for provider in PROVIDERS:
                command = [sys.executable, "-m", "benchmarks.attention_backward", "--one", provider, str(length)]
                said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                seconds, size = map(float, said.split())
                found[provider].append((seconds, size))
        medians = {one: [statistics.median(column) for column in zip(*found[one], strict=True)] for one in PROVIDERS}
        times, sizes = ([medians[one][column] for one in PROVIDERS] for column in (0, 1))
        table.add_row(str(length), *(f"{one:.2f}" for one in times), *(f"{one:.0f}" for one in sizes))
    console = Console()
    console.print(f"{HEADS} heads, {KV_HEADS} KV heads of {HEAD_SIZE} in bf16, {torch.get_num_threads()} threads")
    console.print(table)
    console.print(versions())


if __name__ == "__main__":
    main()

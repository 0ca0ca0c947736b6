"""What a KV connector has stored, as tests change it: run by the driver in the engine's process."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file


def flip(at: Path) -> None:
    """Flip the lowest bit of the exponent of one stored number in the middle of a file."""
    tensors = load_file(at)
    numbers = tensors["kv_cache"].contiguous().view(torch.int16).flatten()
    numbers[len(numbers) // 2] ^= 0x80
    save_file(tensors, at)


def flip_in_memory(llm: Any) -> int:
    """Flip a bit of each number that an offloading connector holds in the memory of the CPU; returns how many tensors.

    Args:
        llm: vLLM's ``LLM`` with a worker in this process.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    found = list(_tensors(get_kv_transfer_group(), set()))
    for tensor in found:
        tensor.view(torch.uint8).bitwise_xor_(1)
    return len(found)


def _tensors(holder: Any, seen: set[int]) -> Any:
    """Tensors of bytes in the memory of the CPU below an object of vLLM's offloading."""
    if id(holder) in seen:
        return
    seen.add(id(holder))
    if isinstance(holder, torch.Tensor):
        if holder.is_cpu and holder.dtype in (torch.int8, torch.uint8) and holder.ndim == 2:
            yield holder
    elif isinstance(holder, dict | list | tuple):
        for one in holder.values() if isinstance(holder, dict) else holder:
            yield from _tensors(one, seen)
    elif "kv_offload" in type(holder).__module__ or "kv_connector" in type(holder).__module__:
        yield from _tensors(getattr(holder, "__dict__", {}), seen)

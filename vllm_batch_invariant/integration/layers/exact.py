"""Exact arithmetic (``VLLM_BATCH_INVARIANT_ARITHMETIC=exact``) in vLLM: its layers, samplers and attention.

What a layer computes is :mod:`...ops.exact.definition`; operations that are not defined there are refused, when a model
is loaded if they are a layer's, and else when they are called.
"""

from collections.abc import Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch

from ... import envs, ops
from ...errors import NotCovered
from ...ops.exact.definition import NEXT_KEY
from ..parallel import tensor_tree
from ..reviews import patch_points

_POSITIONS = 8192
"""Of a rotary embedding, whose angles are held at a time."""
_LEAVE = f"serve another model, or leave {envs.ARITHMETIC.name} out"


def install_cpu() -> None:
    """Put its layers and draws where a worker on a CPU calls others."""
    operations().certify()
    install_layers()
    tensor_tree.install(operations().finish)
    sampler = patch_points.TOP_K_TOP_P_SAMPLER.get()
    sampler.forward_cpu = sampler.forward_native = _draw


def install_layers() -> None:
    """Put its layers where a worker calls others."""
    replace = partial(patch_points.replace_layer, prefix="Exact")
    replace(patch_points.SILU_AND_MUL.get(), forward=_silu_and_mul)
    replace(patch_points.GELU_AND_MUL.get(), forward=_gelu_and_mul)
    for point in (
        patch_points.ROTARY_EMBEDDING,
        patch_points.LLAMA_3_ROTARY_EMBEDDING,
        patch_points.LINEAR_ROTARY_EMBEDDING,
    ):
        replace(point.get(), forward=_rotate, _compute_cos_sin_cache=_rotary_table)
    patch_points.LOGITS_PROCESSOR.get().forward = _logits


def refuse_copies_of_pages() -> None:
    """Have a worker on a GPU refuse a step that copies pages of the cache: their exponents lie beside the pages, where
    vLLM does not see them, so a copy would stand for other keys and values.
    """

    def copy(kv_caches: Any, num_blocks: int, kv_cache_block_copies: Sequence[Any]) -> None:
        if kv_cache_block_copies:
            raise NotCovered(
                "a copy of a page of the KV cache in exact arithmetic on a GPU",
                "the exponents of its keys and values lie beside it and are not copied",
                f"pass --no-enable-prefix-caching, or leave {envs.ARITHMETIC.name} out",
            )

    patch_points.COPY_PAGES.put(copy)


def compile_cpu() -> None:
    """Run the kernels once on next to nothing, for one thread and for many."""
    cpu = operations()
    for rows in (1, 1024):
        x = torch.zeros(rows, 64, dtype=torch.bfloat16)
        cpu.linear(x[:1].expand(min(rows, 4), 64), cpu.prepare(x))
        cpu.silu_and_mul(x)
        cpu.gelu_and_mul(x)
        cpu.capped(x, 1.0)
        cpu.draw(x.float(), torch.zeros(rows, dtype=torch.int64))


def operations(device_type: str = "cpu") -> Any:
    """The operations of a device: a module that needs numba on a CPU, and Triton on a GPU."""
    return import_module(f".exact.{device_type}", ops.__name__)


def _silu_and_mul(_: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return operations(x.device.type).silu_and_mul(x)


def _gelu_and_mul(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.approximate != "tanh":
        raise NotCovered("GELU by the error function", "it has no definition in exact arithmetic", _LEAVE)
    return operations(x.device.type).gelu_and_mul(x)


def _logits(
    self: Any,
    lm_head: torch.nn.Module,
    hidden_states: torch.Tensor,
    embedding_bias: torch.Tensor | None = None,
    *options: Any,
    **named: Any,
) -> torch.Tensor | None:
    """vLLM's method, with a soft cap of one rounding."""
    logits = hidden_states
    if not self.logits_as_input:
        logits = self._get_logits(hidden_states, lm_head, embedding_bias, *options, **named)
    if logits is None:
        return None
    if self.soft_cap is not None:
        logits = operations(logits.device.type).capped(logits, self.soft_cap)
    return logits if self.scale == 1.0 else logits * self.scale


def _rotary_table(self: Any) -> torch.Tensor:
    """[positions, head size] bf16, the cosines and sines that vLLM keeps."""
    from ...ops.exact.definition import rotary_table, turns

    if self.rotary_dim != self.head_size or not self.is_neox_style:
        raise NotCovered("a rotary embedding of a part of a head, or of pairs", "it has no definition", _LEAVE)
    scaling, positions = None, self.max_position_embeddings
    if hasattr(self, "scaling_factors"):
        factors = self.scaling_factors if isinstance(self.scaling_factors, list) else [self.scaling_factors]
        if len(factors) > 1:
            raise NotCovered("several linear scalings of a rotary embedding", "it has no definition", _LEAVE)
        scaling, positions = {"factor": factors[0]}, int(positions * factors[0])
    if hasattr(self, "low_freq_factor"):
        scaling = {
            "factor": self.scaling_factor,
            "low_freq_factor": self.low_freq_factor,
            "high_freq_factor": self.high_freq_factor,
            "original_max_position_embeddings": self.orig_max_position,
        }
    per_position = turns(self.head_size, self.base, scaling)
    table = torch.empty(positions, self.head_size, dtype=torch.bfloat16)
    for first in range(0, positions, _POSITIONS):
        part = table[first : first + _POSITIONS]
        part.copy_(torch.from_numpy(rotary_table(len(part), per_position, first)))
    return table


def _rotate(
    self: Any, positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    table, rotate = self.cos_sin_cache[positions.flatten()], operations(query.device.type).rotate

    def turned(x: torch.Tensor) -> torch.Tensor:
        return rotate(x.unflatten(-1, (-1, self.head_size)), table).view(x.shape)

    return turned(query), None if key is None else turned(key)


def _draw(
    self: Any,
    logits: torch.Tensor,
    generators: dict[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """vLLM's method: tokens drawn of filtered logits, and what it reports of these. A request without a seed has noise
    of a number that PyTorch draws.
    """
    logits = patch_points.TOP_K_TOP_P.get()(logits, k, p)
    reported = None
    if self.logprobs_mode == "processed_logits":
        reported = logits
    elif self.logprobs_mode == "processed_logprobs":
        reported = logits.log_softmax(dim=-1, dtype=torch.float32)
    keys = torch.randint(0, 2**62, (len(logits),))
    for row, generator in generators.items():
        key = generator.initial_seed()
        keys[row] = torch.tensor(key, dtype=torch.uint64).view(torch.int64)
        generator.manual_seed((key + NEXT_KEY) % 2**64)  # in its state, so that a draw can be taken back
    tokens = operations().draw(logits.to(torch.float32), keys)
    return tokens, reported

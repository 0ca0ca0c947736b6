"""A small LFM2, and what is done to the states of its short convolutions in an engine's process."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from vllm_batch_invariant.ops.causal_conv import ConvStates

CONFIG = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
    **dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim"), 256),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""vLLM reads fields that Transformers' class does not have of its own."""


def _layers(model: torch.nn.Module) -> list[Any]:
    return [layer for layer in model.modules() if type(layer).__name__.endswith("ShortConv")]


def poison(llm: Any) -> int:
    """Fill the state of every page with NaN, as a request may find one that another has left. Returns how many."""

    def fill(model: torch.nn.Module) -> int:
        for layer in _layers(model):
            layer.kv_cache[0].fill_(torch.nan)
        return sum(len(layer.kv_cache[0]) for layer in _layers(model))

    llm.reset_prefix_cache()
    return llm.apply_model(fill)[0]


def _with(change: Callable[[ConvStates], dict[str, Any]], states_of: Any, self: Any, held: torch.Tensor) -> ConvStates:
    states = states_of(self, held)
    return ConvStates(**{**vars(states), **change(states)})


FAULTS: dict[str, Callable[[ConvStates], dict[str, Any]]] = {
    "a new request reads its page": lambda states: {"context_lens": states.context_lens.clamp(min=4)},
    "a chunk begins anew": lambda states: {
        "context_lens": torch.where(states.starts.diff() > 1, 0, states.context_lens),
    },
    "all states are in one page": lambda states: {"pages": states.pages.clamp(max=states.pages.min())},
}


def plant(llm: Any, fault: str) -> None:
    """Have the layers take a step for another than it is, from now on; "" for what it is."""
    from vllm_batch_invariant.integration.layers import short_conv_backend  # not every vLLM has what it imports

    llm.reset_prefix_cache()
    metadata = short_conv_backend.Metadata
    metadata.states_of = vars(metadata).get("original", metadata.states_of)
    metadata.original = metadata.states_of
    if fault:
        changed = partial(_with, FAULTS[fault], metadata.original)
        metadata.states_of = lambda self, held: changed(self, held)

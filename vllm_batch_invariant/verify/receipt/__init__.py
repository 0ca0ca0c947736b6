"""Receipts: a receipt records one completion, or what a model pooled of a text, so that somebody else can compute it
again and compare every bit.

For an audit, keep the receipt of an answer. For reinforcement learning, make one of a rollout, and compare the
trainer's logprobs with it::

    from vllm_batch_invariant.verify import receipt

    info = receipt.engine_info(llm)
    [output] = llm.generate([prompt], sampling)
    made = receipt.make(output, sampling, info)
    made.save("answer.json")

    receipt.difference_of_logprobs(made, trainers_logprobs)  # None: the same bits
    print(receipt.verify(receipt.Receipt.load("answer.json"), another_llm))

:func:`make_on_server` and :func:`verify_on_server` do the same over HTTP, and ``vllm-batch-invariant receipt`` on the
command line. :func:`make_pooled` and the others of that name are of embeddings, scores and classes.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .comparison import Difference, Note, Verdict, compare, difference_of_logprobs, first_difference_of
    from .engine import engine_info, make, verify
    from .items import items_of
    from .pooled import make_pooled, verify_pooled
    from .pooled_server import make_pooled_on_server, verify_pooled_on_server
    from .record import (
        Adapter,
        BadReceipt,
        Completion,
        EngineInfo,
        Environment,
        Item,
        Model,
        Pair,
        Pooled,
        PooledReceipt,
        Pooling,
        Prompt,
        Receipt,
        Sampling,
        Tensor,
        load,
    )
    from .server import make_on_server, verify_on_server
    from .text import Text

__all__ = [
    "Adapter",
    "BadReceipt",
    "Completion",
    "Difference",
    "EngineInfo",
    "Environment",
    "Item",
    "Model",
    "Note",
    "Pair",
    "Pooled",
    "PooledReceipt",
    "Pooling",
    "Prompt",
    "Receipt",
    "Sampling",
    "Tensor",
    "Text",
    "Verdict",
    "compare",
    "difference_of_logprobs",
    "engine_info",
    "first_difference_of",
    "items_of",
    "load",
    "make",
    "make_on_server",
    "make_pooled",
    "make_pooled_on_server",
    "verify",
    "verify_on_server",
    "verify_pooled",
    "verify_pooled_on_server",
]

_MODULES = {
    "comparison": ("Difference", "Note", "Verdict", "compare", "difference_of_logprobs", "first_difference_of"),
    "engine": ("engine_info", "make", "verify"),
    "items": ("items_of",),
    "pooled": ("make_pooled", "verify_pooled"),
    "pooled_server": ("make_pooled_on_server", "verify_pooled_on_server"),
    "record": (
        "Adapter",
        "BadReceipt",
        "Completion",
        "EngineInfo",
        "Environment",
        "Item",
        "Model",
        "Pair",
        "Pooled",
        "PooledReceipt",
        "Pooling",
        "Prompt",
        "Receipt",
        "Sampling",
        "Tensor",
        "load",
    ),
    "server": ("make_on_server", "verify_on_server"),
    "text": ("Text",),
}
"""Where each name is defined. It is imported when it is first used: a command's ``--help`` needs none of them."""


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f".{module}", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

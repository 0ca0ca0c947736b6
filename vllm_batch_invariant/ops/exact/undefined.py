"""Stands for operations on floats that exact arithmetic does not define: a call of any function here refuses."""

from collections.abc import Callable
from typing import NoReturn

from ...errors import NotCovered


def __getattr__(name: str) -> Callable[..., NoReturn]:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise NotCovered(
            f"{name} of floats in exact arithmetic",
            "the order of its sum is not defined there",
            "serve a model made of layers that are, or leave VLLM_BATCH_INVARIANT_ARITHMETIC out",
        )

    return refuse

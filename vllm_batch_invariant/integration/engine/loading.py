"""The one hook around the loading of a model in a worker."""

import functools
from collections.abc import Callable
from typing import Any

from .refusals import relayed

_hooked: set[type[Any]] = set()


def hook(worker: type[Any], before: Callable[[], None], after: Callable[[Any], None]) -> None:
    """Have a class of workers call functions around each loading of a model. Idempotent.

    Args:
        worker: vLLM's, in the process of one.
        before: what is called before a model is loaded.
        after: what is called with a worker whose model is loaded; what it refuses reaches the user.
    """
    if worker in _hooked:
        return
    _hooked.add(worker)
    load = worker.load_model

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **named: Any) -> None:
        before()
        load(self, *args, **named)
        after(self)

    worker.load_model = relayed(load_model)

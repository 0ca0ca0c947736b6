"""Operations of vLLM's layers that are one operation here, with the bits that they have apart.

A device lists its fusions (:class:`~..devices.record.VllmDevice`). Each is for classes that somebody has read: where a
source is another, where a layer's modules do something else, and while somebody looks at what one of them gives, the
operations stay apart.
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from ..reviews import sources
from ..reviews.patch_points import PatchPoint

logger = logging.getLogger("vllm.batch_invariant")


class Fusion:
    """One of them, of operations of any layers."""

    def install(self) -> None:
        """What a worker does before it builds a model. Idempotent."""

    def fuse_in(self, worker: Any) -> None:
        """What it does with a model that it has loaded."""


@dataclass(frozen=True)
class ForwardFusion(Fusion):
    """Of operations that the ``forward`` method of a layer calls one by one.

    Attributes:
        kinds: vLLM's classes with such a method.
        parts: names of their modules that the operation does not call.
        apart: what the log says where the method of a class is not one that was read.
        fits: whether the operation does what the modules do with what the method is given.
        forward: the method with the operation, called as ``fits`` is: with the layer, its parts, and what it is given.
        is_built: called with each layer that is built, before its weights are loaded.
    """

    kinds: tuple[PatchPoint, ...]
    parts: tuple[str, ...]
    apart: str
    fits: Callable[..., bool]
    forward: Callable[..., torch.Tensor]
    is_built: Callable[[Any], None] | None = None
    _made: set[object] = field(default_factory=set, init=False)

    def install(self) -> None:
        for point in self.kinds:
            kind = point.get()
            if self.serves(kind):
                continue
            if not sources.is_read("forwards", kind.forward):
                logger.info("%s is not the one known here: %s.", kind.__name__, self.apart)
                continue
            kind.forward = self.fused(kind.forward)
            if self.is_built:
                kind.__init__ = self._telling(kind.__init__, self.is_built)

    def serves(self, kind: type[Any]) -> bool:
        """Whether a class has the operation, and no method of its own."""
        return kind.forward in self._made

    def fused(self, apart: Callable[..., Any]) -> Callable[..., Any]:
        """The method that has one operation where ``apart`` has several."""
        fits, one, getters = self.fits, self.forward, [attrgetter(name) for name in self.parts]

        def forward(layer: Any, *given: Any, **named: Any) -> Any:
            parts = tuple(part_of(layer) for part_of in getters)
            if fits(layer, parts, *given, **named) and not is_watched(*parts):
                return one(layer, parts, *given, **named)
            return apart(layer, *given, **named)

        self._made.add(forward)
        return forward

    def _telling(self, init: Callable[..., None], is_built: Callable[[Any], None]) -> Callable[..., None]:
        @functools.wraps(init)
        def construct(layer: Any, *given: Any, **named: Any) -> None:
            init(layer, *given, **named)
            if self.serves(type(layer)):
                is_built(layer)

        return construct


def is_watched(*modules: torch.nn.Module) -> bool:
    """Whether something waits for these modules to be called, as the recorder of this project does."""
    return any(module._forward_hooks or module._forward_pre_hooks for module in modules)

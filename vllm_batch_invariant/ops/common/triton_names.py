"""What Triton names otherwise, or has not, in some version from 3.6 on."""

from typing import Any

import triton
import triton.language as tl
from triton.language.core import _aggregate, base_value

value = base_value
"""Annotates a field that is a tensor, a descriptor or, where Triton specialises an argument for 1, a constexpr."""


def _as_value(one: Any) -> Any:
    """What a ``constexpr_function`` has unwrapped, wrapped again."""
    if isinstance(one, tl.tuple):
        parts = [_as_value(part) for part in one]
        return tl.tuple(parts, tl.tuple_type([part.type for part in parts], one.type.fields))
    if isinstance(one, tuple) and triton.knobs.runtime.interpret:  # which gives a kernel its tuples as they are
        return tl.tuple(one, tl.tuple_type([None] * len(one), getattr(one, "_fields", None)))
    return one if isinstance(one, base_value) else tl.constexpr(one)


_as_value.__triton_builtin__ = True  # or Triton refuses a plain function in what a kernel calls


def aggregate(cls: type) -> Any:
    """Several values as one in a kernel: ``cls(*values)`` of the annotated fields, in their order.

    Triton has made the initialiser itself only since 3.9. A field that is no value of Triton's becomes a constexpr.
    """
    fields = tl.constexpr(tuple(cls.__annotations__))  # as a constexpr, a part of the key of what is compiled

    def init(self, *values) -> None:  # noqa: ANN002
        for name, one in zip(fields.value, values, strict=True):
            setattr(self, name, _as_value(one))

    cls.__init__ = triton.constexpr_function(init)
    return _aggregate(cls)

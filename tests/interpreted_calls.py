"""Calls in Triton's interpreter without what it does anew for each: a third of the time of small kernels.

At every call of a function from a kernel it looks through all of ``triton.language`` for what it has replaced already,
and for every value that it makes it writes down which dtype of NumPy's is which of Triton's.
"""

from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


def install(put: Callable[[object, str, Any], None] = setattr) -> None:
    """Replace both, by a function that sets attributes."""
    put(interpreter, "_patch_lang", once_a_launch(interpreter._patch_lang))
    put(interpreter, "_get_np_dtype", by_scalar(interpreter._get_np_dtype))


def by_scalar(dtype_of: Callable[[tl.dtype], Any]) -> Callable[[tl.dtype], Any]:
    """``_get_np_dtype``, asked once for each scalar: blocks and pointers of Triton's are no keys of a table."""
    of_scalar = cache(dtype_of)

    def of(dtype: tl.dtype) -> Any:
        element = dtype.scalar
        return dtype_of(element) if isinstance(element, tl.pointer_type) else of_scalar(element)

    return of


def once_a_launch(patch_lang: Callable[[FunctionType], Any]) -> Callable[[FunctionType], Any]:
    """``_patch_lang`` that does nothing for modules that are replaced until the launch ends, which takes them back."""
    replaced: set[ModuleType] = set()

    def patch_what_is_left(function: FunctionType) -> Any:
        seen = _languages(function)
        if seen <= replaced:
            return interpreter._LangPatchScope()
        scope = patch_lang(function)
        restore = scope.restore

        def end() -> None:
            replaced.clear()
            restore()

        scope.restore = end
        replaced.update(seen)
        return scope

    return patch_what_is_left


@cache
def _languages(function: FunctionType) -> frozenset[ModuleType]:
    """The modules that a function sees and the interpreter replaces members of."""
    return frozenset(value for value in function.__globals__.values() if value is tl or value is tl.core)

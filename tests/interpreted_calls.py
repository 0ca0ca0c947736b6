"""Calls in Triton's interpreter without what it does anew for each: a fifth of the time of small kernels.

At every call of a function from a kernel it looks through all of ``triton.language`` for what it has replaced already,
at every launch for what is to be replaced, and for every value that it makes it writes down which dtype of NumPy's is
which of Triton's, and wraps every number of its shape. A reduction by a function of one's own calls it for every
element, and whether integers overflow is computed for an assertion that only a debugged kernel makes.
"""

import inspect
from collections.abc import Callable
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

element_by_element = interpreter.ReduceOps.generic_reduce
"""What :func:`reduced_by_slices` stands for."""


def install(put: Callable[[object, str, Any], None] = setattr) -> None:
    """Replace these, by a function that sets attributes."""
    put(interpreter, "_patch_lang", once_a_launch(interpreter._patch_lang))
    put(interpreter, "_patch_builtin", of_known_members)
    put(interpreter.ReduceOps, "generic_reduce", reduced_by_slices)
    name = "binary_op_sanitize_overflow_impl"
    put(TritonSemantic, name, where_debugged(getattr(TritonSemantic, name)))
    put(tl.core.block_type, "__init__", type_of_known_sizes(tl.core.block_type.__init__))
    put(tl.core.tensor, "__init__", value_of_known_sizes(tl.core.tensor.__init__))
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


def where_debugged(check: Callable[..., None]) -> Callable[..., None]:
    """The check for an overflow, only where what it finds is asserted."""

    def of_debugged(self: TritonSemantic, *operands: Any) -> None:
        if self.builder.options.debug:
            check(self, *operands)

    return of_debugged


def type_of_known_sizes(init: Callable[..., None]) -> Callable[..., None]:
    """``block_type.__init__``, which makes the same shape once."""
    known: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def of_sizes(self: tl.core.block_type, element_ty: tl.dtype, shape: Any) -> None:
        sizes = tuple(one.value if isinstance(one, tl.constexpr) else one for one in getattr(shape, "values", shape))
        if sizes not in known:
            init(self, element_ty, shape)
            known[sizes] = self.shape, self.numel, f"<{self.shape}, "
            return
        self.element_ty = element_ty
        self.shape, self.numel, begin = known[sizes]
        self.name = f"{begin}{element_ty}>"

    return of_sizes


def value_of_known_sizes(init: Callable[..., None]) -> Callable[..., None]:
    """The same for ``tensor.__init__``."""
    known: dict[tuple[int, ...], tuple[Any, tl.constexpr]] = {}

    def of_sizes(self: tl.tensor, handle: Any, type: tl.dtype) -> None:
        sizes = tuple(getattr(type.shape, "values", type.shape)) if type.is_block() else ()
        if sizes not in known:
            init(self, handle, type)
            known[sizes] = self.shape, self.numel
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[sizes]

    return of_sizes


def of_known_members(package: Any, builder: Any, scope: interpreter._LangPatchScope) -> None:
    """``_patch_builtin`` that looks once for what a module or class has."""
    for name, member in _builtins(package):
        interpreter._patch_attr(package, name, member, builder, scope)


@cache
def _builtins(package: Any) -> tuple[tuple[str, Any], ...]:
    """Looked for before any is replaced: what stands in their place is no builtin."""
    return tuple((name, member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))


def reduced_by_slices(self: interpreter.ReduceOps, input: tuple[tl.tensor, ...]) -> list[tl.tensor]:
    """``generic_reduce`` in the same order, of all elements of a slice by one call."""
    input, axis = self.unravel(input, self.axis)
    data = [np.moveaxis(one.handle.data, axis, 0) for one in input]
    dtypes = [one.dtype for one in input]
    found = [one[0] for one in data]
    for place in range(1, len(data[0])):
        following = (one[place] for one in data)
        operands = (self.to_tensor(one, dtype) for one, dtype in zip((*found, *following), 2 * dtypes, strict=True))
        combined = self.combine_fn.fn(*operands)
        made = combined if isinstance(combined, tuple) else (combined,)
        found = [one.handle.data.astype(of.dtype).reshape(of.shape) for one, of in zip(made, found, strict=True)]
    values = [np.expand_dims(one, axis) if self.keep_dims else one for one in found]
    return [self.to_tensor(one, dtype) for one, dtype in zip(values, dtypes, strict=True)]


@cache
def _languages(function: FunctionType) -> frozenset[ModuleType]:
    """The modules that a function sees and the interpreter replaces members of."""
    return frozenset(value for value in function.__globals__.values() if value is tl or value is tl.core)

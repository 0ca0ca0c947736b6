"""Triton's interpreter, right for bf16, for the kernels of a module; and the language put back afterwards.

The interpreter of triton-ascend 3.2.0 multiplies the bit patterns of bf16 in ``tl.dot``, and rounds fp32 to bf16
towards zero. And it replaces functions of ``triton.language`` for good, after which nothing compiles.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType

import numpy as np
import pytest
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterBuilder, ReduceOps, TensorHandle
from triton.runtime.jit import JITFunction

from tests import interpreted_dot

_dot_of_rows = interpreted_dot.of_rows(InterpreterBuilder.create_dot)
_stock_cast = InterpreterBuilder.cast_impl
_LANGUAGE = (tl, tl.core, tl.math, tl.standard, tl.tensor, tl.dtype)


def _to_fp32(handle: TensorHandle) -> TensorHandle:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded_to_bf16(values: np.ndarray) -> np.ndarray:
    """fp32 to the bit patterns of bf16, to the nearest and then to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def _create_dot(self, a, b, d, input_precision, max_num_imprecise_acc) -> TensorHandle:
    return _dot_of_rows(self, _to_fp32(a), _to_fp32(b), d, input_precision, max_num_imprecise_acc)


def _cast_impl(self, source, target) -> TensorHandle:
    if (source.dtype.scalar, target.scalar) == (tl.float32, tl.bfloat16):
        return TensorHandle(_rounded_to_bf16(source.data), tl.bfloat16)
    return _stock_cast(self, source, target)


def patch_language_once(patch: pytest.MonkeyPatch) -> None:
    """The interpreter looks through the whole language at every call of a function, where the first has done it."""
    patch.setattr(interpreter, "_patch_lang", _once_for_a_module(interpreter._patch_lang))


def _once_for_a_module(patch_language: Callable[..., None]) -> Callable[..., None]:
    done = set()

    def patch_once(function) -> None:
        module = id(function.__globals__)
        if module not in done:
            done.add(module)
            patch_language(function)

    return patch_once


def hasten_max(patch: pytest.MonkeyPatch) -> None:
    """``tl.max`` in one step instead of one an element: triton-ascend gave its combination of two another name."""
    apply = ReduceOps.apply_impl

    def apply_impl(self, values):
        if self.combine_fn.__name__ == "_elementwise_max_default":
            return self.min_max(values[0], val_reduce_op=np.max)
        return apply(self, values)

    patch.setattr(ReduceOps, "apply_impl", apply_impl)


@cache
def _interpreted_function(function: JITFunction) -> InterpretedFunction:
    return InterpretedFunction(function.fn)


@contextmanager
def interpreted(*modules: ModuleType, repaired: bool = True) -> Iterator[None]:
    """Inside, the kernels of ``modules`` run on the CPU; bf16 is right unless not ``repaired``."""
    before = [dict(vars(owner)) for owner in _LANGUAGE]
    with pytest.MonkeyPatch.context() as patch:
        patch_language_once(patch)
        hasten_max(patch)
        patch.setattr(InterpreterBuilder, "create_dot", _create_dot if repaired else _dot_of_rows)
        patch.setattr(InterpreterBuilder, "cast_impl", _cast_impl if repaired else _stock_cast)
        # Parts of the language (sum, max, cdiv) are kernels themselves.
        for module in (tl, tl.standard, *modules):
            for name, function in list(vars(module).items()):
                if isinstance(function, JITFunction):
                    patch.setattr(module, name, _interpreted_function(function))
        yield
    for owner, attributes in zip(_LANGUAGE, before, strict=True):
        if isinstance(owner, type):
            for name in set(vars(owner)) - set(attributes):
                delattr(owner, name)
        for name, value in attributes.items():
            if vars(owner)[name] is not value:
                setattr(owner, name, value)

"""Elementwise functions whose bits do not depend on where in the tensor an element lies.

That should go without saying, but PyTorch's CPU kernels compute most elements with vector instructions and the last few
of each thread's share with scalar ones, which round transcendental functions differently: silu, sigmoid, gelu and
others then follow the batch.
"""

from .cpu import BINARY, UNARY, elementwise

__all__ = ["BINARY", "UNARY", "elementwise"]

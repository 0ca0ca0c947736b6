"""``tl.dot`` of Triton's interpreter, a row at a time.

The interpreter multiplies by NumPy, whose BLAS gives a row of A other bits at another place in A or beside another
number of rows: OpenBLAS does on a Zen 3, and does not on CPUs with AVX-512. No tensor core does, and a kernel whose
tile holds other rows would be blamed for it.
"""

from collections.abc import Callable

import numpy as np
from triton.runtime.interpreter import TensorHandle

STEP = 16
"""Elements of K that an instruction of a tensor core adds."""


def of_rows(create_dot: Callable[..., TensorHandle]) -> Callable[..., TensorHandle]:
    """``InterpreterBuilder.create_dot`` that multiplies each row of A [.., M, K] alone."""

    def create_dot_of_rows(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, *options: object) -> TensorHandle:
        places = ((a, -2), (b, -3), (d, -2))  # [.., M, 1, K] and [.., 1, K, N] give [.., M, 1, N]
        rows = [TensorHandle(np.expand_dims(handle.data, axis), handle.dtype) for handle, axis in places]
        out = create_dot(self, *rows, *options)
        return TensorHandle(out.data.squeeze(-2), out.dtype)

    return create_dot_of_rows


def in_steps(self, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object) -> TensorHandle:
    """``InterpreterBuilder.create_dot`` of one accumulator an element that adds K upwards in steps of 16, as a tensor
    core does, whatever the tile: a step's products are added in float64, which is exact for most of fp16, and rounded
    to fp32 with the accumulator.
    """
    rows, columns, acc = a.data.astype(np.float64), b.data.astype(np.float64), d.data
    for start in range(0, rows.shape[1], STEP):
        stop = start + STEP
        acc = (acc + rows[:, start:stop] @ columns[start:stop]).astype(d.data.dtype)
    return TensorHandle(acc, d.dtype.scalar)

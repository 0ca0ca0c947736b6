"""A ring of places in shared memory that one warp fills and other warps empty, in Gluon."""

import triton.experimental.gluon.language as gl
from triton.experimental import gluon


@gluon.jit
def next_stage(stage, phase, NUM_STAGES: gl.constexpr):
    """The next place in a ring, and the parity of its use."""
    last = stage == NUM_STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)

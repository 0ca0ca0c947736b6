"""Sizes that the Hopper kernels of attention and their plans share; needs no Gluon."""

BLOCK_N = 64
"""Keys in a step of the online softmax: the only ``key_tile`` of a reduction that the kernels serve."""
WARPGROUP_M = 64
"""Rows that a warpgroup multiplies at once."""
BLOCK_M = 2 * WARPGROUP_M
"""Rows of a prefill-like block: half of them for each of two warpgroups."""
SEMAPHORE_INTS = 2
"""Numbers in the semaphore of a prefill-like block whose splits are shared."""
SMALL_HEAD = 128
"""The largest head of whose rows prefill keeps the merged splits in shared memory, and queries in registers."""

"""Sizes that the Hopper kernels of attention and their plans share; needs no Gluon."""

TILE = 64
"""Keys in a step of the online softmax; a part of the reduction."""
WARPGROUP_ROWS = 64
"""Rows that a warpgroup multiplies at once."""
ROWS = 2 * WARPGROUP_ROWS
"""Rows of a large block: half of them for each of two warpgroups."""
ACCOUNTS = 2
"""Numbers in the account of a shared large block."""

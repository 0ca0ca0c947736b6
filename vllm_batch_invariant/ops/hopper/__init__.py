"""The usual arithmetic of a Hopper GPU in bf16, defined so that a CPU computes the bits that an H100 or H200 has."""

"""Seeds for several samples of one prompt: each sample has its own, which follows from a seed and a name of the sample.

Needs nothing but Python, so that a client can compute what an engine computes.
"""

import hashlib

SAMPLE_ID = "sample_id"
"""Of a request's ``extra_args`` (``vllm_xargs`` over HTTP): which sample of its prompt it is. The engine then takes
:func:`sample_seed` of the request's seed and this.
"""
BITS = 62
"""Of a seed that is made: vLLM adds a sample's index to it and keeps it as int64."""


def sample_seed(seed: int, sample_id: int | str) -> int:
    """The seed of one of several samples.

    Seeds of different samples have nothing in common, unlike ``seed + i``: those of two neighbouring seeds overlap.

    Args:
        seed: of all samples.
        sample_id: names the sample among them: an index, or what tells it from the others, such as ``"step 3, 17"``.
            ``3`` and ``"3"`` are the same.

    Returns:
        From 0 to 2**62 - 1.

    Raises:
        ValueError: an id that is neither a whole number nor a string.
    """
    if isinstance(sample_id, bool) or not isinstance(sample_id, int | str):
        raise ValueError(f"{SAMPLE_ID} has to be an integer or a string, got {sample_id!r}")
    return seed_from(hashlib.sha256(f"sample {int(seed)} {sample_id}".encode()).digest())


def seed_from(digest: bytes) -> int:
    """A seed of the first :data:`BITS` bits of a digest."""
    return int.from_bytes(digest[:8], "little") >> (64 - BITS)

"""Which package serves attention on NPUs."""

from importlib.util import find_spec

LIBRARIES = {
    "batch_invariant_ops": "AscendC's batch-invariant library",
    "flash_attn_npu_v3": "flash_attn_npu_v3 with one split",
}
"""Packages with an attention that does not follow the batch, best first."""


def attention_library() -> str | None:
    """The first of them that is installed, found without importing it; None if none is."""
    return next((name for name in LIBRARIES if find_spec(name) is not None), None)

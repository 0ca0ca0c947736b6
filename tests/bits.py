"""Comparisons: bits with bits, values with a float64 reference."""

import torch

ROW_COUNTS = (*range(1, 66), 127, 128, 129, 255, 256, 257, 1000)
"""Batch sizes around every tile border."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RELATIVE_ERROR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Largest error, relative to the largest element of the reference: one rounding to the dtype and an fp32 accumulation.
"""


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, what: str = "") -> None:
    """Fail with the first coordinate at which two tensors differ. Same NaNs are the same."""
    assert actual.shape == expected.shape, f"{what}: shape {tuple(actual.shape)} against {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype} against {expected.dtype}"
    different = (actual != expected) & ~(actual.isnan() & expected.isnan())
    if different.any():
        where = tuple(different.nonzero()[0].tolist())
        raise AssertionError(
            f"{what}: {int(different.sum())} of {different.numel()} elements differ, first at {where}: "
            f"{actual[where].item()!r} against {expected[where].item()!r}"
        )


def assert_near(actual: torch.Tensor, reference: torch.Tensor, factor: float = 1.0) -> None:
    """Fail when the error against a float64 reference is above the dtype's :data:`RELATIVE_ERROR` times ``factor``."""
    assert not actual.isnan().any(), "NaN in the result"
    error = (actual.double() - reference).abs().max() / reference.abs().max()
    assert error <= RELATIVE_ERROR[actual.dtype] * factor, f"relative error {error:.2e} in {actual.dtype}"

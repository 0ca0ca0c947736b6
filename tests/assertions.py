"""Comparisons: bits with bits, values with a float64 reference."""

import torch

from vllm_batch_invariant.compare import assert_same_bits

__all__ = ["DTYPES", "RELATIVE_ERROR", "ROW_COUNTS", "assert_near", "assert_rows_keep_their_bits", "assert_same_bits"]

ROW_COUNTS = (*range(1, 66), 127, 128, 129, 255, 256, 257, 1000)
"""Batch sizes around every tile border."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
RELATIVE_ERROR = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Largest error, relative to the largest element of the reference: one rounding to the dtype and an fp32 accumulation.
"""


def assert_near(actual: torch.Tensor, reference: torch.Tensor, factor: float = 1.0) -> None:
    """Fail when the error against a float64 reference is above the dtype's :data:`RELATIVE_ERROR` times ``factor``."""
    assert not actual.isnan().any(), "NaN in the result"
    error = (actual.double() - reference).abs().max() / reference.abs().max()
    assert error <= RELATIVE_ERROR[actual.dtype] * factor, f"relative error {error:.2e} in {actual.dtype}"


def assert_rows_keep_their_bits(network: torch.nn.Module, x: torch.Tensor) -> None:
    """Fail when a row of ``network(x)`` or of its gradient by ``x``, (rows, K), depends on the rows beside it."""

    def run(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        part = x[rows].clone().requires_grad_()
        out = network(part)
        out[:, 3].sum().backward()
        return out.detach(), part.grad

    out, grad = run(slice(None))
    for rows in (slice(0, 1), slice(5, 7), slice(60, 93), slice(len(x) - 1, len(x))):
        part_out, part_grad = run(rows)
        assert_same_bits(part_out, out[rows], str(rows))
        assert_same_bits(part_grad, grad[rows], str(rows))

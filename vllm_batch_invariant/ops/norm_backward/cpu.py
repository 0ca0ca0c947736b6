"""Gradients of RMSNorm on a CPU."""

from .composed import rms_norm_backward

__all__ = ["rms_norm_backward"]

"""Exact arithmetic: operations whose sums are sums of integers, so that every machine gives them the same bits."""

from .families import MODELS, problem_of

FORMAT = "X16.1"
"""The name of what :mod:`.definition` says. Another definition has another name."""

__all__ = ["FORMAT", "MODELS", "problem_of"]

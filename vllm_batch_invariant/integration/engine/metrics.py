"""Metrics of a server, beside vLLM's and by the same library."""

from contextlib import suppress
from typing import Any

from ..reviews import patch_points


def registered(metric: Any) -> Any:
    """The metric, also after vLLM has taken all metrics of its name away for another engine."""
    with suppress(ValueError):  # it is there
        patch_points.METRICS.get().register(metric)
    return metric

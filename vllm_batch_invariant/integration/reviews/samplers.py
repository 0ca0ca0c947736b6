"""Functions of vLLM that stay in use while it samples, known by digests of their sources.

Nothing but reading says that their arithmetic follows a row alone. So a source that nobody has read is refused.
"""

from collections.abc import Callable

from ...errors import NotCovered
from . import patch_points, sources, versions

_ONLY_ON = {
    "vllm.v1.worker.gpu.": "cuda",
    "vllm.v1.sample.ops.topk_topp_sampler.TopKTopPSampler.forward_cpu": "cpu",
}
"""How the names of functions begin that one device type alone uses: the second model runner's, and a method."""


def check(device_type: str) -> None:
    """Refuse an installed vLLM with a function that was not reviewed.

    Raises:
        NotCovered: with the names of the first three.
    """
    names = list(not_reviewed(sources.installed, device_type))
    if names:
        raise NotCovered(
            f"sampling in vLLM {patch_points.installed_version()}",
            f"nobody has reviewed its {', '.join(names[:3])}{' and others' * (len(names) > 3)}",
            f"install a release of vLLM {versions.version_range(device_type)} as published",
        )


def not_reviewed(source_of: Callable[[str], str | None], device_type: str) -> dict[str, str]:
    """Functions that a device uses and that have an unknown source, with their digests; "" for one that is not there.

    Args:
        source_of: the source of a module by its name, or None.
    """
    unread = sources.unread("sampling", source_of)
    return {name: digest for name, digest in unread.items() if _is_used(name, device_type)}


def _is_used(name: str, device_type: str) -> bool:
    return all(only == device_type for start, only in _ONLY_ON.items() if name.startswith(start))

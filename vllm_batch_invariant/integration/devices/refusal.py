"""The refusal of a device."""

from ...errors import NotCovered
from ...installing import how_to_install


def not_covered(device_type: str) -> NotCovered:
    """What is said of a device type, of vLLM or of PyTorch's builds, that the mode does not know."""
    return NotCovered(
        f"device '{device_type}'",
        "its operations are not in this version",
        f"run on the CPU ({how_to_install('cpu')}), or unset VLLM_BATCH_INVARIANT",
    )

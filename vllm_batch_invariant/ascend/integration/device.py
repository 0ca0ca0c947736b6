"""vLLM on an Ascend NPU, where vllm-ascend has a platform, a worker and an invariant mode of its own."""

from collections.abc import Iterable
from typing import Any

from ... import sources
from ...integration.devices.record import MODE_IS_ON, VllmDevice
from .. import DEVICE as NPU
from . import install as ascend


class Npu(VllmDevice):
    """An Ascend NPU."""

    def install(self, platform: type) -> None:
        ascend.set_deterministic_env()
        ascend.choose_attention(platform)

    def before_platform(self, vllm_config: Any) -> None:
        if vllm_config.model_config is not None:
            ascend.before_platform(vllm_config)

    def after_platform(self, vllm_config: Any) -> None:
        if vllm_config.model_config is not None:
            ascend.after_platform(vllm_config)

    def install_worker(self) -> frozenset[str]:
        external_ops = ascend.start_own_mode()
        ascend.replace_norms()
        return external_ops

    def summary(self, external_ops: Iterable[str]) -> list[str]:
        return [
            f"{MODE_IS_ON}vllm-ascend's own mode is kept where it has no gap.",
            f"{ascend.summary(external_ops)} {self.execution}",
            "On Ascend NPUs the mode is compiled and simulated, never run on hardware: a request should have the same "
            "bits when it is run again and in any batch; verify that with: vllm-batch-invariant reproduce.",
        ]

    def versions(self) -> dict[str, str]:
        """With the first digits of the digest of this folder's sources, which decide bits here alone."""
        return {"vllm-batch-invariant ascend": sources.digest("ascend")[:12]}


DEVICE = Npu(
    NPU,
    attention_backend=ascend.BACKEND,
    attention_choices=("CUSTOM", "FLASH_ATTN"),
    has_reviewed_config=False,
    guarantees=(),
)

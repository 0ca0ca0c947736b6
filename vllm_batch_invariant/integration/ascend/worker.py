"""vllm-ascend's worker with the mode in it."""

from ..install import take_over
from . import patch_points as ascend_patch_points


class Worker(ascend_patch_points.WORKER.get()):
    """Switches the mode on where vllm-ascend would switch on its own."""

    def _init_worker_distributed_environment(self) -> None:
        take_over()
        super()._init_worker_distributed_environment()

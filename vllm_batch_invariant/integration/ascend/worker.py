"""vllm-ascend's worker with the mode in it."""

from ..install import install_worker
from . import patch_points as ascend_patch_points


class Worker(ascend_patch_points.WORKER.get()):
    """Switches the mode on where vllm-ascend would switch on its own."""

    def _init_worker_distributed_environment(self) -> None:
        install_worker()
        super()._init_worker_distributed_environment()

"""vllm-ascend's worker with the mode in it."""

from typing import Any

from ...integration.engine.install import install_worker
from . import patch_points as ascend_patch_points

_Base: Any = ascend_patch_points.WORKER.get()


class Worker(_Base):
    """Switches the mode on where vllm-ascend would switch on its own."""

    def _init_worker_distributed_environment(self) -> None:
        install_worker()
        super()._init_worker_distributed_environment()

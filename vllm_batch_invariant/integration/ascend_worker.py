"""vllm-ascend's worker with the mode in it."""

from . import ascend_seams
from .engine import take_over


class Worker(ascend_seams.WORKER.get()):
    """Switches the mode on where vllm-ascend would switch on its own."""

    def _init_worker_distributed_environment(self) -> None:
        take_over()
        super()._init_worker_distributed_environment()

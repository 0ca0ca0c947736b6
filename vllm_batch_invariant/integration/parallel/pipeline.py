"""Between the stages of pipeline parallelism hidden states and residuals are copied, and not rounded."""

from functools import wraps
from typing import Any

from ...errors import NotCovered
from ..reviews import patch_points


def install() -> None:
    """Have vLLM's first model runner keep what a stage gets in the dtype that the stage before computed it in.

    vLLM makes the tensors that it is copied to in a trial run, which a CPU skips where layers are not compiled; they
    are made here before the first step.
    """
    runner = patch_points.MODEL_RUNNER.get()
    original = runner.sync_and_gather_intermediate_tensors

    @wraps(original)
    def sync_and_gather_intermediate_tensors(
        self: Any, num_tokens: int, intermediate_tensors: Any, sync_self: bool
    ) -> Any:
        """vLLM's method.

        Raises:
            NotCovered: a copy would round.
        """
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        if sync_self:
            for name, received in intermediate_tensors.items():
                _check_dtypes(name, received.dtype, self.intermediate_tensors[name].dtype)
        return original(self, num_tokens, intermediate_tensors, sync_self)

    runner.sync_and_gather_intermediate_tensors = sync_and_gather_intermediate_tensors


def _check_dtypes(name: str, sent: Any, kept: Any) -> None:
    if sent != kept:
        sent, kept = (str(dtype).removeprefix("torch.") for dtype in (sent, kept))
        raise NotCovered(
            f"pipeline parallelism that sends {name} in {sent} to a stage that keeps them in {kept}",
            "the next stage would compute with rounded values",
            "leave --pipeline-parallel-size out",
        )

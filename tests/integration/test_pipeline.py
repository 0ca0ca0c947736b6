"""Between the stages of a pipeline values are copied, and what would round them is refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.parallel import pipeline
from vllm_batch_invariant.integration.reviews import patch_points

pytest.importorskip("vllm")


class Runner:
    """As vLLM's first model runner, as far as it takes what the stage before sends."""

    def __init__(self) -> None:
        self.intermediate_tensors: Any = None
        self.model = SimpleNamespace(make_empty_intermediate_tensors=self.make)
        self.model_config = SimpleNamespace(dtype=torch.bfloat16)
        self.max_num_tokens, self.device = 8, torch.device("cpu")

    def make(self, batch_size: int, dtype: torch.dtype, device: torch.device) -> dict[str, torch.Tensor]:
        return {name: torch.empty(batch_size, 4, dtype=dtype, device=device) for name in ("hidden_states", "residual")}

    sync_and_gather_intermediate_tensors = patch_points.MODEL_RUNNER.get().sync_and_gather_intermediate_tensors


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    kind = type(
        "Runner", (Runner,), {"sync_and_gather_intermediate_tensors": Runner.sync_and_gather_intermediate_tensors}
    )
    monkeypatch.setattr(patch_points.MODEL_RUNNER.module(), patch_points.MODEL_RUNNER.attribute, kind)
    pipeline.install()
    return kind()


def test_the_next_stage_has_the_bits_that_were_sent(runner: Runner) -> None:
    for rows in (3, 8, 1):
        torch.manual_seed(rows)
        sent = {name: torch.randn(rows, 4).bfloat16() for name in ("hidden_states", "residual")}
        taken = runner.sync_and_gather_intermediate_tensors(rows, sent, True)
        for name, values in sent.items():
            assert_same_bits(taken[name], values)


def test_what_a_copy_would_round_is_refused(runner: Runner) -> None:
    sent = {"hidden_states": torch.zeros(3, 4, dtype=torch.bfloat16), "residual": torch.zeros(3, 4)}
    with pytest.raises(NotCovered, match="sends residual in float32 to a stage that keeps them in bfloat16"):
        runner.sync_and_gather_intermediate_tensors(3, sent, True)

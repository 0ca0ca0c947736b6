"""A request that is computed in chunks draws nothing from its generator before its last chunk."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.sampling import generators


class Runner:
    """As vLLM's first model runner does: it samples for every row, and turns the generators of some back."""

    def __init__(self, discarded: list[bool], generators: dict[int, torch.Generator]) -> None:
        self.discard_request_mask = SimpleNamespace(np=np.array([*discarded, True]))
        self.input_batch = SimpleNamespace(num_reqs=len(discarded), generators=generators)

    def _sample(self, logits: object) -> dict[int, int]:
        rows = self.input_batch.generators.items()
        return {row: int(torch.randint(1000, (1,), generator=generator)) for row, generator in rows}

    def _bookkeeping_sync(self, output: dict[int, int]) -> dict[int, int]:
        for row in np.nonzero(self.discard_request_mask.np[: self.input_batch.num_reqs])[0]:
            generator = self.input_batch.generators.get(int(row))
            if generator is not None:
                generator.set_offset(generator.get_offset() - 4)
        return output


def seeded() -> dict[int, torch.Generator]:
    return {0: torch.Generator().manual_seed(1), 2: torch.Generator().manual_seed(2)}


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> type[Runner]:
    kind = type("Runner", (Runner,), {})
    monkeypatch.setattr(patch_points.PatchPoint, "get", lambda point: kind)
    generators.install()
    return kind


def test_chunks_draw_nothing_and_the_last_one_samples_as_a_whole_prompt_does(runner):
    generators = seeded()
    for _ in range(3):
        chunk = runner([True, False, False], generators)
        assert 0 not in chunk._bookkeeping_sync(chunk._sample(None))
        assert set(chunk.input_batch.generators) == {0, 2}
    last, whole = runner([False, False, False], generators), runner([False] * 3, seeded())
    assert last._bookkeeping_sync(last._sample(None))[0] == whole._bookkeeping_sync(whole._sample(None))[0]


def test_vllms_own_way_stops_on_a_cpu():
    chunk = Runner([True, False, False], seeded())
    with pytest.raises(RuntimeError, match="does not use offset"):
        chunk._bookkeeping_sync(chunk._sample(None))

"""A receipt of a real engine on a Hopper, in its usual arithmetic, has the bits that a CPU computes again."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from scripts.hopper_receipts import MODELS, in_own_process, verify
from vllm_batch_invariant.ops.hopper.tables import packed
from vllm_batch_invariant.verify.receipt import Receipt

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]


@pytest.mark.parametrize("name", MODELS)
def test_a_receipt_is_computed_again_on_the_cpu(name: str, tmp_path: Path) -> None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("of a Hopper")
    from scripts.hopper_bits import Gpu, record

    (tmp_path / "tables.xz").write_bytes(packed(record(Gpu())))
    assert in_own_process(tmp_path, name) == 0
    made = Receipt.load(tmp_path / f"{name}-greedy.json")
    bits = made.completion.logprobs
    changed = (*bits[:3], f"{int(bits[3], 16) ^ 1:08x}", *bits[4:])
    verdict = verify(replace(made, completion=replace(made.completion, logprobs=changed)), tmp_path, name)
    assert verdict.difference.position == 3

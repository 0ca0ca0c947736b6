"""Exact arithmetic in a real engine on a GPU: the bits of the definition, alone and among others, in CUDA graphs and
without.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.engine.engines import OF_DEVICE, Result, differing_answers, run, tokens
from tests.engine.plans import alone_and_among, moved, targets
from tests.engine.receipts import SAMPLINGS
from tests.known_model import save_known_model
from tests.ops.exact.families import FAMILIES, save
from vllm_batch_invariant.envs import ARITHMETIC, UNTRIED
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.receipt import Receipt
from vllm_batch_invariant.verify.receipt.recompute import recompute

pytestmark = pytest.mark.engine

LIMITS = {"max_model_len": 1024, "max_num_seqs": 48, "max_num_batched_tokens": 128, "skip_tokenizer_init": True}
LARGE = Shape(hidden=1024, intermediate=3072, layers=3, heads=16, kv_heads=8, head_size=128, vocab=20_011)
"""A part of Qwen3-0.6B, with a vocabulary that vLLM pads."""


def served(model: Path, **settings: Any) -> Result:
    arguments = {"model": str(model)} | LIMITS | OF_DEVICE | settings
    return run(
        arguments, alone_and_among(), "1", **{ARITHMETIC.name: "exact"},
        afterwards=lambda running: running.call("tests.engine.receipts:made", tokens(90, 1), SAMPLINGS),
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_known_model(tmp_path_factory.mktemp("known"))


@pytest.fixture(scope="module")
def eager(model: Path) -> Result:
    return served(model, enforce_eager=True)


def test_a_request_has_the_same_bits_alone_among_others_in_chunks_and_from_a_warm_cache(eager: Result) -> None:
    assert moved(eager) == []


@pytest.mark.parametrize("which", range(len(SAMPLINGS)), ids=map(str, SAMPLINGS))
def test_a_receipt_has_the_bits_of_the_definition(which: int, eager: Result, model: Path) -> None:
    receipt = Receipt.from_json(eager.afterwards[which])
    verdict = recompute(receipt, str(model))
    assert verdict, verdict
    ids = receipt.completion.token_ids
    changed = replace(receipt.completion, token_ids=(*ids[:5], (ids[5] + 1) % 4096, *ids[6:]))
    assert recompute(replace(receipt, completion=changed), str(model)).difference.position == 5


def test_steps_in_cuda_graphs_have_the_bits_of_eager_ones(eager: Result, model: Path) -> None:
    graphs = served(model)
    assert moved(graphs) == []
    assert differing_answers(targets(graphs), targets(eager)) == []


@pytest.mark.parametrize("family", [name for name in FAMILIES if "MoE" not in name])
def test_every_dense_family_has_the_bits_of_the_definition(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(UNTRIED.name, "1")
    save(FAMILIES[family], tmp_path)
    done = served(tmp_path)
    assert moved(done) == []
    for text in done.afterwards:
        verdict = recompute(Receipt.from_json(text), str(tmp_path))
        assert verdict, verdict


def test_larger_layers_have_the_bits_of_the_definition(tmp_path: Path) -> None:
    made = make_checkpoint(tmp_path, LARGE)
    done = served(made)
    assert moved(done) == []
    for text in done.afterwards:
        verdict = recompute(Receipt.from_json(text), str(made))
        assert verdict, verdict

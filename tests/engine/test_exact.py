"""Exact arithmetic in a real engine: the bits of the definition, in any batch, on any instructions and threads."""

import copy
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.engines import (
    Result,
    certified,
    differing_answers,
    run,
    tokens,
)
from tests.engine.plans import alone_and_among, moved, targets
from tests.known_model import save_known_model
from tests.ops.exact.families import FAMILIES, save
from vllm_batch_invariant.envs import ARITHMETIC, TP_TREE
from vllm_batch_invariant.ops.exact import FORMAT
from vllm_batch_invariant.verify.bisect.engine import WORKER_EXTENSION
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness import worker
from vllm_batch_invariant.verify.harness.worker import Engine, EngineFailed
from vllm_batch_invariant.verify.outcome import NoTestError, Outcome
from vllm_batch_invariant.verify.receipt import Receipt
from vllm_batch_invariant.verify.receipt.recompute import decoder_of, recompute

pytestmark = [
    pytest.mark.engine,
    pytest.mark.core,
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_exact_cuda.py runs engines on a GPU"),
]

EXACT = {ARITHMETIC.name: "exact"}
OLD = {
    "MKL_CBWR": "COMPATIBLE",
    "ATEN_CPU_CAPABILITY": "default",
    "NUMBA_CPU_NAME": "haswell",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "VLLM_CPU_OMP_THREADS_BIND": "0",
}
"""Variables by which libraries behave as on an older CPU, with one thread."""


SMALL = {
    "vocab_size": 300,
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
"""Sizes of a model that Triton's interpreter computes in a minute."""
LAYER = re.compile(r"\.(embed_tokens|\w+_(proj|emb|fn|layernorm|norm)|attn)$")
"""Paths of layers that compute; others put these together."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model of the known answers, which is made of integers, as a checkpoint."""
    return save_known_model(tmp_path_factory.mktemp("known"))


def started(
    model: Path, environment: dict[str, str], settings: dict[str, Any] | None = None, **options: object
) -> Result:
    limits = {"model": str(model), "max_model_len": 1024, "max_num_seqs": 48, "max_num_batched_tokens": 128}
    steps = [step for step in alone_and_among() if step["name"] != "among 40"]
    return run(limits | {"skip_tokenizer_init": True} | (settings or {}), steps, "1", **options, **environment)


def shared(model: Path, workers: int, stages: int, **options: object) -> Result:
    """By tensor-parallel workers in stages, on two cores."""
    cores = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(worker % 2) for worker in range(workers * stages))}
    settings = {"tensor_parallel_size": workers, "pipeline_parallel_size": stages}
    return started(model, EXACT | cores, settings, **options)


@pytest.fixture(scope="module")
def exact(model: Path) -> Result:
    return started(model, EXACT, receipts_of=tokens(90, 1), afterwards=certified)


def test_a_request_has_the_same_bits_alone_among_others_in_chunks_and_from_a_warm_cache(exact: Result) -> None:
    assert moved(exact) == []


def test_a_receipt_is_computed_again_without_an_engine(exact: Result, model: Path) -> None:
    receipt = Receipt.from_json(exact.receipts["receipt"])
    assert receipt.environment.exact_format == FORMAT
    verdict = recompute(receipt, str(model))
    assert verdict, verdict
    assert verdict.promised
    ids = receipt.completion.token_ids
    changed = replace(receipt.completion, token_ids=(*ids[:5], 7, *ids[6:]))
    assert recompute(replace(receipt, completion=changed), str(model)).difference.position == 5
    with pytest.raises(NoTestError, match="not in another arithmetic"):
        recompute(replace(receipt, environment=replace(receipt.environment, reductions={})), str(model))


def test_a_check_finds_the_known_answers(exact: Result) -> None:
    results = exact.afterwards.results
    [known] = [case for case in results.cases if case.guarantee == "hardware"]
    assert known.outcome is Outcome.HOLDS
    assert [case for case in results.cases if case.outcome is Outcome.BREAKS] == []
    assert f"Exact arithmetic {FORMAT}" in exact.log


@pytest.mark.exhaustive
def test_older_instructions_and_fewer_threads_move_no_bit_and_would_those_of_the_other_arithmetic(
    exact: Result, model: Path
) -> None:
    assert differing_answers(targets(started(model, EXACT | OLD)), targets(exact)) == []
    assert differing_answers(targets(started(model, {})), targets(started(model, OLD)))


@pytest.mark.exhaustive
def test_what_has_no_definition_is_refused_by_name(checkpoint: Path) -> None:
    for arguments, environment, said in (
        (["--dtype", "float32"], {}, "dtype float32"),
        ([], {TP_TREE.name: "2"}, f"{TP_TREE.name}=2"),
    ):
        with pytest.raises(EngineFailed, match=f"{said} in exact arithmetic"):
            Engine(str(checkpoint), arguments, "1", EXACT | environment).__enter__()


def by_both(
    settings: dict[str, Any], steps: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> tuple[Result, Result]:
    """An engine by the CPU's kernels, and one by the GPU's in Triton's interpreter, as those that follow are."""
    by_cpu = run(settings, steps, "1", **EXACT)
    monkeypatch.setattr(worker, "DRIVER", "tests.engine.exact_interpreted")
    by_gpu = run(settings, steps, "1", TRITON_INTERPRET="1", **EXACT)
    assert [name.rpartition(".")[2] for name in by_gpu.kernels["cpu_linear"]] == ["ExactCudaLinear"]
    return by_cpu, by_gpu


@pytest.mark.exhaustive
def test_the_gpus_kernels_in_tritons_interpreter_move_no_bit_of_an_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    shape = Shape(hidden=64, intermediate=96, layers=1, heads=2, kv_heads=1, head_size=64, vocab=300, max_length=64)
    settings = {"model": str(make_checkpoint(tmp_path, shape)), "max_num_seqs": 4, "max_num_batched_tokens": 32}
    asked = [
        {"prompt": [3, 7, 50, 21, 9], "params": {"temperature": 0.0, "max_tokens": 3, "logprobs": 2}},
        {"prompt": [*range(40, 80)], "params": {"temperature": 0.0, "max_tokens": 2, "prompt_logprobs": 2}},
        {"prompt": [1, 2, 99], "params": {"temperature": 1.0, "seed": 7, "top_k": 20, "top_p": 0.9, "max_tokens": 4}},
    ]
    steps = [{"name": "all", "requests": asked}]
    settings |= {"max_model_len": 64, "skip_tokenizer_init": True}
    by_cpu, by_gpu = by_both(settings, steps, monkeypatch)
    assert differing_answers(by_gpu.steps["all"], by_cpu.steps["all"]) == []
    assert differing_answers(by_gpu.steps["all"], run(settings, steps, "1").steps["all"]) != []


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith(("Gemma", "Granite", "Phi"))])
@pytest.mark.exhaustive
def test_the_gpus_kernels_move_no_bit_of_an_engine_of_a_family(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("triton")
    config = copy.deepcopy(FAMILIES[family])
    config.update(SMALL)
    save(config, tmp_path)
    settings = {"model": str(tmp_path), "max_num_seqs": 2, "max_num_batched_tokens": 64, "max_model_len": 64}
    settings |= {"skip_tokenizer_init": True}
    asked = [{"prompt": [*range(40, 97)], "params": {"temperature": 0.0, "max_tokens": 2, "logprobs": 2}}]
    steps = [{"name": "all", "requests": asked}]
    by_cpu, by_gpu = by_both(settings, steps, monkeypatch)
    assert differing_answers(by_gpu.steps["all"], by_cpu.steps["all"]) == []


@pytest.mark.parametrize(("workers", "stages"), [(2, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.exhaustive
def test_workers_and_stages_move_no_bit(workers: int, stages: int, exact: Result, model: Path) -> None:
    done = shared(model, workers, stages)
    assert differing_answers(targets(done), targets(exact)) == []


@pytest.mark.parametrize("family", [name for name in FAMILIES if name.startswith(("Gemma", "Granite", "Phi"))])
@pytest.mark.exhaustive
def test_workers_and_stages_of_a_family_have_the_bits_of_its_decoder(family: str, tmp_path: Path) -> None:
    save(FAMILIES[family], tmp_path)
    done = shared(tmp_path, 2, 2, receipts_of=tokens(150, 1))
    verdict = recompute(Receipt.from_json(done.receipts["receipt"]), str(tmp_path))
    assert verdict, verdict


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.exhaustive
def test_every_family_has_the_bits_of_its_decoder(family: str, tmp_path: Path) -> None:
    save(FAMILIES[family], tmp_path)
    done = started(
        tmp_path, EXACT, {"worker_extension_cls": WORKER_EXTENSION}, receipts_of=tokens(150, 1),
        afterwards=lambda running: running.call("tests.engine.receipts:traced", tokens(60, 2)),
    )  # fmt: skip
    assert moved(done) == []
    traced = Receipt.from_json(done.afterwards)
    for receipt in (Receipt.from_json(done.receipts["receipt"]), traced):
        verdict = recompute(receipt, str(tmp_path))
        assert verdict, verdict
    names = set()
    decoder_of(tmp_path).logits([1, 2, 3], seen=lambda name, made: names.add(name))
    layers = {name for name in traced.trace[0].digests if LAYER.search(name)}
    assert {name.rpartition(".")[2] for name in layers} >= {"embed_tokens", "qkv_proj", "act_fn", "attn", "o_proj"}
    assert layers <= names

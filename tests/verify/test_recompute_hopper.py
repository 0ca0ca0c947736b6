"""A receipt in a Hopper's usual arithmetic is computed again without an engine, once a GPU has confirmed how."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.hopper_receipts import save_model
from tests.known_model import save_known_model
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.ops.hopper import confirmed, known_answers, tables
from vllm_batch_invariant.ops.hopper.confirmed import (
    ALL,
    OF_CODES,
    OF_EXPERTS,
    OF_FAMILIES,
    OF_SEEDS,
    OPERATIONS,
    Confirmed,
)
from vllm_batch_invariant.ops.hopper.decoder import PLAIN, HopperDecoder
from vllm_batch_invariant.ops.moe import MoeReduction
from vllm_batch_invariant.ops.scaled_linear import E4M3, WGMMA, ScaledLinearReduction
from vllm_batch_invariant.provenance import Environment, plain
from vllm_batch_invariant.verify.outcome import NoTestError
from vllm_batch_invariant.verify.quantised_model import quantise
from vllm_batch_invariant.verify.receipt.hopper import Hopper, attention, codes
from vllm_batch_invariant.verify.receipt.model_files import model_at
from vllm_batch_invariant.verify.receipt.recompute import config_of, recompute, weights_of
from vllm_batch_invariant.verify.receipt.record import Completion, Prompt, Receipt, Sampling

PROMPT = tuple(range(40, 50))
MACHINE = {"gpu": "NVIDIA H200", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0", "vllm": "0.33.0"}
ENVIRONMENT = Environment(
    mode=True,
    versions={"vllm": "0.33.0", "torch": "2.11.0", "triton": "3.6.0", "cuda": "13.0"},
    device={"type": "cuda", "name": "NVIDIA H200", "capability": "9.0"},
    engine={"dtype": "bfloat16", "kv_cache_dtype": "auto", "logprobs_mode": "raw_logprobs", "model_runner": "second"},
    reductions={"attention": attention(), "norm": {}, "softmax (logprobs)": {}},
)


@pytest.fixture(scope="module")
def ideal() -> tables.Tables:
    return tables.ideal()


@pytest.fixture(scope="module")
def hopper(ideal: tables.Tables) -> Hopper:
    """As if a GPU had rounded every special function to the nearest, and every operation been confirmed."""
    every = (*OPERATIONS, *OF_SEEDS)
    answers = known_answers.digests(ideal, ALL)
    return Hopper(Confirmed(MACHINE, ideal.digest, answers, dict.fromkeys(every, 1), dict.fromkeys(every, 0)), ideal)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_known_model(tmp_path_factory.mktemp("known"))


def receipt_of(folder: Path, tables_of_gpu: tables.Tables, sampling: Sampling) -> Receipt:
    """Of tokens that the plain definition takes one after the other."""
    decoder = HopperDecoder(config_of(folder), weights_of(folder, Hopper.dtypes), tables_of_gpu, kernels=PLAIN)
    tokens, positions = [*PROMPT], []
    for _ in range(sampling.max_tokens):
        [logits] = decoder.logits(tokens, slice(len(tokens) - 1, None))
        [logprobs] = decoder.log_softmax(logits[None])
        token = int(logits.argmax())
        if sampling.temperature:
            token = decoder.draw(logits, sampling, len(tokens) - 1)
        listed = {*np.argsort(-logits, kind="stable")[: sampling.logprobs].tolist(), token}
        positions.append((token, float(logprobs[token]), [(one, float(logprobs[one])) for one in listed]))
        tokens.append(token)
    model, completion = model_at(folder, "known"), Completion.of(positions, "length")
    return Receipt(model, Prompt.of(PROMPT), sampling, completion, ENVIRONMENT)


@pytest.fixture(scope="module")
def greedy(folder: Path, ideal: tables.Tables) -> Receipt:
    return receipt_of(folder, ideal, Sampling(max_tokens=4, logprobs=3))


@pytest.fixture(scope="module")
def seeded(folder: Path, ideal: tables.Tables) -> Receipt:
    how = {"temperature": 0.8, "seed": -5, "top_k": 100, "top_p": 0.9}
    return receipt_of(folder, ideal, Sampling(max_tokens=4, logprobs=3, **how))


def test_tokens_that_are_drawn_with_a_seed_are_drawn_again(folder: Path, seeded: Receipt, hopper: Hopper) -> None:
    verdict = recompute(seeded, str(folder), hopper=hopper)
    assert verdict, verdict
    other = replace(seeded, sampling=replace(seeded.sampling, seed=6))
    assert recompute(other, str(folder), hopper=hopper).difference


def test_a_seed_that_no_gpu_has_confirmed_refuses(seeded: Receipt, hopper: Hopper) -> None:
    known = Hopper(replace(hopper.confirmed, different=hopper.confirmed.different | {"noise": 1}), hopper.tables)
    with pytest.raises(NoTestError, match="no GPU has confirmed noise"):
        recompute(seeded, "nowhere", hopper=known)
    for part, fields, said in (
        ("versions", {"vllm": "0.31.0"}, "the noise of vLLM 0.31.0"),
        ("engine", {"model_runner": "first"}, "first model runner"),
    ):
        environment = replace(ENVIRONMENT, **{part: getattr(ENVIRONMENT, part) | fields})
        with pytest.raises(NoTestError, match=said):
            recompute(replace(seeded, environment=environment), "nowhere", hopper=hopper)


def test_decoding_token_by_token_has_the_bits_of_one_prefill(folder: Path, greedy: Receipt, hopper: Hopper) -> None:
    verdict = recompute(greedy, str(folder), hopper=hopper)
    assert verdict, verdict
    assert verdict.promised
    assert "usual arithmetic of a Hopper" in verdict.compared


def test_a_changed_bit_is_found_at_its_token(folder: Path, greedy: Receipt, hopper: Hopper) -> None:
    bits = greedy.completion.logprobs
    changed = (*bits[:2], f"{int(bits[2], 16) ^ 1:08x}", *bits[3:])
    verdict = recompute(
        replace(greedy, completion=replace(greedy.completion, logprobs=changed)), str(folder), hopper=hopper
    )
    assert not verdict
    assert verdict.difference.position == 2


def test_another_entry_of_a_table_is_found(folder: Path, greedy: Receipt, hopper: Hopper) -> None:
    other = tables.Tables(hopper.tables.exp2 - 100, hopper.tables.rcp)
    known = replace(hopper.confirmed, tables=other.digest, definition=known_answers.digests(other, ALL))
    assert not recompute(greedy, str(folder), hopper=Hopper(known, other))


def test_other_versions_than_were_compared_are_named(folder: Path, greedy: Receipt, hopper: Hopper) -> None:
    known = Hopper(replace(hopper.confirmed, machine=MACHINE | {"triton": "3.8.0"}), hopper.tables)
    verdict = recompute(greedy, str(folder), hopper=known)
    assert not verdict.promised
    assert "compared with triton 3.8.0 and not 3.6.0" in str(verdict)


@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_operation_that_no_gpu_has_confirmed_refuses(operation: str, greedy: Receipt, hopper: Hopper) -> None:
    for counts in ({"values": hopper.confirmed.values | {operation: 0}}, {"different": {operation: 1}}):
        known = Hopper(replace(hopper.confirmed, **counts), hopper.tables)
        with pytest.raises(NoTestError, match=f"no GPU has confirmed .*{operation}"):
            recompute(greedy, "nowhere", hopper=known)


def test_tables_that_were_not_the_compared_ones_refuse(greedy: Receipt, hopper: Hopper) -> None:
    for known in (Hopper(hopper.confirmed, None), Hopper(replace(hopper.confirmed, tables="other"), hopper.tables)):
        with pytest.raises(NoTestError, match="no GPU has confirmed the special functions"):
            recompute(greedy, "nowhere", hopper=known)


@pytest.mark.parametrize("operation", ["attention", "rms_norm"])
def test_a_definition_that_was_changed_since_refuses(operation: str, greedy: Receipt, hopper: Hopper) -> None:
    changed = hopper.confirmed.definition | {operation: "0123456789abcdef"}
    known = Hopper(replace(hopper.confirmed, definition=changed), hopper.tables)
    with pytest.raises(NoTestError, match=f"no GPU has confirmed what has changed since in {operation};"):
        recompute(greedy, "nowhere", hopper=known)


@pytest.mark.parametrize(
    ("name", "operations"),
    [
        ("mistral", {"windows"}),
        ("gemma2", {*OF_FAMILIES} - {"linear_angles"}),
        ("gemma3", {*OF_FAMILIES} - {"capped_scores", "capped_logits"}),
    ],
)
def test_a_family_is_computed_where_a_gpu_has_confirmed_what_it_adds(
    name: str, operations: set[str], ideal: tables.Tables, hopper: Hopper, tmp_path: Path
) -> None:
    made = receipt_of(save_model(tmp_path / name, name), ideal, Sampling(max_tokens=2, logprobs=2))
    in_order = [operation for operation in OF_FAMILIES if operation in operations]
    with pytest.raises(NoTestError, match=f"of this model are not .* confirmed {', '.join(in_order)}$"):
        recompute(made, str(tmp_path / name), hopper=hopper)
    values, different = hopper.confirmed.values | dict.fromkeys(operations, 1), dict.fromkeys(ALL, 0)
    known = Hopper(replace(hopper.confirmed, values=values, different=different), ideal)
    assert recompute(made, str(tmp_path / name), hopper=known)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sampling": {"temperature": 1.0, "seed": 3, "min_p": 0.1}}, "min_p"),
        ({"sampling": {"repetition_penalty": 1.1}}, "penalties"),
        ({"sampling": {"min_tokens": 1}}, "min_tokens"),
        ({"environment": {"device": {"type": "cuda", "capability": "10.0"}}}, "not in another arithmetic"),
        ({"environment": {"mode": False}}, "not in another arithmetic"),
        ({"environment": {"engine": {"dtype": "float16"}}}, "dtype float16"),
        ({"environment": {"engine": {"kv_cache_dtype": "fp8"}}}, "kv_cache_dtype fp8"),
        ({"environment": {"engine": {"tensor_parallel_size": "2"}}}, "tensor_parallel_size 2"),
        ({"environment": {"engine": {"tensor_parallel_tree": "0"}}}, "tensor_parallel_tree 0"),
        ({"environment": {"engine": {"tensor_parallel_tree": "many"}}}, "tensor_parallel_tree many"),
        ({"environment": {"engine": {"model_runner": "third"}}}, "model_runner third"),
        ({"environment": {"reductions": {"experts 1": {}}}}, "experts 1"),
        ({"environment": {"reductions": {"attention": {"implementation": "flex"}}}}, "attention with"),
    ],
)
def test_what_is_not_computed_here_refuses(greedy: Receipt, hopper: Hopper, changes: dict, said: str) -> None:
    [(part, fields)] = changes.items()
    with pytest.raises(NoTestError, match=said):
        recompute(replace(greedy, **{part: replace(getattr(greedy, part), **fields)}), "nowhere", hopper=hopper)


def test_receipts_of_codes_are_computed_where_a_gpu_has_confirmed_them(
    folder: Path, ideal: tables.Tables, hopper: Hopper, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "fp8")
    quantise(tmp_path / "fp8", "w8a8-fp8-block")
    environment = replace(ENVIRONMENT, reductions=ENVIRONMENT.reductions | codes())
    made = replace(receipt_of(tmp_path / "fp8", ideal, Sampling(max_tokens=3, logprobs=2)), environment=environment)
    with pytest.raises(NoTestError, match="no GPU has confirmed quantise, scaled_linear"):
        recompute(made, str(tmp_path / "fp8"), hopper=hopper)
    counts = dict.fromkeys(OF_CODES, 1), dict.fromkeys(OF_CODES, 0)
    values, different = (
        of | more for of, more in zip((hopper.confirmed.values, hopper.confirmed.different), counts, strict=True)
    )
    known = Hopper(replace(hopper.confirmed, values=values, different=different), hopper.tables)
    assert recompute(made, str(tmp_path / "fp8"), hopper=known)
    with pytest.raises(NoTestError, match="has layers of codes, and the files no layers of codes"):
        recompute(replace(made, model=model_at(folder, "known")), str(folder), hopper=known)
    with pytest.raises(NoTestError, match="has no layers of codes, and the files layers of codes"):
        recompute(replace(made, environment=ENVIRONMENT), str(tmp_path / "fp8"), hopper=known)
    other = {"linear (FP8 by block)": codes()["linear (FP8 by block)"] | {"mma": "exact"}}
    environment = replace(environment, reductions=environment.reductions | other)
    with pytest.raises(NoTestError, match=r"linear .FP8 by block. with"):
        recompute(replace(made, environment=environment), str(tmp_path / "fp8"), hopper=known)


def test_receipts_of_experts_are_computed_where_a_gpu_has_confirmed_them(greedy: Receipt, hopper: Hopper) -> None:
    of = plain(MoeReduction(16, 4, torch.bfloat16))
    environment = replace(ENVIRONMENT, reductions=ENVIRONMENT.reductions | {"experts 1": of})
    for changes, said in (
        ({}, "no GPU has confirmed route, experts"),
        ({"reductions": {"experts 1": of | {"scoring": "sigmoid"}}}, "the definition has experts 1 with"),
        ({"reductions": {"experts 1": plain(fp8_experts())}}, "no GPU has confirmed quantise, scaled_linear"),
        ({"engine": environment.engine | {"tensor_parallel_tree": "2"}}, "experts with a tree"),
    ):
        with pytest.raises(NoTestError, match=said):
            recompute(replace(greedy, environment=replace(environment, **changes)), "nowhere", hopper=hopper)


@pytest.mark.parametrize(
    ("weights", "dtype", "said"),
    [
        ("layers.0.input_layernorm", torch.float32, "input_layernorm.weight in fp32"),
        ("layers.1.mlp.down_proj", torch.float32, "down_proj.weight in fp32"),
        ("embed_tokens", E4M3, "embed_tokens.weight as codes of e4m3"),
        ("layers.0.mlp.up_proj", E4M3, "up_proj.weight as codes of e4m3"),
    ],
)
def test_a_weight_that_an_engine_would_round_refuses(
    weights: str, dtype: torch.dtype, said: str, folder: Path, greedy: Receipt, hopper: Hopper, tmp_path: Path
) -> None:
    """Its bits are read as those of no other dtype."""
    shutil.copytree(folder, tmp_path / "other")
    made = load_file(folder / "model.safetensors")
    changed = {name: one.to(dtype) if weights in name else one for name, one in made.items()}
    save_file(changed, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(NotCovered, match=said):
        recompute(greedy, str(tmp_path / "other"), hopper=hopper)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("mixture"), "qwen3-moe")


@pytest.mark.parametrize(
    ("config", "reductions", "said"),
    [
        ({}, {}, r"the experts \[\], and the files"),
        ({}, {"experts 1": MoeReduction(128, 8, torch.bfloat16)}, "'num_experts': 128.* and the files .*: 16"),
        ({"norm_topk_prob": False}, None, "'renormalise': 'True'.* and the files .*'False'"),
        ({"num_experts_per_tok": 17}, None, "17 of 16 experts"),
        ({"num_experts_per_tok": 0}, None, "0 of 16 experts"),
        ({"num_experts": 8}, {"experts 1": MoeReduction(8, 4, torch.bfloat16)}, "a router of 16"),
        ({"num_attention_heads": "4"}, None, "do not fit together"),
        ({"mlp_only_layers": [0]}, None, "do not fit together: 'model.layers.0.mlp.gate_proj.weight'"),
        ({"shared_expert_intermediate_size": 64}, None, "experts that all tokens share"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, None, "attention in chunks"),
        ({"quantization_config": ["fp8"]}, None, "a quantisation that is no table"),
    ],
)
def test_a_receipt_of_experts_is_of_those_of_the_files(
    config: dict, reductions: dict | None, said: str, greedy: Receipt, mixture: Path, tmp_path: Path
) -> None:
    shutil.copytree(mixture, tmp_path / "other")
    (tmp_path / "other" / "config.json").write_text(json.dumps(config_of(mixture) | config))
    of = {"experts 1": MoeReduction(16, 4, torch.bfloat16)} if reductions is None else reductions
    given = ENVIRONMENT.reductions | {name: plain(one) for name, one in of.items()}
    made = replace(greedy, environment=replace(ENVIRONMENT, reductions=given))
    with pytest.raises((NoTestError, NotCovered), match=said):
        recompute(made, str(tmp_path / "other"), hopper=Hopper.here())


def fp8_experts() -> MoeReduction:
    product = ScaledLinearReduction.of(128, torch.bfloat16, E4M3, True, WGMMA)
    return MoeReduction(16, 4, torch.bfloat16, renormalise=False, products=product)


def test_what_this_package_has_confirmed_is_of_its_tables_and_its_definition() -> None:
    known = Hopper.here()
    assert known.tables.digest == known.confirmed.tables
    assert not known.missing((*OPERATIONS, *OF_SEEDS, *OF_CODES, *OF_EXPERTS))
    answers = known_answers.digests(known.tables, ALL)
    assert known.confirmed.definition.items() <= answers.items()
    assert answers.keys() <= {*ALL}
    other = known_answers.digests(tables.Tables(known.tables.exp2 - 100, known.tables.rcp), answers)
    assert {name for name in other if other[name] != answers[name]} >= {"attention", "silu_and_mul", "log_softmax"}


def test_a_record_survives_a_file(tmp_path: Path, hopper: Hopper) -> None:
    (tmp_path / "confirmed.json").write_text(hopper.confirmed.to_json())
    assert confirmed.recorded(tmp_path / "confirmed.json") == hopper.confirmed
    assert json.loads(hopper.confirmed.to_json())["machine"] == MACHINE

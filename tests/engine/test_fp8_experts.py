"""An engine of experts in FP8, weights and activations, gives a request the same tokens and logprobs with any others,
in chunks and from a warm prefix cache; and when weights are replaced, those of an engine that was started with them.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine.engines import EngineFailed, untried_on_gpu
from tests.engine.kept_states import needs_two
from tests.engine.test_experts import OF_TWO_WORKERS
from tests.engine.test_experts_of_workers import in_fp8
from tests.engine.test_fp8 import BLOCKS, CHUNK, SHAPE, Answers, Checkpoints, asked_of, compare_with_a_trainer
from vllm_batch_invariant.hf import engine_weights
from vllm_batch_invariant.integration.reviews import patch_points

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not patch_points.LINEAR_CHOICE.is_there(), reason="refused with this vLLM"),
]

OF_EXPERTS = replace(SHAPE, experts=6, top_k=2, expert_intermediate=256, dense_layers=0)
"""Experts of the first layer decide keys of the second, which are made beside other requests."""
COMPRESSED = "compressed-tensors by blocks"
ROWS = "compressed-tensors by rows"
GIVEN = [
    pytest.param("fp8 by tensors, given", marks=pytest.mark.exhaustive),
    pytest.param("compressed-tensors by tensors, given", marks=pytest.mark.exhaustive),
    pytest.param("ModelOpt's by tensors, given", marks=[pytest.mark.exhaustive, untried_on_gpu]),
]
OTHERS = [ROWS, pytest.param("fp8 by tensors", marks=pytest.mark.exhaustive), *GIVEN]
WAYS = ("by_reload_weights", "by_hand")
FAULT = "one_scale_of_experts"


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("fp8-experts"), OF_EXPERTS)


@pytest.fixture(scope="module")
def engines(checkpoints: Checkpoints) -> tuple[Answers, Answers]:
    """An engine of vLLM's format, which prefills in chunks and whose weights are replaced; and one that was started
    with the other weights in the format of compressed-tensors, and prefills a prompt at once.
    """
    calls: dict[str, tuple[Any, ...]] = {}
    for way in WAYS:
        calls |= {f"{way} other": (way, checkpoints.of(BLOCKS, 1)), f"{way} back": (way, checkpoints.of(BLOCKS))}
    settings = {"max_num_batched_tokens": CHUNK}, {"max_num_batched_tokens": 512}
    arguments = (checkpoints.of(BLOCKS), calls, settings[0]), (checkpoints.of(COMPRESSED, 1), {}, settings[1])
    if torch.cuda.is_available():
        first, other = (asked_of(*of_engine, FAULT) for of_engine in arguments)
        return first, other
    with ThreadPoolExecutor(2) as pool:
        first, other = (pool.submit(asked_of, *of_engine, FAULT) for of_engine in arguments)
        return first.result(), other.result()


@pytest.fixture(scope="module", params=OTHERS)
def other_form(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> tuple[str, Answers]:
    """An engine of experts whose scales are of no blocks, which prefills in chunks."""
    form = request.param
    calls: dict[str, tuple[Any, ...]] = {}
    for way in WAYS:
        calls |= {f"{way} other": (way, checkpoints.of(form, 1)), f"{way} back": (way, checkpoints.of(form))}
    return form, asked_of(checkpoints.of(form), calls, {"max_num_batched_tokens": CHUNK}, FAULT)


def test_a_request_has_the_same_bits_alone_among_others_in_chunks_and_from_the_cache(engines) -> None:
    for answers in engines:
        alone, warm, among_others = answers["fresh"]
        assert alone == warm == among_others


def test_experts_with_scales_of_rows_or_matrices_keep_the_bits_of_a_request(other_form: tuple[str, Answers]) -> None:
    """And where weights come again."""
    _, answers = other_form
    alone, warm, among_others = answers["fresh"]
    assert alone == warm == among_others
    for way in WAYS:
        assert answers[f"{way} other"][0] != alone == answers[f"{way} back"][0]


@pytest.mark.exhaustive
def test_new_scales_of_rows_or_matrices_give_the_bits_of_a_new_engine(
    other_form: tuple[str, Answers], checkpoints: Checkpoints
) -> None:
    """Which does not prefill in chunks."""
    form, answers = other_form
    other = asked_of(checkpoints.of(form, 1), {}, {"max_num_batched_tokens": 512}, FAULT)
    assert {str(answers[f"{way} other"][0]) for way in WAYS} == {str(other["fresh"][0])}


@pytest.mark.exhaustive
@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=needs_two)])
def test_a_glm_of_rows_keeps_the_bits_of_a_request(tmp_path: Path, workers: int) -> None:
    """As GLM-4.5 in FP8: with groups of experts, shared ones, and a dense layer."""
    of_workers = OF_TWO_WORKERS if workers > 1 else {}
    settings = {"tensor_parallel_size": workers, "max_num_batched_tokens": CHUNK, "dtype": "bfloat16"}
    answers = asked_of(str(in_fp8(tmp_path, ROWS)), {}, settings, FAULT, **of_workers)
    alone, warm, among_others = answers["fresh"]
    assert alone == warm == among_others
    if workers == 1 and not torch.cuda.is_available():  # where the fault is planted
        alone, _, among_others = answers["one scale"]
        assert alone != among_others


@pytest.mark.exhaustive
def test_negative_scales_are_refused(checkpoints: Checkpoints, tmp_path: Path) -> None:
    shutil.copytree(checkpoints.of(ROWS), tmp_path / "negative")
    file = tmp_path / "negative" / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("experts.1.down_proj.weight_scale"))
    save_file(tensors | {name: -tensors[name]}, file, metadata={"format": "pt"})
    with pytest.raises(EngineFailed, match=r"layers\.\d\.mlp\.experts whose w2_weight_scale is missing, negative"):
        asked_of(str(tmp_path / "negative"), {}, {}, FAULT)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA graphs keep what they captured")
def test_one_scale_of_all_tokens_is_found_where_rows_have_scales(other_form: tuple[str, Answers]) -> None:
    _, answers = other_form
    alone, _, among_others = answers["one scale"]
    assert alone != among_others


@pytest.mark.parametrize("way", WAYS)
def test_codes_and_scales_that_come_again_serve(engines: tuple[Answers, Answers], way: str) -> None:
    """As those of the other engine do: of the same numbers by another name, and not in chunks."""
    first, other = engines
    assert first[f"{way} other"][0] == other["fresh"][0] != first["fresh"][0]
    assert first[f"{way} back"][0] == first["fresh"][0]


@untried_on_gpu
def test_a_trainer_has_the_logprobs_of_both_engines_and_the_codes_of_a_checkpoint(
    engines: tuple[Answers, Answers], checkpoints: Checkpoints
) -> None:
    for seed, answers in enumerate(engines):
        trainer = compare_with_a_trainer(answers, checkpoints.of("plain", seed), "fp8_per_block")
        stored = load_file(Path(checkpoints.of(BLOCKS, seed)) / "model.safetensors")
        made = dict(engine_weights(trainer))
        assert made.keys() == stored.keys()
        for name, tensor in made.items():
            assert torch.equal(tensor.view(torch.uint8), stored[name].view(torch.uint8)), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA graphs keep what they captured")
def test_one_scale_of_all_tokens_of_experts_is_found(engines: tuple[Answers, Answers]) -> None:
    """So the comparisons above see what depends on company."""
    for answers in engines:
        alone, _, among_others = answers["one scale"]
        assert alone != among_others


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("form", GIVEN)
def test_a_given_scale_is_that_of_all_experts_and_refused_where_workers_have_whole_ones(
    checkpoints: Checkpoints, form: str
) -> None:
    """Each would have the largest of its own. By columns a request has the same bits in any company."""
    parallel: dict[str, Any] = {"tensor_parallel_size": 2}
    of_two = asked_of(checkpoints.of(form), {}, parallel, FAULT, **OF_TWO_WORKERS)
    alone, warm, among_others = of_two["fresh"]
    assert alone == warm == among_others
    with pytest.raises(EngineFailed, match=r"given scales of what the experts of .* by workers with whole experts"):
        asked_of(checkpoints.of(form), {}, parallel | {"enable_expert_parallel": True}, FAULT, **OF_TWO_WORKERS)


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", GIVEN)
def test_other_given_scales_serve(checkpoints: Checkpoints, tmp_path: Path, form: str) -> None:
    """As those of an engine that was started with them."""
    folder = shutil.copytree(checkpoints.of(form), tmp_path / "other")
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name: scale * 2 for name, scale in tensors.items() if name.endswith("input_scale")}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    calls: dict[str, tuple[Any, ...]] = {}
    for way in WAYS:
        calls |= {f"{way} other": (way, str(folder)), f"{way} back": (way, checkpoints.of(form))}
    answers, fresh = asked_of(checkpoints.of(form), calls, {}, FAULT), asked_of(str(folder), {}, {}, FAULT)
    assert answers["fresh"][0] != fresh["fresh"][0]
    for way in WAYS:
        assert (answers[f"{way} other"][0], answers[f"{way} back"][0]) == (fresh["fresh"][0], answers["fresh"][0])


@pytest.mark.exhaustive
@pytest.mark.parametrize("form", GIVEN[::2])
def test_gate_and_up_that_are_given_two_scales_are_refused(checkpoints: Checkpoints, tmp_path: Path, form: str) -> None:
    """Which vLLM writes to one number, in the order of a checkpoint or of a trainer."""
    folder = shutil.copytree(checkpoints.of(form), tmp_path / "two")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.up_proj.input_scale"] *= 2
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(EngineFailed, match=r"several scales for what an expert of .*layers\.1.* is given"):
        asked_of(str(folder), {}, {}, FAULT)


@pytest.mark.exhaustive
@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("shared", ["by columns", "whole"])
@pytest.mark.parametrize(
    "forms", [(BLOCKS, COMPRESSED), (ROWS, ROWS), ("fp8 by tensors",) * 2], ids=["blocks", "rows", "tensors"]
)
def test_workers_that_share_experts_leave_a_request_its_bits(
    checkpoints: Checkpoints, forms: tuple[str, str], shared: str
) -> None:
    """In chunks and, with blocks by another name, at once."""
    parallel = {"tensor_parallel_size": 2, "enable_expert_parallel": shared == "whole"}
    chunks = {"max_num_batched_tokens": CHUNK}
    in_chunks, whole = (checkpoints.of(form) for form in forms)
    of_two = asked_of(in_chunks, {}, parallel | chunks, FAULT, **OF_TWO_WORKERS)
    at_once = asked_of(whole, {}, parallel, FAULT, **OF_TWO_WORKERS)
    alone, warm, among_others = of_two["fresh"]
    assert alone == warm == among_others
    assert alone == at_once["fresh"][0]

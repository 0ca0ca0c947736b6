"""Quantised weights with latent attention: a request has the same bits alone and among others, from chunks of any size,
after a preemption, from the prefix cache, and in pages of NaN; of weights alone that are quantised those of the
matrices that they stand for. In every format W_UK and W_UV are parts of the matrix that codes stand for.
"""

import shutil
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import kept_states, mla
from tests.engine.drafters import predict_by_last_layer
from tests.engine.engines import untried_on_gpu
from tests.engine.kept_states import REPEATING, SAME, decodes_as_it_prefills, drafted_requests, started
from tests.engine.mla import BLOCKS, EDGES, FORMS, INTEGERS, ROWS
from tests.engine.quantised_experts import int8_of
from tests.engine.quantised_layers import KEPT, write
from tests.engine.test_mla import DEFAULT, EXTENSION, ONE, UNCACHED, WAYS, WHOLE
from tests.quantised_checkpoints import Stored
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.requests import NGRAMS
from vllm_batch_invariant.verify.harness.worker import Engine

COVERED = reviews.ran().latent["cuda" if torch.cuda.is_available() else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
CASES = [
    *(("V3", form) for form in FORMS),
    *(("GLM-4.7-Flash", form) for form in (BLOCKS, ROWS, INTEGERS)),
    ("V2-Lite", BLOCKS),
    ("Moonlight", INTEGERS),
]
NEAR, NEAR_IN_CODES = 0.1, 0.75
"""Of logprobs in fp16: codes of activations have three bits behind the first, and what rounds otherwise moves some."""
of_cases = pytest.mark.parametrize(("name", "form"), CASES, ids=[", ".join(case) for case in CASES])
of_codes = pytest.mark.parametrize(("name", "form"), [case for case in CASES if not isinstance(FORMS[case[1]], Stored)])
of_matrices = pytest.mark.parametrize(("name", "form"), [case for case in CASES if isinstance(FORMS[case[1]], Stored)])


class Case(NamedTuple):
    """Checkpoints of one model: its quantised weights, the matrices that these stand for, and what an engine gave."""

    packed: Path
    unpacked: Path
    found: dict[str, Any]


def quantised(form: str, folder: Path, source: Path) -> tuple[Path, Path]:
    """A checkpoint in a form, and that of the matrices that it stands for."""
    packed, unpacked = folder / "packed", folder / "unpacked"
    write(source, FORMS[form], packed, unpacked)
    if form == BLOCKS:
        mla.as_published(packed)
    return packed, unpacked


def ask(engine: Engine, of_codes: bool) -> dict[str, Any]:
    """What :func:`mla.ask` finds, and what latent attention multiplies with; where activations are quantised also, as
    "one scale", answers alone and among others when all rows of a step share one.
    """
    found = mla.ask(engine) | {"absorbed": engine.call("tests.engine.mla:absorbed")}
    if of_codes:
        found["one scale"] = kept_states.with_one_scale(engine, mla.company())
    return found


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Case]:
    @cache
    def made(name: str, form: str) -> Case:
        folder = tmp_path_factory.mktemp("mla")
        packed, unpacked = quantised(form, folder, mla.written_wide(name, folder / "source"))
        asked = partial(ask, of_codes=not isinstance(FORMS[form], Stored))
        return Case(packed, unpacked, started(packed, asked, **DEFAULT))

    return made


@of_cases
def test_a_request_has_the_same_bits_in_any_company_at_any_cut_and_in_any_page(
    name: str, form: str, case: Callable[[str, str], Case]
) -> None:
    found = case(name, form).found
    assert found["preemptions"] > 0
    assert found["cached"][0] >= 128
    assert [kind for kind, _, _ in found["poisoned"]] == ["MLAAttention"] * 3
    assert [where for where in SAME if found[where] != found["alone"]] == []
    assert decodes_as_it_prefills(found)


@of_cases
def test_prompts_that_end_around_pages_and_steps_have_the_same_bits_together(
    name: str, form: str, case: Callable[[str, str], Case]
) -> None:
    alone, together = case(name, form).found["edges"]
    assert [EDGES[i] for i, one in enumerate(alone) if one != together[i]] == []


@of_cases
def test_w_uk_and_w_uv_have_the_bits_of_what_codes_stand_for(
    name: str, form: str, case: Callable[[str, str], Case]
) -> None:
    """Rounded once, in every layer."""
    of = case(name, form)
    assert of.found["absorbed"] == mla.absorbed_of(of.unpacked)


@of_matrices
def test_weights_alone_that_are_quantised_have_the_bits_of_their_matrices(
    name: str, form: str, case: Callable[[str, str], Case]
) -> None:
    of = case(name, form)
    assert of.found["alone"] == started(of.unpacked, kept_states.alone, **DEFAULT)


def test_one_element_of_one_absorbed_matrix_shows(case: Callable[[str, str], Case], tmp_path: Path) -> None:
    """So the comparison with matrices would see a wrong code."""
    of = case("V3", INTEGERS)
    shutil.copytree(of.unpacked, tmp_path / "changed")
    tensors = load_file(of.unpacked / "model.safetensors")
    tensors["model.layers.0.self_attn.kv_b_proj.weight"][5, 7] += 2
    save_file(tensors, tmp_path / "changed" / "model.safetensors", metadata={"format": "pt"})
    assert started(tmp_path / "changed", kept_states.alone, **DEFAULT) != of.found["alone"]


@of_codes
def test_one_scale_of_all_rows_of_a_step_is_found(name: str, form: str, case: Callable[[str, str], Case]) -> None:
    """So the comparison of companies sees what depends on them."""
    alone, among_others = case(name, form).found["one scale"]
    assert alone != among_others


@pytest.mark.parametrize("form", [BLOCKS, INTEGERS])
@pytest.mark.parametrize("settings", [UNCACHED, ONE, WHOLE], ids=["no prefix cache", "limits of 1", "whole prompts"])
def test_other_limits_move_no_bit(form: str, settings: dict[str, Any], case: Callable[[str, str], Case]) -> None:
    of = case("V3", form)
    assert started(of.packed, kept_states.alone, **settings) == of.found["alone"]


@untried_on_gpu
@pytest.mark.parametrize("form", [BLOCKS, INTEGERS])
def test_half_precision_keeps_its_bits_and_is_near_transformers_in_float64(form: str, tmp_path: Path) -> None:
    """Two layers without experts, of which a token may get others, with the activations that codes stand for."""
    source = mla.written_wide("V3", tmp_path / "source", num_hidden_layers=2, first_k_dense_replace=2)
    packed, unpacked = quantised(form, tmp_path, source)
    found = started(packed, kept_states.ask_briefly, dtype="float16", **DEFAULT)
    assert found["among others"] == found["alone"]
    assert decodes_as_it_prefills(found)
    if isinstance(FORMS[form], Stored):
        assert kept_states.distance_from_float64(unpacked, found["alone"]) < NEAR
    else:
        assert kept_states.distance_from_float64(unpacked, found["alone"], mla.code_inputs) < NEAR_IN_CODES


@pytest.mark.parametrize("form", [BLOCKS, ROWS, INTEGERS])
def test_replaced_weights_give_the_bits_of_a_fresh_engine(
    form: str, case: Callable[[str, str], Case], tmp_path: Path
) -> None:
    """W_UK and W_UV among them, which no weight has the name of."""
    of = case("V3", form)
    other, _ = quantised(form, tmp_path, mla.written_wide("V3", tmp_path / "source", seed=1))
    fresh = {str(other): started(other, kept_states.alone), str(of.packed): of.found["alone"]}
    first, second = fresh.values()
    assert first != second
    asked = partial(kept_states.replaced, folders=list(fresh), ways=WAYS)
    answers = started(of.packed, asked, worker_extension_cls=EXTENSION, weight_transfer_config='{"backend": "files"}')
    assert [how for how, answer in answers.items() if answer != fresh[how[1]]] == []


@pytest.mark.parametrize(
    ("name", "form"),
    [("V3", BLOCKS), pytest.param("V3", ROWS, marks=untried_on_gpu), ("GLM-4.7-Flash", INTEGERS)],
)
@pytest.mark.parametrize("method", ["ngram", "mtp"])
def test_drafts_leave_answers_alone(name: str, form: str, method: str, tmp_path: Path) -> None:
    """Also those of a layer for more tokens that is quantised, too; beside a prefix cache."""
    source = mla.written_wide(name, tmp_path / "source")
    folder, _ = quantised(form, tmp_path, predict_by_last_layer(source, likely=8) if method == "mtp" else source)
    asked = REPEATING if method == "ngram" else drafted_requests()[::3]
    drafts: dict[str, Any] = {"ngram": NGRAMS, "mtp": {"method": "mtp"}}[method]
    cached = {"enable_prefix_caching": True} | kept_states.IN_GRAPHS
    differing, counted = kept_states.with_drafts(started, folder, drafts, asked, UNCACHED, **cached)
    assert differing == []
    assert 0 < counted["accepted"] < counted["drafts"]


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("form", [BLOCKS, ROWS, INTEGERS])
def test_two_workers_leave_a_request_its_bits(form: str, case: Callable[[str, str], Case]) -> None:
    """They share heads and experts; each has all of the latent cache."""
    settings = {"variables": kept_states.cores_of(2), "tensor_parallel_size": 2} | DEFAULT | kept_states.IN_GRAPHS
    shared = started(case("V3", form).packed, mla.ask, **settings)
    assert [where for where in SAME if shared[where] != shared["alone"]] == []
    assert decodes_as_it_prefills(shared)


def test_attention_may_keep_16_bits_beside_quantised_experts(tmp_path: Path) -> None:
    """As in Kimi K2 Thinking."""
    source, kept = mla.written_wide("V3", tmp_path / "source"), rf"{KEPT}|\.self_attn\."
    folder = write(source, FORMS[INTEGERS], tmp_path / "packed", tmp_path / "unpacked", kept)
    found = started(folder, kept_states.ask_briefly, **DEFAULT)
    assert found["alone"] == found["among others"] == started(tmp_path / "unpacked", kept_states.alone, **DEFAULT)


@untried_on_gpu
@pytest.mark.parametrize("method", ["int8_per_channel_weight_only", "experts_int8"])
def test_experts_quantised_while_they_are_loaded_have_the_bits_of_their_matrices(method: str, tmp_path: Path) -> None:
    folder = int8_of(mla.written_wide("V3", tmp_path / "source"), tmp_path)
    found = started(folder, mla.ask, quantization=method, **DEFAULT)
    assert [where for where in SAME if found[where] != found["alone"]] == []
    assert found["alone"] == started(tmp_path / "matrix", kept_states.alone, **DEFAULT)
    assert found["alone"] != started(folder, kept_states.alone, **DEFAULT)

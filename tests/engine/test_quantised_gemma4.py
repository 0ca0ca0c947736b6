"""Quantised weights of Gemma 4 as text, whose layers have heads of two sizes, keys that are the values, or no keys of
their own: a request has the same bits alone and among others, from chunks of any size, after a preemption, from the
prefix cache, and in pages of NaN; of weights alone that are quantised those of the matrices that they stand for.
"""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.engine import gemma4, kept_states, multimodal
from tests.engine.kept_states import ON_GPU, SAME, decodes_as_it_prefills, distance_from_float64
from tests.engine.quantised_layers import BLOCKS, FORMS, INTEGERS, KEPT, MODELOPT, NVFP4, ROWS, with_each_expert, write
from tests.engine.test_gemma4 import DEFAULT, EXTENSION, FEW_PAGES, WAYS, started
from tests.engine.test_quantised_hybrids import NEAR, NEAR_IN_CODES, Case
from tests.quantised_checkpoints import Stored
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points

COVERED = reviews.ran().quantised["cuda" if ON_GPU else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
OF_LAYERS = r"per_layer_(input_gate|projection|model_projection)$"
"""Of 64 columns and less, which no group of 128 is."""
CASES = [
    *(("31B", form) for form in FORMS if form != "gptq" and "Mistral" not in form),
    *(("E2B", form) for form in (BLOCKS, ROWS, INTEGERS)),
    *(("26B-A4B", form) for form in (BLOCKS, ROWS, INTEGERS, "awq", MODELOPT, *NVFP4)),
]
"""vLLM loads no GPTQ of keys that are the values, and no Gemma 4 in Mistral's names."""


def ask(engine: Any, of_weights_alone: bool) -> dict[str, Any]:
    """What :func:`gemma4.ask` finds, and where activations are quantised as "one scale" answers in two companies when
    all rows of a step share one.
    """
    found = gemma4.ask(engine)
    if not of_weights_alone:
        found["one scale"] = kept_states.with_one_scale(engine, kept_states.others(length=118))
    return found


def source(name: str, folder: Path, seed: int = 0) -> Path:
    """A checkpoint in bf16 with a matrix for each expert."""
    return with_each_expert(gemma4.written(name, folder, seed))


def kept_of(form: str) -> str:
    """Names of the layers that keep 16 bits, as a regular expression."""
    return KEPT + f"|{OF_LAYERS}" * (form != ROWS)


@pytest.fixture(scope="module", params=CASES, ids=", ".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    name, form = request.param
    root = tmp_path_factory.mktemp("gemma4")
    packed, unpacked = root / "packed", root / "unpacked"
    write(source(name, root / "source"), FORMS[form], packed, unpacked, kept_of(form))
    alone = isinstance(FORMS[form], Stored)
    found = started(packed, partial(ask, of_weights_alone=alone), **DEFAULT | FEW_PAGES.get(name, {}))
    return Case(name, alone, packed, unpacked, found)


def test_a_request_has_the_same_bits_in_any_company_at_any_cut_and_in_any_page(case: Case) -> None:
    answers = case.found
    assert answers["preemptions"] > 0 or ON_GPU
    assert answers["cached"][0] >= 128
    assert [where for where in SAME if answers[where] != answers["alone"]] == []
    assert decodes_as_it_prefills(answers)
    alone, together = answers["edges"]
    assert [gemma4.EDGES[i] for i, one in enumerate(alone) if one != together[i]] == []


def test_weights_alone_that_are_quantised_have_the_bits_of_their_matrices(case: Case) -> None:
    if not case.of_weights_alone:
        pytest.skip("activations are quantised too")
    settings = DEFAULT | FEW_PAGES.get(case.name, {})
    assert case.found["alone"] == started(case.unpacked, kept_states.alone, **settings)


def test_one_scale_of_all_rows_of_a_step_is_found(case: Case) -> None:
    """So the comparison of companies sees what depends on them."""
    if case.of_weights_alone:
        pytest.skip("activations are not quantised")
    alone, among_others = case.found["one scale"]
    assert alone != among_others


def test_logprobs_are_near_those_of_transformers_in_float64(case: Case) -> None:
    """With the matrices that codes stand for."""
    if case.name == "26B-A4B":
        pytest.skip("in bf16 a token may have other experts")
    near = NEAR if case.of_weights_alone else NEAR_IN_CODES
    assert distance_from_float64(case.unpacked, case.found["alone"]) < near


@pytest.mark.parametrize("form", [BLOCKS, INTEGERS, NVFP4[1]])
def test_a_checkpoint_as_it_is_published_has_the_bits_of_the_text_model(tmp_path: Path, form: str) -> None:
    """With an encoder that keeps 16 bits, served as text."""
    text = write(gemma4.written("31B", tmp_path / "source"), FORMS[form], tmp_path / "packed")
    around = write(gemma4.written_around("31B", tmp_path / "around"), FORMS[form], tmp_path / "seeing", kept=KEPT)
    of_text = started(text, kept_states.alone, **DEFAULT)
    path = multimodal.python_path(tmp_path / "path")
    assert started(around, kept_states.alone, path=path, language_model_only=True, **DEFAULT) == of_text


def test_a_cache_in_bf16_leaves_the_scales_of_one_in_fp8_alone(tmp_path: Path) -> None:
    """Which ModelOpt's checkpoints have."""
    folder = write(source("31B", tmp_path / "source"), FORMS[NVFP4[1]], tmp_path / "packed", kept=kept_of(NVFP4[1]))
    plain = started(folder, kept_states.alone, **DEFAULT)
    gemma4.with_scales(folder)
    assert started(folder, kept_states.alone, kv_cache_dtype="bfloat16", **DEFAULT) == plain


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs")
def test_steps_in_cuda_graphs_have_the_same_bits(case: Case) -> None:
    settings = DEFAULT | FEW_PAGES.get(case.name, {}) | {"enforce_eager": False}
    replayed = started(case.packed, kept_states.ask_briefly, **settings)
    assert replayed["among others"] == replayed["alone"] == case.found["alone"]


@pytest.mark.parametrize(("name", "form"), [("31B", BLOCKS), ("26B-A4B", INTEGERS)])
def test_replaced_weights_give_the_bits_of_a_fresh_engine(name: str, form: str, tmp_path: Path) -> None:
    """On a GPU in CUDA graphs, which have the addresses of weights."""
    first, other = (
        str(
            write(
                source(name, tmp_path / f"source {seed}", seed), FORMS[form], tmp_path / f"{seed}", kept=kept_of(form)
            )
        )
        for seed in (0, 1)
    )
    settings = DEFAULT | {"enforce_eager": False} if ON_GPU else DEFAULT
    fresh = {folder: started(folder, kept_states.alone, **settings) for folder in (first, other)}
    assert fresh[other] != fresh[first]
    answers = started(
        first,
        partial(kept_states.replaced, folders=(other, first), ways=WAYS),
        worker_extension_cls=EXTENSION,
        weight_transfer_config='{"backend": "files"}',
        **settings,
    )
    assert [how for how, answer in answers.items() if answer != fresh[how[1]]] == []

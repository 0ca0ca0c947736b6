"""A KV cache in FP8 beside heads of two sizes: a request of Gemma 4 as text has the same bits alone and among others,
from chunks of any size, after a preemption, from the prefix cache, and in pages of NaN: those of a cache in bf16 of the
numbers of the codes. Also beside quantised weights, with scales of the checkpoint, which layers that read another's
cache have from that.
"""

from typing import Any

import pytest
import torch

from tests.engine import gemma4, kept_states
from tests.engine.kept_states import ON_GPU, SAME, decodes_as_it_prefills
from tests.engine.quantised_layers import FORMS, NVFP4, ROWS, write
from tests.engine.test_gemma4 import DEFAULT, FEW_PAGES, started
from tests.engine.test_quantised_gemma4 import kept_of, source
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points

COVERED = reviews.ran().fp8_kv_cache["cuda" if ON_GPU else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
CACHES = "tests.engine.fp8_caches"
PLAIN = "16 bits"
GIVEN = "scales of the checkpoint"
CASES = [
    *((name, PLAIN, "") for name in gemma4.CONFIGS),
    ("31B", ROWS, ""),
    ("E2B", ROWS, GIVEN),
    ("26B-A4B", ROWS, ""),
    ("31B", NVFP4[1], GIVEN),
    ("26B-A4B", NVFP4[1], GIVEN),
    ("26B-A4B", NVFP4[0], ""),
]
"""Models, formats of their weights, and whether these bring scales of the cache."""
FP8 = {"kv_cache_dtype": "fp8"}
OWN = "layers read by scales of their own"


def ask(engine: Any) -> dict[str, Any]:
    """What :func:`gemma4.ask` finds, and answers with a fault and from caches in bf16."""
    found = gemma4.ask(engine) | {"bytes": engine.call(f"{CACHES}:bytes_of_caches")}
    found["sharing"] = engine.call(f"{CACHES}:by_its_own_scales", True)
    found[OWN] = kept_states.alone(engine, OWN)
    engine.call(f"{CACHES}:by_its_own_scales", False)
    engine.call(f"{CACHES}:scale_by_steps")
    found["by steps"] = kept_states.alone(engine, "by steps")
    among = engine.step("by steps among others", [*kept_states.others(length=118), *kept_states.TARGETS], True)
    found["by steps among others"] = kept_states.seen(among.requests)
    found["scales"] = engine.call(f"{CACHES}:in_numbers", True)
    found["numbers"] = kept_states.alone(engine, "numbers")
    engine.call(f"{CACHES}:in_numbers", False)
    return found | {"as they come": kept_states.alone(engine, "as they come")}


@pytest.fixture(scope="module", params=CASES, ids=lambda of: ", ".join(part for part in of if part))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    name, form, given = request.param
    root = tmp_path_factory.mktemp("gemma4")
    if form == PLAIN:
        folder = gemma4.written(name, root / "source")
    else:
        folder = write(source(name, root / "source"), FORMS[form], root / "packed", kept=kept_of(form))
    scales = gemma4.with_scales(folder) if given else [[1.0, 1.0]] * len(gemma4.CONFIGS[name]["layer_types"])
    settings = DEFAULT | FEW_PAGES.get(name, {}) | ({} if given else FP8)
    return {"name": name, "folder": folder, "settings": settings, "given": scales} | started(folder, ask, **settings)


def test_a_request_has_the_same_bits_in_any_company_at_any_cut_and_in_any_page(case: dict[str, Any]) -> None:
    assert {dtype for dtype, _ in case["bytes"]} == {"torch.uint8"}
    assert case["preemptions"] > 0 or ON_GPU
    assert case["cached"][0] >= 128
    assert {size for _, size, _ in case["poisoned"]} == {256, 512}
    assert [where for where in SAME if case[where] != case["alone"]] == []
    assert decodes_as_it_prefills(case)
    alone, together = case["edges"]
    assert [gemma4.EDGES[i] for i, one in enumerate(alone) if one != together[i]] == []


def test_one_scale_of_all_tokens_of_a_step_is_found(case: dict[str, Any]) -> None:
    """The negative control."""
    assert case["by steps"] != case["by steps among others"]


def test_its_bits_are_those_of_a_cache_of_its_numbers(case: dict[str, Any]) -> None:
    """Times scales of the checkpoint, which are powers of two."""
    assert [[float(torch.tensor(one)) for one in of_layer] for of_layer in case["scales"]] == case["given"]
    assert case["alone"] == case["numbers"]
    assert case["numbers"] != case["as they come"], "so the comparison sees what codes lose"


def test_a_layer_that_reads_another_cache_has_the_scales_of_that(case: dict[str, Any]) -> None:
    """The negative control: by its own, which no checkpoint has, answers are others."""
    if case["given"][0] == [1.0, 1.0] or case["name"] != "E2B":
        pytest.skip("its own are the same, or there is none")
    assert case["sharing"] == gemma4.CONFIGS["E2B"]["num_kv_shared_layers"]
    assert case[OWN] != case["alone"]


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs")
def test_steps_in_cuda_graphs_have_the_same_bits(case: dict[str, Any]) -> None:
    replayed = started(case["folder"], kept_states.ask_briefly, **case["settings"] | kept_states.IN_GRAPHS)
    assert replayed["among others"] == replayed["alone"] == case["alone"]

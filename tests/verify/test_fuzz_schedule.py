"""What the fuzzer draws: the same from the same seed, every kind and every setting, and nothing an engine refuses."""

import hashlib
import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from vllm_batch_invariant.envs import ARITHMETIC, ATTENTION, TP_TREE, UNTRIED, Variable
from vllm_batch_invariant.integration import coverage
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.fuzz.options import (
    DRAFTS,
    FIELDS,
    NONE,
    OPTIONS,
    TEXT_ONLY,
    Place,
    starts,
)
from vllm_batch_invariant.verify.fuzz.schedule import (
    UPDATES,
    Schedule,
    Settings,
    alone,
    as_item,
    draw_schedule,
    draw_settings,
    draw_targets,
)
from vllm_batch_invariant.verify.harness.engine import pages_of_states, pages_of_windows, sampling_params
from vllm_batch_invariant.verify.harness.requests import (
    BUDGET,
    BUDGETS,
    EVERY_KIND,
    LISTED,
    MOST_LISTED,
    OUTPUT_KINDS,
    Accepts,
    draw,
    draw_concurrent,
    over_http,
)

BEGINS, ENDS = (4000,), (4001, 4002, 4003)
ACCEPTS = Accepts(range(16, 4000), 4096, -1, EVERY_KIND, (BEGINS, ENDS))
CONTEXT = 1024
TARGETS = dict(enumerate(draw_targets(3, 46, ACCEPTS, CONTEXT)))
GPU = Place("cuda")
with pytest.MonkeyPatch.context() as newest_vllm:
    newest_vllm.setattr(patch_points, "installed_version", lambda: "0.33.0")
    SETTINGS = [draw_settings(3, number, CONTEXT, GPU) for number in range(12)]
DENSE = {
    "architectures": ["LlamaForCausalLM"],
    "dtype": "bfloat16",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "intermediate_size": 512,
}
EXPERTS = DENSE | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}
PLACES = {
    "cpu": Place("cpu", 4, model=DENSE),
    "cpu, experts": Place("cpu", 4, model=EXPERTS),
    "cpu, an encoder": Place("cpu", 4, model=DENSE | {"vision_config": {}}),
    "a GPU": Place("cuda", 32, 1, DENSE),
    "two GPUs": Place("cuda", 32, 2, DENSE),
    "two GPUs, experts": Place("cuda", 32, 2, EXPERTS),
}
SCHEDULES = [draw_schedule(f"3 0 {number}", SETTINGS[number % 12], TARGETS, ACCEPTS) for number in range(240)]
ITEMS = [item for schedule in SCHEDULES for item in schedule.items]


@pytest.fixture(autouse=True)
def newest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")


def everywhere(count: int = 24) -> Iterator[tuple[Place, Settings]]:
    for place in PLACES.values():
        for seed in (0, 5):
            yield from ((place, draw_settings(seed, number, CONTEXT, place)) for number in range(count))


def test_settings_of_a_seed_are_those_that_findings_and_their_lines_name() -> None:
    """But for options, which follow what is installed."""
    labels = "\n".join(replace(one, options={}).label for _, one in everywhere())
    assert hashlib.sha256(labels.encode()).hexdigest()[:16] == "5c23c2b3d78a98d7"


def test_the_gate_lets_pass_all_that_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {row.argument for row in FIELDS}.union(*(option.names for option in OPTIONS))
    drawn = [*everywhere()]
    assert all(starts(one, place, *names) for place, one in drawn)
    monkeypatch.setenv(UNTRIED.name, "1")
    assert [*everywhere()] == drawn, "what no GPU has run is not drawn"


BINDING = {
    "Several GPUs": {"workers", "tree", "stages"},
    "Other models, dtypes": {"exact"},
    "Speculative decoding beside pipeline": {"stages"},
    "Embeddings as inputs": {"options"},
    "Embeddings as prompts beside speculative": {"options"},
    "Embeddings as prompts beside pipeline": {"options"},
}
"""Rows of the gate by their beginning, and what of settings is another without them."""


def drawn_widely() -> list[Settings]:
    """Also more of two GPUs, of which few have stages."""
    more = [draw_settings(5, number, CONTEXT, PLACES["two GPUs"]) for number in range(24, 200)]
    return [*(one for _, one in everywhere()), *more]


@pytest.mark.parametrize("name", BINDING)
def test_without_a_row_of_the_gate_what_it_refuses_is_drawn(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    before = drawn_widely()
    [row] = [row for row in coverage.REFUSED if row.name.startswith(name)]
    monkeypatch.setattr(coverage, "REFUSED", tuple(other for other in coverage.REFUSED if other is not row))
    after = drawn_widely()
    pairs = [(vars(one), vars(other)) for one, other in zip(before, after, strict=True)]
    assert {field for one, other in pairs for field in one if one[field] != other[field]} >= BINDING[name]


@pytest.mark.parametrize(
    ("device", "variable", "value", "field", "left"),
    [
        ("cuda", ATTENTION, "flex", "drafts", {0}),
        ("cuda", ATTENTION, "flex", "workers", {1}),
        ("cuda", ARITHMETIC, "exact", "drafts", {0}),
        ("cuda", ARITHMETIC, "exact", "runner", {"", "1"}),
        ("cpu", ATTENTION, "flex", "exact", {False}),
        ("cpu", TP_TREE, "2", "exact", {False}),
        ("cpu", ARITHMETIC, "exact", "tree", {1}),
        ("cpu", ARITHMETIC, "exact", "workers", {1, 2}),
    ],
)
def test_what_variables_rule_out_is_not_drawn(
    device: str, variable: Variable, value: str, field: str, left: set[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drawn() -> set[object]:
        place = PLACES["two GPUs" if device == "cuda" else device]
        return {getattr(draw_settings(0, number, CONTEXT, place), field) for number in range(60)}

    assert drawn() > left or left in ({1, 2}, {"", "1"})
    monkeypatch.setenv(variable.name, value)
    assert drawn() == left


def test_a_seed_draws_the_same_and_another_seed_does_not() -> None:
    assert dict(enumerate(draw_targets(3, 46, ACCEPTS, CONTEXT))) == TARGETS
    assert draw_targets(4, 40, ACCEPTS, CONTEXT) != list(TARGETS.values())
    assert [draw_settings(3, number, CONTEXT, GPU) for number in range(12)] == SETTINGS
    assert draw_schedule("3 0 0", SETTINGS[0], TARGETS, ACCEPTS) == SCHEDULES[0]
    assert draw_schedule("3 0 x", SETTINGS[0], TARGETS, ACCEPTS) != SCHEDULES[0]


def test_what_is_drawn_survives_json() -> None:
    for schedule in SCHEDULES:
        assert Schedule.from_plain(json.loads(json.dumps(schedule.plain()))) == schedule


def test_targets_are_of_every_kind_and_give_the_same_tokens_again() -> None:
    assert {target.kind for target in TARGETS.values()} == set(EVERY_KIND)
    for target in TARGETS.values():
        assert target.params["temperature"] == 0 or target.params["seed"] is not None
    assert {target.params["logprobs"] for target in TARGETS.values()} >= set(LISTED)


def test_targets_are_short_and_long_and_begin_alike() -> None:
    lengths = [len(target.prompt) for target in TARGETS.values()]
    assert sum(length <= 40 for length in lengths) > 10
    assert sum(length <= 10 for length in lengths) >= 5
    assert max(lengths) > 0.9 * CONTEXT
    assert all(len(target.prompt) + target.params["max_tokens"] <= CONTEXT for target in TARGETS.values())
    beginnings = [target.prompt[:6] for target in TARGETS.values() if len(target.prompt) > 6]
    assert len(set(beginnings)) < len(beginnings) - 5


def test_concurrent_requests_differ_in_parameters_as_much_as_in_lengths() -> None:
    concurrent = [item for item in ITEMS if not item.target]
    assert {item.params["logprobs"] for item in concurrent} >= set(LISTED)
    assert {item.params["output_kind"] for item in concurrent} == set(OUTPUT_KINDS)
    assert any(item.params["temperature"] and "seed" not in item.params for item in concurrent)
    assert any(item.leaves is not None for item in concurrent)
    seen = {name for item in concurrent for name in item.params}
    assert seen >= {"n", "logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "stop", "structured_outputs"}
    assert seen >= {"prompt_logprobs", "top_k", "top_p", "min_p", "presence_penalty", "stop_token_ids"}
    assert all(len(item.prompt) + item.params["max_tokens"] <= CONTEXT for item in concurrent)


def test_thoughts_have_every_budget_and_begin_in_the_prompt_or_not() -> None:
    requests = [item for item in ITEMS if BUDGET in item.params] + [
        target for target in draw_targets(5, 200, ACCEPTS, CONTEXT) if target.kind == BUDGET
    ]
    assert {request.params[BUDGET] for request in requests} == set(BUDGETS)
    assert {bool(set(BEGINS) & set(request.prompt)) for request in requests} == {False, True}
    for request in requests:  # what may be spoken has what begins and ends a thought
        spoken = request.params.get("allowed_token_ids")
        assert spoken is None or {*BEGINS, *ENDS} <= set(spoken)
    assert {"allowed_token_ids" in request.params for request in requests} == {False, True}


def test_a_cache_in_fp8_is_drawn_where_one_has_run_and_not_in_exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    place = Place("cpu", cores=2, model=DENSE)
    drawn = [draw_settings(0, number, CONTEXT, place) for number in range(24)]
    in_fp8 = [one for one in drawn if one.options.get("cache")]
    assert len(in_fp8) > 2
    assert all("--kv-cache-dtype" in one.arguments("model") for one in in_fp8)
    assert {one.options["cache"] for one in in_fp8} == {"fp8", "fp8_per_token_head"}
    monkeypatch.setattr(coverage, "RAN", replace(coverage.RAN, fp8_kv_cache_scales={"cpu": ("tensor",)}))
    drawn_before = [draw_settings(0, number, CONTEXT, place) for number in range(24)]
    assert {one.options.get("cache", NONE) for one in drawn_before} == {NONE, "fp8"}
    assert any(one.exact for one in drawn)
    assert not any(one.exact for one in in_fp8)


def test_a_checkpoint_whose_cache_is_in_fp8_is_drawn_in_no_exact_arithmetic(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    scheme = {"quantization_config": {"kv_cache_scheme": {"strategy": "attn_head"}}}
    drawn, of_numbers = (
        [draw_settings(0, number, CONTEXT, Place("cpu", cores=2, model=model)) for number in range(24)]
        for model in (DENSE | scheme, DENSE)
    )
    assert any(one.exact for one in of_numbers)
    assert not any(one.exact or one.options.get("cache") for one in drawn)


def test_two_gpus_are_not_drawn_where_each_head_of_a_checkpoint_has_a_scale() -> None:
    pytest.importorskip("vllm")
    workers = [
        {draw_settings(5, number, CONTEXT, Place("cuda", 32, 2, DENSE | of)).workers for number in range(48)}
        for of in ({}, {"quantization_config": {"kv_cache_scheme": {"strategy": "attn_head"}}})
    ]
    assert workers == [{1, 2}, {1}]


def test_every_value_of_every_option_is_drawn_where_an_engine_has_it() -> None:
    pytest.importorskip("vllm")
    for device in ("cpu", "cuda"):
        drawn = [draw_settings(0, number, CONTEXT, Place(device)) for number in range(48)]
        for option in OPTIONS:
            if option.is_in(Place(device)) and option.name != "experts":
                assert {one.options.get(option.name, NONE) for one in drawn} >= set(option.values), option.name
        assert all(f"{name}={value}" in one.label for one in drawn for name, value in one.options.items())
        assert any("reasoning" in one.options for one in drawn if one.drafts)
        beside = {(device, one.drafter) for one in drawn if one.drafts and "embeds" in one.options}
        assert beside == ({("cpu", "ngram")} if device == "cpu" else set())
        given = Place(device, given=frozenset(("--scheduling-policy", "--enable-prompt-embeds")))
        bare = [draw_settings(0, number, CONTEXT, given) for number in range(12)]
        assert not any({"policy", "embeds"} & one.options.keys() for one in bare)
        given = Place(device, has_tokenizer=False, given=frozenset(("--load-format",)))
        bare = [draw_settings(0, number, CONTEXT, given) for number in range(12)]
        assert not any({"reasoning", "grammar", "updates"} & one.options.keys() for one in bare)
    drawn = [draw_settings(0, number, CONTEXT, PLACES["cpu, experts"]) for number in range(24)]
    assert {(one.workers, one.options.get("experts")) for one in drawn} == {(1, None), (2, None), (2, "whole")}
    of_trees = [one for one in drawn if one.tree > 1 and one.workers > 1]
    assert {one.options.get("experts") for one in of_trees} == {"whole"}
    given = replace(PLACES["cpu, experts"], given=frozenset(("--no-enable-expert-parallel",)))
    drawn = [draw_settings(0, number, CONTEXT, given) for number in range(24)]
    assert not any(one.tree > 1 and one.workers > 1 for one in drawn)


SEEING: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "vision_config": {"num_heads": 4, "hidden_size": 288, "intermediate_size": 320},
    "text_config": DENSE | {"linear_num_key_heads": 2, "linear_num_value_heads": 4},
}


def drawn_beside_images(vision: Mapping[str, int] = SEEING["vision_config"], **changes: Any) -> set[tuple[Any, ...]]:
    """Workers, slices of a tree and whether workers share images, of what is drawn of engines that take some."""
    place = Place("cpu", 4, model=SEEING | {"vision_config": vision} | changes, encodes=True)
    drawn = [draw_settings(0, number, CONTEXT, place) for number in range(120)]
    return {(one.workers, one.tree, one.options.get("encoder", NONE)) for one in drawn if not one.text}


def test_two_workers_are_drawn_beside_images_of_models_that_two_have_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    of_two = {(2, tree, share) for tree in (1, 2) for share in (NONE, "data")}
    assert drawn_beside_images() == {(1, 1, NONE), (1, 2, NONE), *of_two}
    assert drawn_beside_images(architectures=["DeepseekOCRForCausalLM"]) == {(1, 1, NONE)}
    assert drawn_beside_images(SEEING["vision_config"] | {"num_heads": 3}) == {(1, 1, NONE)}
    quantised, whole = {"quantization_config": {"quant_method": "awq"}}, ["Qwen2_5_VLForConditionalGeneration"]
    assert drawn_beside_images(architectures=whole, **quantised) == {(1, 1, NONE)}
    of_odd_widths = drawn_beside_images(SEEING["vision_config"] | {"intermediate_size": 336})
    assert of_odd_widths == {(1, 1, NONE), (2, 1, NONE), (2, 1, "data")}


def test_what_one_worker_does_with_images_is_drawn_of_models_that_have_run_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    glm = drawn_beside_images(architectures=["Glm4vMoeForConditionalGeneration"])
    assert glm == {(1, 1, NONE), (1, 1, "data")}

    def pruned(architecture: str) -> set[str]:
        place = Place("cpu", 4, model=SEEING | {"architectures": [architecture]}, encodes=True)
        drawn = (draw_settings(0, number, CONTEXT, place) for number in range(40))
        return {one.options.get("pruning", NONE) for one in drawn}

    assert pruned("NemotronH_Nano_VL_V2") == {NONE, "half"}
    assert pruned("Qwen3_5ForConditionalGeneration") == {NONE}


def test_n_grams_are_drawn_beside_images_of_models_that_have_run_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one worker, of a cache and weights in 16 bits; on a GPU none has."""
    pytest.importorskip("vllm")

    def drawn(device: str = "cpu", **changes: Any) -> list[Settings]:
        monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0" if device == "cpu" else "0.33.0")
        place = Place(device, 4, 2, model=SEEING | changes, encodes=True)
        found = [draw_settings(0, number, CONTEXT, place) for number in range(120)]
        return [one for one in found if one.drafts and not one.text]

    seen = drawn()
    assert {(one.drafter, one.workers, one.tree, one.options.get("cache", NONE)) for one in seen} == {
        ("ngram", 1, 1, NONE)
    }
    assert {one.prefix_cache for one in seen} == {True, False}
    assert drawn("cuda") == []
    assert drawn(quantization_config={"quant_method": "awq"}) == []
    assert drawn(architectures=["InternVLForConditionalGeneration"]) == []


NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4", "group_size": 16}
FLOAT4 = {"type": "float", "num_bits": 4, "strategy": "tensor_group", "group_size": 16}
OF_GROUPS = {"weights": FLOAT4, "input_activations": FLOAT4 | {"dynamic": "local"}}
OF_INT4 = {"weights": {"type": "int", "num_bits": 4, "strategy": "group", "group_size": 32}}


@pytest.mark.parametrize(
    ("architecture", "config", "of_text", "of_images"),
    [
        ("", {}, True, True),
        ("", NVFP4, True, True),
        ("", {"quant_method": "compressed-tensors", "config_groups": {"group_0": OF_INT4}}, True, False),
        ("Gemma4", {}, True, True),
        ("Gemma4", NVFP4, True, True),
        ("Gemma4", {"quant_method": "compressed-tensors", "config_groups": {"group_0": OF_GROUPS}}, True, True),
        ("Gemma4", {"quant_method": "compressed-tensors", "config_groups": {"group_0": OF_INT4}}, False, False),
    ],
)
def test_a_cache_in_fp8_is_drawn_beside_images_and_heads_of_two_sizes_with_the_weights_that_have_run(
    monkeypatch: pytest.MonkeyPatch, architecture: str, config: dict[str, Any], of_text: bool, of_images: bool
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    model = SEEING | ({"quantization_config": config} if config else {})
    model |= {"architectures": [f"{architecture}ForConditionalGeneration"]} if architecture else {}
    drawn = [draw_settings(0, number, CONTEXT, Place("cpu", 4, model=model, encodes=True)) for number in range(160)]
    for text, expected in ((True, of_text), (False, of_images)):
        found = [one for one in drawn if bool(one.text) == text]
        assert ("fp8" in {one.options.get("cache", NONE) for one in found}) is expected
        if architecture:
            beside = [one for one in found if "cache" in one.options]
            assert all(one.workers == one.tree == 1 and not (one.drafts and config) for one in beside)


def test_what_drafts_for_a_model_beside_images_is_drawn_beside_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of Gemma 4 its own drafter alone, as text n-grams, too."""
    pytest.importorskip("vllm")
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    model = SEEING | {"architectures": ["Gemma4ForConditionalGeneration"]}
    place = Place("cpu", 4, model=model, encodes=True)
    drawn = [one for number in range(160) if (one := draw_settings(0, number, CONTEXT, place)).drafts]
    assert {one.drafter for one in drawn if not one.text} == {"mtp"}
    assert {one.drafter for one in drawn if one.text} == {"mtp", "ngram"}


@pytest.mark.parametrize("architecture", coverage.RAN.encoded_workers["cpu"])
def test_two_workers_are_drawn_of_each_model_that_two_have_shared_on_a_cpu(
    monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    pytest.importorskip("vllm")
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    kind = coverage.RAN.text_models.get(architecture, ("",))[0]
    config = {"architectures": [architecture], "text_config": DENSE | {"model_type": kind}}
    drawn = drawn_beside_images(**config, audio_config=None)
    if "video" in coverage.RAN.encoded_by_one.get(architecture, ()):
        as_several = architecture in coverage.RAN.encoded_data_by_one["cpu"]
        assert drawn == {(1, 1, NONE), *[(1, 1, "data")] * as_several}
        return
    has_tree = architecture not in coverage.RAN.two_head_sizes
    assert {(workers, tree) for workers, tree, _ in drawn} == {(1, 1), (2, 1), *[(1, 2), (2, 2)] * has_tree}
    if architecture == "Gemma4ForConditionalGeneration":  # which some hear by, as no two workers have
        assert drawn_beside_images(**config, audio_config={}) == {(1, 1, NONE)}


def test_four_workers_are_drawn_where_four_gpus_share_whole_heads_and_keys() -> None:
    pytest.importorskip("vllm")

    def workers(gpus: int, **changes: object) -> set[int]:
        place = Place("cuda", 32, gpus, DENSE | changes)
        return {draw_settings(0, number, CONTEXT, place).workers for number in range(200)}

    assert workers(4) == workers(4, num_key_value_heads=2) == {1, 2, 4}
    assert workers(2) == workers(4, num_attention_heads=6) == {1, 2}
    assert workers(4, num_attention_heads=12, num_key_value_heads=6) == {1, 2}
    assert workers(4, quantization_config={"bits": 4, "group_size": 32}) == {1, 2}


def test_engines_sleep_on_several_gpus_only_where_the_mode_lets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")

    def sleeps_shared() -> bool:
        drawn = [draw_settings(0, number, CONTEXT, PLACES["two GPUs"]) for number in range(60)]
        assert any("sleep" in one.options for one in drawn)
        return any("sleep" in one.options for one in drawn if one.workers * one.tree > 1)

    together = [feature.name for feature in coverage.REFUSED if "Several GPUs" in feature.name]
    assert sleeps_shared() == (not any("sleep" in name for name in together))
    monkeypatch.setattr(coverage, "REFUSED", ())
    assert sleeps_shared()


def test_events_and_ways_to_send_a_request_are_drawn_with_their_options_alone() -> None:
    seen = {"sleeps": set(), "updates": set(), "embeds": set(), "policy": set()}
    for number, schedule in enumerate(SCHEDULES):
        options = SETTINGS[number % 12].options
        happens = {"sleeps": schedule.sleeps, "updates": schedule.updates}
        happens |= {"embeds": any(item.embeds for item in schedule.items)}
        happens |= {"policy": any(item.priority for item in schedule.items)}
        for name, happened in happens.items():
            seen[name].add(bool(happened))
            assert not happened or name.removesuffix("s") in options or name in options
        for item in schedule.items:
            assert not (item.embeds and "prompt_logprobs" in item.params)
    assert all(both == {False, True} for both in seen.values()), seen
    assert {sleep.level for schedule in SCHEDULES for sleep in schedule.sleeps} == {1, 2}
    updates = [update for schedule in SCHEDULES for update in schedule.updates]
    assert {update.how for update in updates} == set(UPDATES)
    assert {update.at for update in updates if update.how == "others before"} == {0}


def test_schedules_fill_an_engine_exactly_and_reset_its_cache_while_requests_run() -> None:
    full = [
        (schedule, SETTINGS[number % 12])
        for number, schedule in enumerate(SCHEDULES)
        if {item.at for item in schedule.items} == {0} and len(schedule.items) == SETTINGS[number % 12].requests
    ]
    assert {settings.requests for _, settings in full} >= {1, 2, 5, 64}
    # a burst may have five requests by chance
    exactly = [schedule for schedule, settings in full if settings.requests != 5]
    assert all(item.params.get("n", 1) == 1 for schedule in exactly for item in schedule.items)
    assert {reset.running for schedule in SCHEDULES for reset in schedule.resets} == {False, True}
    assert all(any(item.target for item in schedule.items) for schedule in SCHEDULES)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_twelve_engines_have_every_value_of_every_setting(device: str) -> None:
    drawn = [(seed, number) for seed in (0, 1) for number in range(12)]
    place = Place(device, 4, model=DENSE | {"num_hidden_layers": 1})
    settings = [draw_settings(seed, number, CONTEXT, place) for seed, number in drawn]
    for twelve in (settings[:12], settings[12:]):
        requests = {one.requests for one in twelve}
        assert requests >= {1, 2, 5, 64}
        assert requests & set(range(97, 105))
        assert twelve[0].requests > 1
        assert {one.step_tokens for one in twelve} == {64, 300, 2048, 8192}
        assert {one.page for one in twelve} == {32, 64, 128} | ({16} if device == "cuda" else set())
        assert {one.prefix_cache for one in twelve} == {one.small_cache for one in twelve} == {True, False}
        both = {True, False} if device == "cuda" else {True}
        assert {one.eager for one in twelve} == both
        assert {one.asynchronous for one in twelve} == (both if device == "cuda" else {False})
        assert {one.runner for one in twelve} == ({"0", "1"} if device == "cuda" else {""})
        assert {one.text for one in twelve} == {""}
        assert {one.drafts for one in twelve} == set(DRAFTS)
        shared = {1, 2} if device == "cpu" else {1}
        assert {one.workers for one in twelve} == {one.tree for one in twelve} == shared
        assert {(one.workers, one.tree) for one in twelve} >= {(workers, 2) for workers in shared if device == "cpu"}
        assert {one.exact for one in twelve} == ({True, False} if device == "cpu" else {False})
        shares_of_exact = {(one.workers, one.tree) for one in twelve if one.exact}
        assert shares_of_exact == ({(1, 1), (2, 1)} if device == "cpu" else set())
        assert {one.stages for one in twelve} == {1}
    alone = [
        draw_settings(0, number, CONTEXT, Place(device, model=DENSE | {"dtype": "float32"})) for number in range(12)
    ]
    assert not any(one.exact for one in alone)
    assert {(one.workers, one.tree) for one in alone} == {(1, 1)}
    place = Place(device, model={"vision_config": {}})
    assert {draw_settings(0, number, CONTEXT, place).text for number in range(2)} == set(TEXT_ONLY)


def test_two_stages_are_drawn_now_and_then_and_with_nothing_that_cannot_be_beside_them() -> None:
    drawn = [draw_settings(0, number, CONTEXT, PLACES["cpu"]) for number in range(60)]
    staged = [one for one in drawn if one.stages == 2]
    assert 0 < len(staged) < 20
    assert {(one.workers, one.tree, one.drafts) for one in staged} == {(1, 1, 0)}
    for one in drawn:
        assert ("--pipeline-parallel-size" in one.arguments("MODEL")) == ("stages=2" in one.label) == (one in staged)
    assert {draw_settings(0, number, CONTEXT, PLACES["a GPU"]).stages for number in range(30)} == {1}


@pytest.mark.parametrize("gpus", [1, 2])
def test_gpus_share_a_model_in_the_second_runner_and_without_drafts(gpus: int) -> None:
    drawn = [draw_settings(0, number, CONTEXT, Place("cuda", 32, gpus, DENSE)) for number in range(120)]
    sharing = [one for one in drawn if (one.workers, one.tree, one.stages) != (1, 1, 1)]
    assert {(one.runner, one.drafts, one.exact) for one in sharing} == {("1", 0, False)}
    found = {(one.workers, one.tree, one.stages) for one in sharing}
    assert found == ({(1, 2, 1), (2, 1, 1), (2, 2, 1), (1, 1, 2)} if gpus == 2 else {(1, 2, 1)})


def test_with_a_tree_a_worker_alone_has_as_many_cores_as_one_of_several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    made = {
        (workers, tree): replace(SETTINGS[0], workers=workers, tree=tree).environment
        for workers, tree in ((1, 1), (1, 2), (2, 1), (2, 2))
    }
    cores = {key: one.get("VLLM_CPU_OMP_THREADS_BIND") for key, one in made.items()}
    assert cores == {(1, 1): None, (1, 2): "0-3", (2, 1): "0-3|4-7", (2, 2): "0-3|4-7"}
    assert {key: one.get(TP_TREE.name) for key, one in made.items()} == {
        (1, 1): None, (1, 2): "2", (2, 1): None, (2, 2): "2"
    }  # fmt: skip


def test_arguments_are_what_vllm_takes() -> None:
    pytest.importorskip("vllm")
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    for settings in SETTINGS:
        parsed = parser.parse_args(settings.arguments("MODEL"))
        assert parsed.max_num_seqs == settings.requests
        assert parsed.max_num_batched_tokens >= settings.requests
        assert parsed.async_scheduling == (None if settings.drafts else settings.asynchronous)
        assert parsed.tensor_parallel_size == settings.workers
        assert parsed.scheduling_policy == settings.options.get("policy", "fcfs")
        assert parsed.enable_prompt_embeds == ("embeds" in settings.options)
        assert parsed.enable_sleep_mode == ("sleep" in settings.options)
        backend = EngineArgs.from_cli_args(parsed).structured_outputs_config.backend
        assert backend == settings.options.get("grammar", "auto")
        assert bool(parsed.reasoning_config) == ("reasoning" in settings.options)
        assert parsed.pipeline_parallel_size == settings.stages
        assert parsed.enable_prefix_caching == settings.prefix_cache
        assert parsed.num_gpu_blocks_override is None or parsed.num_gpu_blocks_override * settings.page > CONTEXT
    for settings in (draw_settings(0, number, CONTEXT, PLACES["cpu, an encoder"]) for number in range(2)):
        parsed = EngineArgs.from_cli_args(parser.parse_args(settings.arguments("MODEL")))
        assert parsed.language_model_only == (settings.text == "only")
        assert parsed.language_model_only or set(parsed.limit_mm_per_prompt.values()) == {0}


def test_every_drawn_parameter_is_one_of_vllms() -> None:
    pytest.importorskip("vllm")
    for item in ITEMS:
        through_json = json.loads(json.dumps(dict(item.params)))
        made = sampling_params(through_json)
        assert made.output_kind.name == item.params["output_kind"]
        assert set(made.logit_bias or {}) == {int(token) for token in item.params.get("logit_bias", {})}


def test_alone_is_the_same_request_in_one_piece() -> None:
    item = as_item(TARGETS[0], "t")
    streamed = next(one for one in ITEMS if one.target and one.params.get("output_kind") == "DELTA")
    [one] = alone(streamed).items
    assert (one.at, one.leaves, one.target) == (0, None, True)
    assert one.params == {name: value for name, value in streamed.params.items() if name != "output_kind"}
    assert alone(item).items == (item,)
    [sent] = alone(replace(item, embeds=True, priority=5)).items
    assert (sent.embeds, sent.priority) == (True, 0)


def test_a_whole_vocabulary_is_listed_only_where_that_is_not_too_much() -> None:
    large = Accepts(range(16, 4000), 151_936, -1, EVERY_KIND)
    chance = random.Random(0)
    for _ in range(200):
        params = draw_concurrent(chance, large, 8, 20)
        assert params["logprobs"] != -1 or 8 * large.size <= MOST_LISTED
        assert draw(chance, Accepts(range(16, 400), 400), "greedy", 2, 5)["logprobs"] != -1


def test_a_body_for_a_server_has_the_clients_arguments_and_vllms_apart() -> None:
    params = {
        "temperature": 0.0,
        "max_tokens": 4,
        "ignore_eos": True,
        "logprobs": 5,
        "top_k": 3,
        "logit_bias": {"7": 2.5},
    }
    extra = {"ignore_eos": True, "top_k": 3}
    same = {"temperature": 0.0, "max_tokens": 4, "logit_bias": {"7": 2.5}, "extra_body": extra}
    assert over_http(params, chat=False) == same | {"logprobs": 5}
    assert over_http(params, chat=True) == same | {"logprobs": True, "top_logprobs": 5}
    assert over_http(params | {"output_kind": "DELTA"}, chat=False) == over_http(params, chat=False)


@pytest.mark.parametrize(
    ("architecture", "kind"), [("Lfm2", "conv"), ("Qwen3_5", "linear_attention"), ("NemotronH", "linear_attention")]
)
def test_a_model_with_states_is_drawn_with_what_has_run_beside_them(
    architecture: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    kinds = [kind, kind, "full_attention", kind]
    model = {"architectures": [f"{architecture}ForCausalLM"], "torch_dtype": "bfloat16", "layer_types": kinds}
    model |= {"num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 512, "linear_num_key_heads": 2}
    drawn = [draw_settings("states", number, 256, Place("cpu", 4, model=model)) for number in range(40)]
    assert {one.stages for one in drawn} == {1}
    assert {one.workers for one in drawn} == {one.tree for one in drawn} == {1, 2}
    assert {one.drafter for one in drawn if one.drafts} <= {"ngram"}
    assert {(one.drafts > 0, one.prefix_cache) for one in drawn} == {*product((True, False), repeat=2)}
    assert {one.options.get("retention", NONE) for one in drawn if one.prefix_cache} == {NONE, "all"}
    assert {one.options.get("retention", NONE) for one in drawn if not one.prefix_cache} == {NONE}
    shared = [one for one in drawn if max(one.workers, one.tree) > 1 and architecture != "Qwen3_5"]
    assert {(one.drafts, one.options.get("cache", NONE)) for one in shared} <= {(0, NONE)}
    assert {one.options.get("cache", NONE) for one in drawn} == {NONE, "fp8"}
    assert {one.options.get("cache", NONE) for one in drawn if max(one.workers, one.tree) > 1} <= {NONE}
    assert {one.prefix_cache for one in drawn} == {True, False}
    assert {one.state_pages for one in drawn} == {6}, "three layers of one kind beside one of the other"
    plain = draw_settings("states", 0, 256, Place("cpu", 4))
    assert plain.state_pages == 0


@pytest.mark.parametrize(("architecture", "with_new"), [("Lfm2", True), ("GraniteMoeHybrid", False)])
def test_adapters_beside_states_are_drawn_with_n_grams_and_new_weights_where_these_have_run(
    architecture: str, with_new: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    model = {"architectures": [f"{architecture}ForCausalLM"], "layer_types": ["conv", "full_attention"] * 2}
    drawn = [draw_settings("adapters", number, 256, Place("cpu", 4, model=model)) for number in range(120)]
    beside = [one for one in drawn if "adapters" in one.options]
    assert len(beside) > 10
    assert {(one.workers, one.tree, one.drafts > 0) for one in beside} == {(1, 1, False), (1, 1, True)}
    assert {one.drafter for one in beside if one.drafts} == {"ngram"}
    assert all(one.requests * (one.drafts + 1) <= one.step_tokens for one in beside if one.drafts), "vLLM wants it"
    with_adapters = {name for one in beside for name in one.options}
    assert {"updates", "sleep", "cache"} & with_adapters == ({"updates", "sleep"} if with_new else set())
    others = [one for one in drawn if "adapters" not in one.options]
    assert {name for one in others for name in one.options} >= {"updates", "sleep"}


_CHANNELS = {"num_bits": 8, "type": "float", "strategy": "channel"}
_TOKENS = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}


@pytest.mark.parametrize(
    ("of", "quantised", "drawn"),
    [
        ("Qwen3ForCausalLM", {"quant_method": "fp8", "weight_block_size": [128, 128]}, True),
        ("Qwen3ForCausalLM", {"quant_method": "awq", "bits": 4}, True),
        ("Qwen3VLForConditionalGeneration", {"quant_method": "awq", "bits": 4}, True),
        ("Qwen2_5_VLForConditionalGeneration", {"quant_method": "awq", "bits": 4}, False),
        ("Qwen3ForCausalLM", {"quant_method": "modelopt"}, False),
        ("Qwen3MoeForCausalLM", {"quant_method": "fp8", "weight_block_size": [128, 128]}, False),
        ("Qwen3VLForConditionalGeneration", {"weights": _CHANNELS, "input_activations": _TOKENS}, True),
        ("Qwen2_5_VLForConditionalGeneration", {"weights": {"num_bits": 4, "type": "int"}}, True),
        ("Lfm2ForCausalLM", {"weights": {"num_bits": 4, "type": "float"}}, False),
        ("SmolVLMForConditionalGeneration", {"weights": {"num_bits": 4, "type": "int"}}, False),
    ],
)
def test_adapters_are_drawn_beside_quantised_weights_that_have_run_with_them(
    of: str, quantised: dict[str, Any], drawn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    if "weights" in quantised:
        quantised = {"quant_method": "compressed-tensors", "config_groups": {"group_0": quantised}}
    model = {"architectures": [of], "quantization_config": quantised}
    model |= {"num_attention_heads": 4, "hidden_size": 256, "intermediate_size": 512, "linear_num_key_heads": 2}
    model |= {"num_experts": 8} if "Moe" in of else {}
    places = [draw_settings("codes", number, 256, Place("cpu", 4, model=model)) for number in range(60)]
    with_adapters = [one for one in places if "adapters" in one.options]
    assert bool(with_adapters) == drawn
    assert {one.workers for one in with_adapters} <= ({1, 2} if of == "Qwen3ForCausalLM" else {1})


def test_latent_attention_is_drawn_beside_what_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one worker or two, which have experts whole with a tree alone; in numbers, with and without a prefix cache."""
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    model = EXPERTS | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    drawn = [draw_settings("latent", number, 256, Place("cpu", 4, model=model)) for number in range(60)]
    assert {one.workers for one in drawn} == {1, 2}
    assert {(one.stages, one.pooler) for one in drawn} == {(1, "")}
    assert {(one.drafts > 0, one.prefix_cache) for one in drawn} == {*product((True, False), repeat=2)}
    drafted = {(one.drafter, one.workers, one.tree) for one in drawn if one.drafts}
    assert drafted == {("ngram", 1, 1), ("ngram", 2, 1)}
    for name in ("cache", "adapters", "embeds"):
        assert {one.options.get(name, NONE) for one in drawn} == {NONE}, name
    whole = {(one.workers, one.tree): one.options.get("experts", NONE) for one in drawn}
    assert whole == {(1, 1): NONE, (2, 1): NONE, (1, 2): NONE, (2, 2): "whole"}


def test_two_workers_share_no_block_of_latent_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of queries, nor of keys and values, nor of what goes into the output."""
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    model = EXPERTS | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model |= {"hidden_size": 512, "intermediate_size": 512, "moe_intermediate_size": 256, "n_shared_experts": 2}
    model |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for heads, unturned, value, workers in (
        (4, 64, 128, {1, 2}),
        (4, 48, 128, {1}),
        (2, 128, 64, {1}),
        (4, 64, 32, {1}),
    ):
        sizes = {"num_attention_heads": heads, "qk_nope_head_dim": unturned, "v_head_dim": value}
        drawn = [draw_settings("latent", number, 256, Place("cpu", 4, model=model | sizes)) for number in range(40)]
        assert {one.workers for one in drawn} == workers, sizes


def test_two_workers_share_no_block_of_gated_delta_rules() -> None:
    """Neither of their keys nor of their values."""
    whole = {"num_attention_heads": 4, "head_dim": 128, "hidden_size": 512, "intermediate_size": 512}
    whole |= {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    for of, size, holds in (((4, 8), 64, True), ((2, 8), 64, False), ((4, 6), 64, False)):
        rules = dict(zip(("linear_num_key_heads", "linear_num_value_heads"), of, strict=True))
        rules |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), size)
        assert Place("cpu", 4, model=whole | rules).has_groups() is holds


@pytest.mark.parametrize("ran", [False, True])
def test_a_model_with_states_is_drawn_on_a_gpu_with_the_runner_that_serves_it(
    ran: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    monkeypatch.setattr(coverage, "_DELTA_RULES", coverage._DELTA_RULES._replace(ran={"cuda": "0.33."} if ran else {}))
    kinds = ["linear_attention", "full_attention"]
    model = {"architectures": ["Qwen3_5ForCausalLM"], "torch_dtype": "bfloat16", "layer_types": kinds}
    drawn = [draw_settings("states", number, 256, Place("cuda", 4, 2, model=model)) for number in range(40)]
    assert {(one.workers, one.stages, one.tree) for one in drawn} == {(1, 1, 1)}
    for cached in (False, True):
        assert {one.drafts > 0 for one in drawn if one.prefix_cache == cached} == ({False, True} if ran else {False})
    assert {one.runner for one in drawn} == ({"", "1"} if ran else {""})
    assert {one.eager for one in drawn} == {one.prefix_cache for one in drawn} == {True, False}
    assert {one.options.get("sleep", NONE) for one in drawn} == ({NONE, "on"} if ran else {NONE})


@pytest.mark.parametrize("architecture", ["Lfm2", "NemotronH", "Gemma4", "Qwen3_5"])
@pytest.mark.parametrize(("device", "version"), [("cpu", "0.32.0"), ("cuda", "0.33.0")])
def test_quantised_weights_are_drawn_with_the_workers_and_drafts_that_have_run(
    architecture: str, device: str, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside states, and with heads of two sizes: on a GPU Qwen3.5 alone with drafts, without a prefix cache."""
    monkeypatch.setattr(patch_points, "installed_version", lambda: version)
    model = {"architectures": [f"{architecture}ForCausalLM"], "torch_dtype": "bfloat16", "head_dim": 128}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 512}
    if architecture == "Qwen3_5":
        model |= {"linear_num_key_heads": 2, "linear_num_value_heads": 2}
    plain, quantised = (
        [draw_settings("quantised", number, 256, Place(device, 4, 2, model=model | more)) for number in range(60)]
        for more in ({}, {"quantization_config": {"bits": 4, "group_size": 32}})
    )
    by_several = architecture == "Qwen3_5" or (architecture, device) == ("Gemma4", "cpu")
    assert {2} <= {one.workers for one in plain}
    assert {max(one.workers, one.tree) for one in quantised} == ({1, 2} if by_several else {1})
    drafting = {one.prefix_cache for one in quantised if one.drafts}
    assert {True} <= {one.prefix_cache for one in plain if one.drafts} or (device, architecture) == ("cuda", "Qwen3_5")
    assert drafting == ({True, False} if device == "cpu" else {False} if architecture == "Qwen3_5" else set())


@pytest.mark.parametrize("quantised", [False, True])
def test_experts_beside_state_spaces_are_drawn_by_two_workers_without_codes(
    quantised: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of a checkpoint of ModelOpt's with a KV cache in FP8, with drafts and without."""
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.32.0")
    scheme = {"num_bits": 8, "type": "float", "dynamic": False}
    of_weights = {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": scheme}
    model = {"architectures": ["NemotronHForCausalLM"], "torch_dtype": "bfloat16", "n_routed_experts": 8}
    model |= {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 512, "intermediate_size": 512}
    model |= {"quantization_config": of_weights} if quantised else {}
    drawn = [draw_settings("nano", number, 256, Place("cpu", 4, model=model)) for number in range(60)]
    assert {one.workers for one in drawn} == ({1} if quantised else {1, 2})
    assert {one.stages for one in drawn} == {1}
    assert all(one.options.get("experts") == "whole" for one in drawn if one.workers > 1 and one.tree > 1)
    assert not any(one.drafts for one in drawn if one.workers > 1 or one.tree > 1)
    assert {one.drafter for one in drawn if one.drafts} == {"ngram"}
    assert {(one.drafts > 0, one.prefix_cache) for one in drawn} == {*product((True, False), repeat=2)}
    assert {one.options.get("cache", NONE) for one in drawn} >= {NONE}


def test_a_small_cache_holds_what_windows_and_the_states_of_cuda_graphs_take_beside_keys() -> None:
    config = {"layer_types": ["sliding_attention"] * 5 + ["full_attention"] * 2, "sliding_window": 128}
    assert pages_of_windows(config, 16, 300) == 3 * 28
    assert pages_of_windows({"layer_types": ["sliding_attention"] * 5, "sliding_window": 128}, 16, 300) == 0
    drawn = draw_settings(5, 0, CONTEXT, PLACES["two GPUs"])
    settings = replace(drawn, requests=64, context=256, page=128, small_cache=True, state_pages=2, window_pages=0)
    of_graphs, eager = (replace(settings, eager=eager).arguments("model")[-1] for eager in (False, True))
    assert (of_graphs, eager) == ("65", "6")


def test_quantised_weights_on_a_gpu_are_drawn_in_one_stage() -> None:
    model = {"quantization_config": {"quant_method": "fp8"}, "num_hidden_layers": 4}
    for device, stages in (("cuda", {1}), ("cpu", {1, 2})):
        drawn = (draw_settings(5, number, CONTEXT, Place(device, 4, 2, model)) for number in range(40))
        assert {one.stages for one in drawn} == stages


def test_states_take_two_pages_of_each_group_of_layers() -> None:
    for kinds, pages in (
        ([], 0),
        (["full_attention"] * 4, 0),
        (["conv", "full_attention"] * 3, 2),
        (["conv"] * 10 + ["full_attention"] * 6, 4),
        (["linear_attention", "linear_attention", "linear_attention", "full_attention"] * 2, 6),
    ):
        assert pages_of_states({"layer_types": kinds}) == pages, kinds
    assert pages_of_states({"layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"] * 3}) == 2
    assert pages_of_states({"hybrid_override_pattern": "M-M-M*-M-E"}) == 8
    assert pages_of_states({"model_type": "falcon_h1"}) == 2
    assert pages_of_states({"layer_group_size": 4, "num_hidden_layers": 8}) == 6


def test_layers_with_windows_take_pages_beside_those_of_full_attention() -> None:
    kinds = [*["sliding_attention"] * 5, "full_attention"]
    assert pages_of_windows({}, 128, 64) == 0
    assert pages_of_windows({"layer_types": ["full_attention"] * 4, "sliding_window": None}, 128, 64) == 0
    assert pages_of_windows({"layer_types": kinds, "sliding_window": 64}, 128, 64) == 5 * 2
    assert pages_of_windows({"layer_types": kinds * 2, "sliding_window": 65}, 128, 64) == 5 * 3
    shared = {"layer_types": kinds[4:] * 2, "sliding_window": 64, "num_kv_shared_layers": 2}
    assert pages_of_windows(shared, 128, 64) == 2
    chunked = {"layer_types": [*["chunked_attention"] * 3, "full_attention"], "attention_chunk_size": 64}
    assert pages_of_windows(chunked, 128, 64) == 3 * 2


def test_what_is_quantised_with_latent_attention_is_drawn_on_one_gpu_without_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    model = EXPERTS | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    quantised = model | {"quantization_config": {"quant_method": "fp8"}}
    for given, workers, drafts in ((model, {1, 2}, {0, 1, 3, 7}), (quantised, {1}, {0})):
        drawn = [draw_settings(0, number, 256, Place("cuda", 32, 2, given)) for number in range(60)]
        assert ({one.workers for one in drawn}, {one.drafts for one in drawn}) == (workers, drafts)


def test_a_model_that_was_not_run_without_its_encoder_is_not_drawn_as_text() -> None:
    kinds = {"Mistral3ForConditionalGeneration": {""}, "Qwen3VLForConditionalGeneration": {"", "only", "limits"}}
    for architecture, texts in kinds.items():
        place = Place("cpu", 2, model=SEEING | {"architectures": [architecture]}, encodes=True)
        assert {draw_settings(0, number, 256, place).text for number in range(20)} == texts


def test_latent_attention_is_drawn_on_a_gpu_in_cuda_graphs_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points, "installed_version", lambda: "0.33.0")
    model = EXPERTS | {"architectures": ["DeepseekV3ForCausalLM"], "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    drawn = [draw_settings("latent", number, 256, Place("cuda", 32, 2, model)) for number in range(30)]
    assert {one.workers for one in drawn} == {1, 2}
    assert {one.eager for one in drawn} == {False, True}
    assert {one.runner for one in drawn} == {"", "1"}
    assert {one.eager for one in SETTINGS} == {False, True}

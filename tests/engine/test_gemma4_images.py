"""Gemma 4 with images and videos: a request has the same bits alone, among others, from the caches, in chunks and after
preemption; and is near what Transformers gives. Tokens of an image see all of it that their window holds, on layers
that have one, of the larger models.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import gemma4, images, multimodal
from tests.engine.engines import OF_DEVICE, PATHS, SETTINGS, UNTRIED_THERE, Engine, arguments_of, differing_answers
from tests.engine.test_image_families import asked
from tests.engine.test_images import by_tools, exact
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.verify.check.results import CheckResults

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

NAMES = ("31B", "26B-A4B", "12B", "E2B")
CAUSAL = ("E2B",)
"""Whose tokens see none of an image behind them, so that a step may end inside."""
WIDE, LONG, TALL, SQUARE, SLIM = (7, 10), (1, 70), (14, 5), (8, 8), (2, 35)
FILM = (1, 5, 14)
"""Two frames."""
TARGETS = [
    asked(1, 60, [WIDE], 20),
    asked(2, 7, [LONG, SQUARE]),
    asked(4, 30, [SQUARE]) | {"images": [(SQUARE, 400)]},
    asked(4, 30, [SQUARE]) | {"images": [(SQUARE, 401)]},
    asked(5, 40, []),
    asked(6, 12, [SLIM, FILM]),
]
"""The third and the fourth differ in their pictures alone."""
FEW = [asked(11, 3, [TALL]), asked(12, 45, []), asked(13, 1, [WIDE, FILM])]
MANY = [asked(20 + n, 1 + 7 * n % 40, [[], [SQUARE], [TALL], [LONG]][n % 4], count=2) for n in range(10)]
RUNS = images.runs_of(TARGETS, FEW, MANY)
LIMITS = {
    "max_model_len": 1024, "max_num_seqs": 16, "max_logprobs": -1, "skip_mm_profiling": True, "block_size": 32,
    "dtype": "float32",
    "limit_mm_per_prompt": json.dumps(
        {"audio": 0, "image": 4, "video": {"count": 2, "num_frames": 2, "width": 64, "height": 64}}
    ),
}  # fmt: skip
STEP = 600
"""Tokens of a step, and of what is kept of encoders."""
SMALL_STEPS = {"max_num_batched_tokens": 156}
"""Into which the longest video fits just so."""
SETTINGS_OF = {
    "small steps": SMALL_STEPS,
    "limits of 1": SMALL_STEPS | {"max_num_seqs": 1, "enable_prefix_caching": False},
}
PROBES = [asked(31, 3, [TALL]), asked(32, 4, [WIDE])]
"""That share a step of any size here."""
IN_PARTS = asked(33, 100, [WIDE], 20)
"""Whose image a small step would end in."""
TOLERANCE = 2e-4
"""Of logprobs in fp32 beside float64, absolute."""
IN_CALL, WHOLE_RANGE = images.FAULTS[0], images.UNCUT
DRAWN = ("31B",)
"""Which a fuzzer and a check look at."""


@dataclass
class Served:
    """What an engine gave, also to probes while it had a fault, alone and together; what a fuzzer and a check found, by
    the fault; and its checkpoint.
    """

    runs: dict[str, dict[str, Any]]
    faulty: dict[str, list[list[dict[str, Any]]]]
    fuzzed: dict[str, str]
    checked: dict[str, CheckResults]
    model: torch.nn.Module

    def given(self, name: str) -> list[dict[str, Any]]:
        return self.runs[name]["given"][RUNS[name][1]]

    @property
    def alone(self) -> list[dict[str, Any]]:
        return [self.given(f"alone {number}")[0] for number in range(len(TARGETS))]


def faults_of(name: str) -> list[str]:
    return [fault for fault, has in {IN_CALL: name != "12B", WHOLE_RANGE: name not in CAUSAL}.items() if has]


Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, torch.nn.Module]]:
    @cache
    def made(name: str) -> tuple[Path, torch.nn.Module]:
        folder = tmp_path_factory.mktemp("model")
        return folder, images.save(images.gemma4(name), torch.float32, folder)

    return made


@pytest.fixture(scope="module")
def started(checkpoint: Callable[[str], Any], tmp_path_factory: pytest.TempPathFactory) -> Start:
    version, on = pytest.importorskip("vllm").__version__, "cuda" if torch.cuda.is_available() else "cpu"
    if not version.startswith(RAN.encoding[on]):
        pytest.skip("encoders of images have not run here")
    path = os.pathsep.join([*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS])

    def start(name: str, settings: dict[str, Any], flag: str = "1") -> Engine:
        arguments = arguments_of(LIMITS | OF_DEVICE | settings)
        return Engine(str(checkpoint(name)[0]), arguments, flag, SETTINGS | UNTRIED_THERE | {"PYTHONPATH": path}, 400)

    return start


@pytest.fixture(scope="module")
def served(started: Start, checkpoint: Callable[[str], Any]) -> Callable[[str], Served]:
    @cache
    def serve(name: str) -> Served:
        with started(name, {"max_num_batched_tokens": STEP}) as engine:

            def by_faulty(fault: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
                call = fault, "answers", requests, gemma4.SIDE, "cache"
                return engine.call("tests.engine.images:with_fault", *call)["given"][-1:]

            runs = {
                run: engine.call("tests.engine.images:answers", requests, gemma4.SIDE, reset)
                for run, (requests, _, reset) in RUNS.items()
            }
            company = PROBES[1:], PROBES
            faulty = {fault: [by_faulty(fault, requests) for requests in company] for fault in ("", *faults_of(name))}
            found = by_tools(engine) if name in DRAWN else ({}, {})
        return Served(runs, faulty, *found, checkpoint(name)[1])

    return serve


@pytest.mark.parametrize("name", NAMES)
def test_a_request_with_images_has_the_same_bits_in_any_company(name: str, served: Callable[[str], Served]) -> None:
    found = served(name)
    differing = {run: differing_answers(found.given(run), found.alone) for run in RUNS if "alone" not in run}
    assert {run: numbers for run, numbers in differing.items() if numbers} == {}
    runs = found.runs
    assert runs["behind 3"]["calls"]["items"] > runs["behind 3"]["calls"]["calls"], "no images shared a call"
    assert runs["from the prefix cache"]["cached"][0] >= 128
    assert runs["from the cache of embeddings"]["calls"]["calls"] < runs["together"]["calls"]["calls"]
    assert max(runs["from the cache of embeddings"]["cached"]) == 0
    assert runs["preempted"]["preemptions"] > 0
    assert found.alone[2]["completions"] != found.alone[3]["completions"], "the model does not look at images"


@pytest.mark.parametrize("name", [name for name in NAMES if IN_CALL in faults_of(name)])
def test_an_encoder_whose_items_see_each_other_fails_the_same_comparison(
    name: str, served: Callable[[str], Served]
) -> None:
    """The negative control."""
    assert differing_answers(*served(name).faulty[IN_CALL]) == [0]


@pytest.mark.parametrize("name", DRAWN)
def test_a_check_finds_nothing_but_an_encoder_that_looks_at_its_call_and_a_fuzzer_nothing(
    name: str, served: Callable[[str], Served]
) -> None:
    found = served(name)
    assert found.fuzzed[""] == ""
    multimodal.assert_a_check_finds_the_faulty_tower(found.checked)


@pytest.mark.parametrize("name", [name for name in NAMES if WHOLE_RANGE in faults_of(name)])
def test_a_window_that_does_not_cut_images_shows(name: str, served: Callable[[str], Served]) -> None:
    """The negative control of what Transformers gives."""
    found = served(name)
    assert differing_answers(found.faulty[WHOLE_RANGE][0], found.faulty[""][0]) == [0]


@pytest.mark.parametrize("settings", SETTINGS_OF)
@pytest.mark.parametrize("name", NAMES)
def test_other_limits_move_no_bit(name: str, settings: str, started: Start, served: Callable[[str], Served]) -> None:
    alone, causal = served(name).alone, name in CAUSAL
    ends_inside = {"max_num_batched_tokens": 1 if settings == "limits of 1" else 47} if causal else {}
    with started(name, SETTINGS_OF[settings] | ends_inside) as engine:
        for run in ("together", "behind 3", "preempted"):
            requests, targets, reset = RUNS[run]
            given = engine.call("tests.engine.images:answers", requests, gemma4.SIDE, reset)["given"]
            assert differing_answers(given[targets], alone) == [], run
        if not causal and settings == "small steps":
            call = [IN_PARTS], gemma4.SIDE, "cache"
            whole = engine.call("tests.engine.images:answers", *call)
            parts = engine.call("tests.engine.images:with_images_in_parts", "answers", *call)
            assert differing_answers(parts["given"], whole["given"]) == [0], "the negative control"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes_keep_their_bits(name: str, dtype: str, started: Start) -> None:
    with started(name, SMALL_STEPS | {"dtype": dtype}) as engine:
        [alone, among] = (
            engine.call("tests.engine.images:answers", requests, gemma4.SIDE, "cache")["given"][-1:]
            for requests in (TARGETS[-1:], [*FEW, *TARGETS])
        )
    assert differing_answers(alone, among) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU these models are too small for plain vLLM to vary")
def test_plain_vllm_fails_the_same_comparison(started: Start) -> None:
    with started("E2B", {"max_num_batched_tokens": STEP}, "0") as engine:
        alone, among = (
            engine.call("tests.engine.images:answers", requests, gemma4.SIDE, "cache")["given"][-1:]
            for requests in (TARGETS[:1], [*FEW, TARGETS[0]])
        )
    assert differing_answers(alone, among) == [0]


@pytest.mark.parametrize("name", NAMES)
def test_logprobs_are_near_transformers_in_float64(
    name: str, served: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = served(name)
    model, errors, causal = exact(found.model), [], 0.0
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # which its norms are computed in
    for number, target in enumerate(TARGETS):
        given = found.given("together")[number]
        [answer] = given["completions"]
        listed = [
            (place, token, float.fromhex(logprob))
            for place, entry in enumerate(answer["logprobs"])
            for token, logprob, _ in entry
        ]
        of_kinds = (by_transformers(model, target, given["prompt"], answer["tokens"], both) for both in (1, 0))
        error, without = (
            max(abs(logprob - of[place, token].item()) for place, token, logprob in listed) for of in of_kinds
        )
        errors.append(error)
        causal = max(causal, without)
    assert max(errors) < TOLERANCE, errors
    assert name in CAUSAL or causal > 10 * TOLERANCE, "causal attention of images is as near"


def by_transformers(
    model: Any, target: dict[str, Any], prompt: list[int], answer: list[int], both: int
) -> torch.Tensor:
    """[tokens of the answer, vocabulary] logprobs; with ``both`` of images whose tokens see what is behind them, where
    the configuration says so.
    """
    seen = {}
    with torch.no_grad():  # Transformers itself leaves out how many frames a video has
        if target["images"]:
            pictures = [images.picture(gemma4.SIDE, grid, seed) for grid, seed in target["images"]]
            seen["image"] = model.model.get_image_features(*patches_of(model, pictures), return_dict=True)
        if target["videos"]:
            films = [images.film(gemma4.SIDE, grid, seed)[0] for grid, seed in target["videos"]]
            counts = torch.tensor([len(film) for film in films])
            frames = patches_of(model, np.concatenate(films))
            seen["video"] = model.model.get_video_features(*frames, counts, return_dict=True)
        ids = torch.tensor([prompt + answer[:-1]])
        kinds = both * ((ids == images.IMAGE).int() + 2 * (ids == images.VIDEO).int())
        of_unified = model.config.model_type == "gemma4_unified"
        masks = {"attention_mask": masks_of(model, kinds[0])} if of_unified else {"mm_token_type_ids": kinds}
        logits = model(input_ids=ids, **masks, mm_encoder_outputs=seen).logits[0]
    return logits[-len(answer) :].log_softmax(-1)


def masks_of(model: Any, kinds: torch.Tensor) -> dict[str, torch.Tensor]:
    """By the kind of a layer, what is added to scores, where Transformers has layers without a window see images, too,
    and vLLM does as it does in the other models.

    Args:
        kinds: [tokens], above 0 of an image.
    """
    at, is_image = torch.arange(len(kinds)), kinds > 0
    image = torch.cumsum(is_image & ~is_image.roll(1), 0)
    together = (image[:, None] == image) & is_image[:, None] & is_image
    causal, near = at <= at[:, None], at[:, None] - at < model.config.text_config.sliding_window
    seen = {"full_attention": causal, "sliding_attention": (causal | together) & near}
    return {kind: torch.zeros(of.shape).double().masked_fill(~of, -torch.inf)[None, None] for kind, of in seen.items()}


def patches_of(model: Any, pictures: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Patches [pictures, patches, pixels x 3] and the column and the row of each, of which there are as many of each
    picture, the last ones of padding.
    """
    vision = model.config.vision_config
    merged = vision.model_type == "gemma4_unified_vision"
    side, most = (gemma4.SIDE, 70) if merged else (vision.patch_size, 70 * vision.pooling_kernel_size**2)
    pixels = torch.zeros(len(pictures), most, 3 * side * side, dtype=torch.float64)
    places = torch.full((len(pictures), most, 2), -1)
    for number, picture in enumerate(pictures):
        cut = torch.from_numpy(picture / 255).unflatten(1, (-1, side)).unflatten(0, (-1, side)).transpose(1, 2)
        rows, columns = cut.shape[:2]
        pixels[number, : rows * columns] = cut.flatten(0, 1).flatten(1)
        at = torch.stack(torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy"), -1)
        places[number, : rows * columns] = at.flatten(0, 1)
    return pixels, places

"""Models that see images: an item's embedding follows from its pixels, so a request has the same bits alone, among
others with other images, from the caches, in chunks and after preemption; and is near what Transformers gives.
"""

import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine import images, kept_states, multimodal
from tests.engine.bisected import OF_DECODER
from tests.engine.engines import (
    CHECK,
    OF_DEVICE,
    PATHS,
    SETTINGS,
    UNTRIED_THERE,
    Engine,
    arguments_of,
    differing_answers,
    some_exhaustive,
)
from tests.engine.engines import tokens as drawn_tokens
from tests.faults.fuzz import OF_IMAGES, PROCESSOR
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.verify.answers import RequestSpec
from vllm_batch_invariant.verify.bisect.engine import ENGINE_ARGUMENTS
from vllm_batch_invariant.verify.bisect.recording import ITEM
from vllm_batch_invariant.verify.check.engine import ImagesRun
from vllm_batch_invariant.verify.check.guarantees import cases_of_images
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.fuzz.finding import Row
from vllm_batch_invariant.verify.fuzz.schedule import Settings, draw_schedule, draw_targets
from vllm_batch_invariant.verify.fuzz.trial import Trial
from vllm_batch_invariant.verify.harness.images import FRAMES, png, url
from vllm_batch_invariant.verify.outcome import Status
from vllm_batch_invariant.verify.reproduce import offline
from vllm_batch_invariant.verify.reproduce.report import ReproduceResult

pytestmark = pytest.mark.engine

MODELS = {
    "qwen2.5-vl": images.qwen2_5_vl,
    "qwen3-vl": images.qwen3_vl,
    "qwen3-vl with experts": partial(images.qwen3_vl, multimodal.qwen3_vl_moe),
    "qwen3.5": images.qwen3_5,
    "qwen3.5 with experts": partial(images.qwen3_5, kept_states.QWEN3_5_MOE),
    "intern-s2": images.intern_s2,
}
_UNCACHED = {"enable_prefix_caching": False}
FURTHER = {
    "qwen3.5": _UNCACHED,
    "qwen3.5 with experts": _UNCACHED,
    "intern-s2": _UNCACHED | {"trust_remote_code": True, "mamba_ssm_cache_dtype": "float32"},
}
"""Arguments of some: a state is found in the prefix cache behind hundreds of tokens alone."""
QUICK = ("qwen3-vl",)
"""That run also where each minute counts."""
BUDGET = 128
"""Tokens of a step: fewer than a target has, so that its chunks end inside its images."""
LIMITS = {
    "max_model_len": 1024, "max_num_seqs": 64, "max_logprobs": -1, "skip_mm_profiling": True,
    "limit_mm_per_prompt": '{"image": 8, "video": 2}',
}  # fmt: skip
Grid = tuple[int, ...]
LARGE, OBLONG, TALL, STRIP, SMALL, LEAST = (20, 22), (12, 16), (16, 12), (2, 30), (4, 4), (2, 2)
"""Grids of patches: of several splits and windows, of as many patches as another, narrower than a window, of one token.
"""
FILM = (3, 8, 10)
"""Three times two frames."""
GRIDS = (*((1, *grid) for grid in (LARGE, OBLONG, TALL, STRIP, SMALL, LEAST, (6, 10), (10, 6))), FILM, (3, 10, 8))
CALLS = (
    [0, 1], [1, 0], [2, 1], [1, 2], [6, 7], [7, 6, 7], [8, 9], [9, 0, 8], [5, 4, 3, 2, 1, 0, 8], [4] * 12,
    [5, *[6] * 40, 1],
)  # fmt: skip
FUZZED = Settings(16, BUDGET, 32, True, False, True, False, "", 1024)
"""As the engine, so far as schedules look at it."""
TOLERANCE = 2e-3
"""Of logprobs in fp32 beside float64, absolute: rounding of three layers of a tower, and of two of a decoder."""


def asked(seed: int, before: int, grids: Sequence[Grid], after: int = 3, count: int = 6) -> dict[str, Any]:
    """A request with tokens, an image or a video of each grid, and some tokens behind each."""
    prompt = text(before, seed)
    for place, grid in enumerate(grids):
        item = images.IMAGE if len(grid) == 2 else images.VIDEO
        prompt += [images.START, item, images.END, *text(after, seed + 50 + place)]
    params = {"temperature": 0, "max_tokens": count, "logprobs": 20, "ignore_eos": True}
    items = [(grid, 100 * seed + place) for place, grid in enumerate(grids)]
    pictures, films = ([item for item in items if len(item[0]) == length] for length in (2, 3))
    return {"prompt": prompt, "images": pictures, "videos": films, "params": params}


def text(length: int, seed: int) -> list[int]:
    return [5 + token % 3900 for token in drawn_tokens(length, seed)]


TARGETS = [
    asked(1, 60, [LARGE], 20),  # over the border of a page
    asked(2, 7, [SMALL, OBLONG, LEAST]),
    asked(3, 20, [STRIP]),
    asked(4, 30, [SMALL]) | {"images": [(SMALL, 400)]},
    asked(4, 30, [SMALL]) | {"images": [(SMALL, 401)]},  # the same words about another picture
    asked(5, 40, []),
    asked(6, 12, [SMALL, FILM]),
]
FEW = [asked(11, 3, [TALL, LEAST]), asked(12, 45, []), asked(13, 1, [(8, 30), (3, 10, 8)])]
MANY = [
    asked(20 + n, 1 + 7 * n % 40, [[], [SMALL], [LEAST, (6, 10)], [TALL], [(1, 4, 6)]][n % 5], count=2)
    for n in range(40)
]
COUNT = len(TARGETS)
RUNS = images.runs_of(TARGETS, FEW, MANY)


@dataclass
class Served:
    """What an engine gave, and its checkpoint."""

    runs: dict[str, dict[str, Any]]
    model: torch.nn.Module
    moved: list[str]
    faults: dict[str, list[str]]
    fuzzed: dict[str, str]
    checked: dict[str, CheckResults]
    reproduced: dict[str, ReproduceResult]
    drawn: dict[str, Any]
    """Sizes of items that tools draw, by kind."""

    def given(self, name: str) -> list[dict[str, Any]]:
        return self.runs[name]["given"][RUNS[name][1]]

    def differing(self, name: str) -> list[int]:
        """Targets that got something else in a run than alone."""
        alone = [self.given(f"alone {number}")[0] for number in range(COUNT)]
        return differing_answers(self.given(name), alone)


@pytest.fixture(scope="module")
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    version = pytest.importorskip("vllm").__version__
    if not version.startswith(RAN.encoding["cuda" if torch.cuda.is_available() else "cpu"]):
        pytest.skip("encoders of images have not run here")
    path = os.pathsep.join([*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS])

    @cache
    def serve(name: str, dtype: str = "float32", budget: int = BUDGET, keys: str = "auto") -> Served:
        config, folder = MODELS[name](), tmp_path_factory.mktemp("model")
        model = images.save(config, torch.float32, folder)
        asked = {"dtype": dtype, "max_num_batched_tokens": budget, "kv_cache_dtype": keys} | FURTHER.get(name, {})
        arguments = arguments_of(LIMITS | OF_DEVICE | asked)
        patch = config.vision_config.patch_size
        variables = SETTINGS | {"PYTHONPATH": path} | (UNTRIED_THERE if name in FURTHER or keys != "auto" else {})
        with Engine(str(folder), arguments, "1", variables, patience=400) as engine:
            runs = {
                run: engine.call("tests.engine.images:answers", requests, patch, reset)
                for run, (requests, _, reset) in RUNS.items()
            }
            moved = engine.call("tests.engine.images:moved_in_calls", GRIDS, CALLS)
            faults = {
                fault: engine.call("tests.engine.images:with_fault", fault, "moved_in_calls", GRIDS, CALLS[:6])
                for fault in images.FAULTS
            }
            tools = name in QUICK and (dtype, budget) == ("float32", BUDGET) and are_asked(request)
            found = by_tools(engine) if tools else ({}, {})
            reproduced = by_reproduce(engine, tmp_path_factory.mktemp("items")) if tools else {}
            drawn = engine.info["images"]["kinds"]
        return Served(runs, model, moved, faults, *found, reproduced, drawn)

    return serve


def by_tools(engine: Engine, settings: Settings = FUZZED) -> tuple[dict[str, str], dict[str, CheckResults]]:
    """What the fuzzer and a check find, by the fault that the engine has; "" is none."""
    drawing = Trial(engine, Row("checkpoint", "1", "", 0)).accepts
    drawn = dict(enumerate(draw_targets(1, 8, drawing, settings.context)))
    seeing = {number: one for number, one in drawn.items() if one.kind in drawing.kinds and one.images}
    schedule = draw_schedule("images 1", settings, seeing, drawing, 6)
    fuzzed, checked = {}, {}
    for fault in ("", *OF_IMAGES, PROCESSOR):
        engine.call("tests.faults.fuzz:inject", fault)
        if fault != PROCESSOR:
            fuzzed[fault] = Trial(engine, Row("checkpoint", "1", "", 0)).fuzz(schedule)[1]
        results = CheckResults("1", cases_of_images(CHECK))
        checking = ImagesRun(engine, "as served", CHECK, results, lambda now: None)
        checking.again()
        checking.processed()
        checking.beside_images()
        checking.from_encoded()
        checked[fault] = results
        engine.call("tests.faults.fuzz:inject", "")
    return fuzzed, checked


def are_asked(request: pytest.FixtureRequest) -> bool:
    """Whether a test of the module that asks for a fixture looks at what :func:`by_tools` finds."""
    return any("fuzzer" in item.name for item in request.session.items if item.path == request.path)


def by_reproduce(engine: Engine, folder: Path) -> dict[str, ReproduceResult]:
    """What ``reproduce --offline`` finds of a request with a picture, and with two films, one in frames."""
    picture = folder / "picture.png"
    picture.write_bytes(png(224, 224, 1))
    frames = url({"kind": "video", "size": [5, 112, 224], "seed": 3})

    def found(*items: tuple[str, str]) -> ReproduceResult:
        spec = RequestSpec(prompt="w1 w2", chat=True, max_tokens=4, ignore_eos=True, items=items)
        asked = {"samples": 10, "concurrency": 4, "seed": 0, "spec": vars(spec)}
        return ReproduceResult.of("offline", *offline.run_of(engine.call(offline.RUN, asked)), engine.info)

    done = {"picture": found(("image", str(picture)))}
    for seed in (1, 2):
        done[f"film {seed}"] = found(("video", images.write_film(folder / f"{seed}.mp4", seed)), ("video", frames))
    engine.call("tests.faults.fuzz:inject", "sampler")
    done["faulty"] = found(("video", str(folder / "1.mp4")), ("video", frames))
    engine.call("tests.faults.fuzz:inject", "")
    return done


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", QUICK)
def test_a_fuzzer_and_a_check_find_nothing_but_an_encoder_that_looks_at_its_call(
    name: str, served: Callable[..., Served]
) -> None:
    found = served(name)
    assert found.fuzzed[""] == ""
    assert found.fuzzed["tower"]
    multimodal.assert_a_check_finds_the_faulty_tower(found.checked)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", QUICK)
def test_answers_about_images_and_videos_are_reproduced_beside_others(name: str, served: Callable[..., Served]) -> None:
    """With a sampler that looks at a request's place they are not."""
    found = served(name).reproduced
    assert {name: one.status for name, one in found.items() if one.status != Status.REPRODUCIBLE} == {
        "faulty": Status.DIVERGED
    }
    assert {one.run.failure for one in found.values()} == {""}
    assert found["film 1"].answers[0] != found["film 2"].answers[0], "the model does not look at films"


@pytest.mark.parametrize("name", some_exhaustive(MODELS, QUICK))
def test_tools_draw_films_of_several_frames_and_sizes(name: str, served: Callable[..., Served]) -> None:
    films = [size for size, _ in served(name).drawn["video"]["sizes"]]
    assert {frames for frames, *_ in films} == {*FRAMES}
    assert len({tuple(size) for _, *size in films}) > 3


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_a_request_with_images_has_the_same_bits_from_a_cache_in_fp8(name: str, served: Callable[..., Served]) -> None:
    """Which are others than from one in 16 bits."""
    found, in_16_bits = served(name, "bfloat16", keys="fp8"), served(name, "bfloat16")
    assert {run: differing for run in RUNS if "alone" not in run and (differing := found.differing(run))} == {}
    assert found.given("alone 0") != in_16_bits.given("alone 0")


@pytest.mark.parametrize("name", some_exhaustive(MODELS, QUICK))
def test_a_request_with_images_has_the_same_bits_in_any_company(name: str, served: Callable[..., Served]) -> None:
    found = served(name)
    assert {run: differing for run in RUNS if "alone" not in run and (differing := found.differing(run))} == {}
    runs = found.runs
    assert runs["behind 3"]["calls"]["items"] > runs["behind 3"]["calls"]["calls"], "no images shared a call"
    assert runs["from the prefix cache"]["calls"]["calls"] == 0
    assert runs["from the prefix cache"]["cached"][0] >= 128 or name in FURTHER
    assert runs["from the cache of embeddings"]["calls"]["calls"] == 0
    assert max(runs["from the cache of embeddings"]["cached"]) == 0
    assert runs["preempted"]["preemptions"] > 0
    first, second = (found.given(f"alone {number}")[0]["completions"] for number in (3, 4))
    assert first != second, "the model does not look at images"


@pytest.mark.parametrize("name", some_exhaustive(MODELS, QUICK))
def test_an_item_has_the_same_bits_whatever_shares_its_call(name: str, served: Callable[..., Served]) -> None:
    assert served(name).moved == []


@pytest.mark.parametrize("name", some_exhaustive(MODELS, QUICK))
def test_encoders_with_faults_fail_the_same_comparison(name: str, served: Callable[..., Served]) -> None:
    """The negative control: on a CPU plain vLLM may have the same bits."""
    assert [fault for fault, moved in served(name).faults.items() if not moved] == []


@pytest.mark.parametrize("name", some_exhaustive(MODELS, QUICK))
def test_logprobs_are_near_transformers_in_float64(name: str, served: Callable[..., Served]) -> None:
    found = served(name)
    model = exact(found.model)
    for number, target in enumerate(TARGETS):
        [answer] = found.given("together")[number]["completions"]
        ends = [place for place, token in enumerate(answer["tokens"]) if token in images.SPECIAL]  # to be an image
        tokens = answer["tokens"][: ends[0] + 1 if ends else None]
        expected = by_transformers(model, target, found.given("together")[number]["prompt"], tokens)
        listed = [
            (place, token, float.fromhex(logprob))
            for place, entry in enumerate(answer["logprobs"][: len(expected)])
            for token, logprob, _ in entry
        ]
        error = max(abs(logprob - expected[place, token].item()) for place, token, logprob in listed)
        assert error < TOLERANCE, f"target {number}: {error:.1e}"


@pytest.mark.parametrize("name", some_exhaustive(MODELS, QUICK))
def test_the_tolerance_tells_a_picture_from_another(name: str, served: Callable[..., Served]) -> None:
    """The negative control: the same words about another picture are further away."""
    found = served(name)
    model, prompt = exact(found.model), found.given("together")[3]["prompt"]
    one, other = (by_transformers(model, TARGETS[number], prompt, [7]) for number in (3, 4))
    assert (one - other).abs().max() > 10 * TOLERANCE


def exact(model: Any) -> Any:
    """The model in float64; of experts Transformers has one implementation that knows it."""
    model.set_experts_implementation("eager")
    return model.double().eval()


def by_transformers(model: Any, target: dict[str, Any], prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[tokens of the answer, vocabulary] logprobs.

    Args:
        model: in float64.
        target: with its images and videos.
        prompt: its tokens, one for each row that the tower gives.
        answer: tokens.
    """
    vision, ids = model.config.vision_config, torch.tensor([prompt + answer[:-1]])
    patch, seen = vision.patch_size, {}
    if target["images"]:
        still = [images.picture(patch, grid, seed)[None].repeat(2, 0) for grid, seed in target["images"]]
        seen["pixel_values"] = torch.cat([patches_of(one, vision) for one in still])
        seen["image_grid_thw"] = torch.tensor([[1, *grid] for grid, _ in target["images"]])
    if target["videos"]:
        films = [images.film(patch, grid, seed)[0] for grid, seed in target["videos"]]
        seen["pixel_values_videos"] = torch.cat([patches_of(one, vision) for one in films])
        seen["video_grid_thw"] = torch.tensor([grid for grid, _ in target["videos"]])
        if model.config.model_type == "qwen2_5_vl":
            seen["second_per_grid_ts"] = torch.full((len(films),), 2.0)
    kinds = (ids == images.IMAGE).int() + 2 * (ids == images.VIDEO).int()
    with torch.no_grad():
        logits = model(input_ids=ids, mm_token_type_ids=kinds, **seen).logits[0]
    return logits[-len(answer) :].log_softmax(-1)


def patches_of(frames: np.ndarray, vision: Any) -> torch.Tensor:
    """[patches, channels x time x height x width] in float64, those that are merged one after the other.

    Args:
        frames: [frames, height, width, 3] bytes.
        vision: configuration of the tower.
    """
    patch, merge = vision.patch_size, vision.spatial_merge_size
    mean, std = (np.array(images.NORM[name]) for name in ("image_mean", "image_std"))
    scaled = torch.from_numpy((frames / 255 - mean) / std).permute(0, 3, 1, 2).unflatten(0, (-1, 2))
    split = scaled.unflatten(3, (-1, merge, patch)).unflatten(6, (-1, merge, patch))
    return split.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, 6 * patch * patch)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_larger_chunks_give_the_same_bits(name: str, served: Callable[..., Served]) -> None:
    small, large = served(name), served(name, budget=1024)
    runs = [run for run in RUNS if differing_answers(small.given(run), large.given(run))]
    assert runs == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_bits_stay_in_bf16(name: str, served: Callable[..., Served]) -> None:
    found = served(name, dtype="bfloat16")
    assert {run: differing for run in RUNS if "alone" not in run and (differing := found.differing(run))} == {}
    assert found.moved == []


@pytest.mark.exhaustive
def test_a_bisection_names_an_encoder_that_looks_at_its_call_and_an_operation_of_the_decoder(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    images.save(images.qwen3_vl(), torch.float32, folder)
    arguments = [*arguments_of(LIMITS | OF_DEVICE | {"dtype": "float32"}), *ENGINE_ARGUMENTS]
    variables = SETTINGS | {"PYTHONPATH": os.pathsep.join([*multimodal.python_path(tmp_path), PATHS])}
    with Engine(str(folder), arguments, "1", variables, patience=400) as engine:
        found = engine.call("tests.engine.bisected:with_items")
    assert found[""]["found"] is None
    assert "nothing differs" in found[""]["verdict"]
    keys = {fault: one["found"]["divergence"]["key"] for fault, one in found.items() if fault}
    assert (keys["tower"]["module"], keys["tower"]["operation"]) == ("embed_multimodal, item 1", ITEM)
    assert keys[OF_DECODER]["module"] == OF_DECODER
    assert "a prompt of 12 tokens and 1 item with 4 concurrent requests" in found["tower"]["verdict"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("way", ["by_buckets", "by_reload_weights"])
def test_an_image_that_other_weights_have_seen_is_encoded_again(way: str, tmp_path: Path) -> None:
    config, before, after = images.qwen3_vl(), tmp_path / "before", tmp_path / "after"
    model = images.save(config, torch.float32, before)
    shutil.copytree(before, after)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "visual" in name and weight.dim() > 1:
                weight.mul_(1.25)
    model.save_pretrained(after)
    more = {
        "dtype": "float32",
        "max_num_batched_tokens": BUDGET,
        "worker_extension_cls": "tests.engine.reloads.Extension",
    }
    variables = SETTINGS | {"PYTHONPATH": os.pathsep.join([*multimodal.python_path(tmp_path), PATHS])}
    found: dict[Any, Any] = {}
    for folder in (before, after):
        with Engine(str(folder), arguments_of(LIMITS | OF_DEVICE | more), "1", variables, patience=400) as engine:

            def answer() -> list[dict[str, Any]]:
                asked = engine.call("tests.engine.images:answers", TARGETS[:1], config.vision_config.patch_size, "")
                return asked["given"]

            found[folder] = answer()
            if folder is before:
                assert not differing_answers(answer(), found[before])
                engine.call(f"tests.engine.reloads:{way}", str(after))
                found["replaced"] = answer()
    assert not differing_answers(found["replaced"], found[after])
    assert differing_answers(found[before], found[after])

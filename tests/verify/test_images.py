"""Requests with images: how they are drawn, written and sent, and what is refused. No engine has a model."""

import random
import zlib
from base64 import b64decode
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from tests.verify.commands import ended
from vllm_batch_invariant.verify.answers import RequestSpec, url_of
from vllm_batch_invariant.verify.check.engine import MADE, ImagesRun
from vllm_batch_invariant.verify.check.guarantees import PROCESSED
from vllm_batch_invariant.verify.check.presets import QUICK
from vllm_batch_invariant.verify.check.report import summary
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.fuzz.options import NONE, TEXT_ONLY, Place
from vllm_batch_invariant.verify.fuzz.schedule import Schedule, Settings, draw_schedule, draw_settings, draw_targets
from vllm_batch_invariant.verify.fuzz.shrink import shrink
from vllm_batch_invariant.verify.harness import images
from vllm_batch_invariant.verify.harness.load import Kind, plan_of
from vllm_batch_invariant.verify.harness.requests import Accepts
from vllm_batch_invariant.verify.outcome import NoTestError, Outcome, Status
from vllm_batch_invariant.verify.receipt import engine as receipt_engine
from vllm_batch_invariant.verify.receipt.record import EngineInfo, Environment, Model

ABOUT = {"kinds": {"image": {"sizes": [[[28, 28], 3], [[84, 140], 17]], "most": 2}}, "whole": False}
ABOUT["kinds"]["video"] = {"sizes": [[[4, 56, 56], 10]], "most": 1}
"""An engine that encodes images and videos."""
ACCEPTS = Accepts(range(16, 1000), 4096, -1, images=ABOUT)
SETTINGS = Settings(16, 64, 32, True, False, True, True, "", 1024)
VISION = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "vision_config": {}}


def test_a_sound_has_the_samples_of_its_seed() -> None:
    item = {"kind": "audio", "size": [1000], "seed": 3, "at": 0}
    made = images.data_of(item)
    assert made.shape == (1000,)
    assert abs(made).max() <= 1
    assert (made == images.data_of(item)).all()
    assert (made != images.data_of(item | {"seed": 4})).any()


def test_an_engine_that_answers_about_audio_alone_is_refused() -> None:
    images.require_text({"encoder_decoder": False})
    with pytest.raises(NoTestError, match="the model answers about audio alone"):
        images.require_text({"encoder_decoder": True})


def test_a_picture_has_the_pixels_of_its_seed_and_a_file_has_the_same() -> None:
    pixels = images.rgb(10, 7, 3)
    assert len(pixels) == 210
    assert pixels == images.rgb(10, 7, 3) != images.rgb(10, 7, 4)
    made = images.png(10, 7, 3)
    start = made.index(b"IDAT") + 4
    rows = zlib.decompress(made[start : made.index(b"IEND") - 8])
    assert b"".join(rows[row * 22 + 1 : (row + 1) * 22] for row in range(10)) == pixels


def test_drawn_images_are_of_each_kind_and_fit() -> None:
    chance = random.Random(0)
    drawn = [images.draw(chance, ABOUT, 20, 25) for _ in range(200)]
    assert max(images.tokens_of(items, ABOUT) for items in drawn) <= 25
    assert {item["kind"] for items in drawn for item in items} == {"image", "video"}
    assert {len(items) for items in drawn} > {1, 2}
    for items in drawn:
        assert sum(item["kind"] == "video" for item in items) <= 1
        assert items == sorted(items, key=lambda item: item["at"])
    assert images.draw(chance, ABOUT, 20, 2) == []


def test_half_of_the_targets_and_of_their_company_have_images() -> None:
    targets = dict(enumerate(draw_targets(0, 46, ACCEPTS, 1024)))
    seen = [target for target in targets.values() if target.images]
    assert 10 < len(seen) < 36
    for target in seen:
        assert len(target.prompt) + images.tokens_of(target.images, ABOUT) + target.params["max_tokens"] <= 1024
    schedules = [draw_schedule(f"{number}", SETTINGS, targets, ACCEPTS) for number in range(20)]
    items = [item for schedule in schedules for item in schedule.items]
    assert any(item.images and not item.target for item in items)
    assert any(item.images and item.target for item in items)
    assert [Schedule.from_plain(schedule.plain()) for schedule in schedules] == schedules
    text = Accepts(range(16, 1000), 4096, -1)
    assert not any(target.images for target in draw_targets(0, 46, text, 1024))


def test_a_schedule_is_shrunk_to_the_image_without_which_nothing_differs() -> None:
    targets = dict(enumerate(draw_targets(0, 46, ACCEPTS, 1024)))
    schedule = draw_schedule("3", SETTINGS, targets, ACCEPTS)
    picture = {"kind": "image", "size": [84, 140], "seed": 9, "at": 0}
    first, *others = schedule.items
    items = (
        replace(first, target=True, name="x"),
        *(replace(one, images=(*one.images, picture)) for one in others[:3]),
    )

    def differs(candidate: Schedule) -> bool:
        beside = [item for item in candidate.items if item.name != "x"]
        return any(one["seed"] == 9 for item in beside for one in item.images)

    small = shrink(Schedule(items), "x", differs, 1e9, now=lambda: 0.0)
    assert [len(item.images) for item in small.items if item.name != "x"] == [1]
    assert [item.images for item in small.items if item.name == "x"] == [()]


def test_settings_of_a_model_that_sees_images_are_drawn_with_and_without_them() -> None:
    place = Place("cpu", cores=2, model=VISION, encodes=True)
    drawn = [draw_settings(0, number, 1024, place) for number in range(40)]
    assert {one.text for one in drawn} == {NONE, *TEXT_ONLY}
    seeing = [one for one in drawn if not one.text]
    assert not any(one.exact or one.workers > 1 for one in seeing)
    assert {one.drafter for one in seeing if one.drafts} == {"ngram"}
    assert {one.options.get("cache", NONE) for one in seeing} == {NONE, "fp8"}
    gemma = replace(place, model=VISION | {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]})
    of_gemma = (draw_settings(0, number, 1024, gemma) for number in range(40))
    assert not any("cache" in one.options for one in of_gemma if not one.text)
    assert {"uncached"} <= {one.options.get("processor") for one in seeing}
    assert not any("processor" in one.options for one in drawn if one.text)
    assert any(one.drafts for one in drawn if one.text)
    never = [draw_settings(0, number, 1024, replace(place, encodes=False)) for number in range(40)]
    assert not any(one.text == NONE for one in never)


def test_a_step_of_a_model_whose_images_are_whole_has_room_for_one() -> None:
    place = Place("cpu", cores=2, model=VISION | {"model_type": "gemma3"}, encodes=True)
    drawn = [draw_settings(0, number, 1024, place) for number in range(20)]
    steps = {
        int(arguments[arguments.index("--max-num-batched-tokens") + 1]): one.text
        for one in drawn
        for arguments in [one.arguments("model")]
        if not one.text
    }
    assert min(steps) == 300


def test_a_load_beside_images_has_others_and_the_same(tmp_path: Path) -> None:
    file = tmp_path / "picture.png"
    file.write_bytes(images.png(28, 28, 0))
    spec = RequestSpec(chat=True, items=(("image", str(file)),))
    others = [one for one in plan_of(spec, 300, 32, 4096) if one.kind is not Kind.SAMPLE]
    assert any(one.same for one in others)
    assert {len(one.items) for one in others} >= {0, 1, 2, 4}
    assert {item["kind"] for one in others for item in one.items} == {"image"}
    assert len({tuple(item["size"]) for one in others for item in one.items}) == 4
    plain = plan_of(RequestSpec(chat=True), 300, 32, 4096)
    assert not any(one.items or one.same for one in plain)
    assert [replace(one, items=(), same=False) for one in plan_of(spec, 300, 32, 4096)] == [*plain]
    content = spec.body("model")["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "text"]
    assert content[0]["image_url"]["url"] == url_of("image", str(file))
    assert url_of("image", str(file)).startswith("data:image/png;base64,")


def test_a_load_beside_sounds_has_others_and_images_only_where_the_target_has_some(tmp_path: Path) -> None:
    sound, picture = tmp_path / "sound.wav", tmp_path / "picture.png"
    sound.write_bytes(images.wav_of({"kind": "audio", "size": [900], "seed": 1}))
    picture.write_bytes(images.png(28, 28, 0))
    spec = RequestSpec(chat=True, items=(("audio", str(sound)),))
    drawn = [item for one in plan_of(spec, 300, 32, 4096) for item in one.items]
    assert {item["kind"] for item in drawn} == {"audio"}
    assert {samples for item in drawn for samples in item["size"]} == {int(16_000 * one) for one in images.SECONDS}
    both = replace(spec, items=(("image", str(picture)), *spec.items))
    assert {item["kind"] for one in plan_of(both, 300, 32, 4096) for item in one.items} == {"image", "audio"}
    content = both.body("model")["messages"][0]["content"]
    assert [part["type"] for part in content] == ["image_url", "audio_url", "text"]
    assert content[1]["audio_url"]["url"].startswith("data:audio/wav;base64,")
    assert both.asked["audio"] == (str(sound),)
    assert "audio" not in replace(both, items=()).asked


def test_a_sound_as_a_file_has_the_samples_of_its_seed(tmp_path: Path) -> None:
    item, file = {"kind": "audio", "size": [1000], "seed": 3}, tmp_path / "sound.wav"
    file.write_bytes(images.wav_of(item))
    samples, rate = images.read("audio", str(file))
    assert rate == images.RATE
    assert (samples == images.data_of(item)).all()


def test_a_load_beside_a_video_has_others_of_other_frames_and_sizes(tmp_path: Path) -> None:
    film = tmp_path / "film.mp4"
    film.write_bytes(b"frames")
    spec = RequestSpec(chat=True, items=(("video", str(film)),))
    others = [one for one in plan_of(spec, 300, 32, 4096) if one.kind is not Kind.SAMPLE]
    drawn = [item for one in others for item in one.items]
    assert {item["kind"] for item in drawn} == {"video"}
    assert {tuple(item["size"]) for item in drawn} == {(n, *size) for n in images.FRAMES for size in images.OF_VIDEOS}
    assert {len(one.items) for one in others} >= {0, 1, 2}
    assert any(one.same for one in others)
    content = spec.body("model")["messages"][0]["content"]
    assert content[0] == {"type": "video_url", "video_url": {"url": "data:video/mp4;base64,ZnJhbWVz"}}


def test_a_video_for_a_server_has_the_frames_of_its_seed() -> None:
    item = {"kind": "video", "size": [3, 28, 56], "seed": 2}
    media, _, frames = images.url(item).partition(",")
    assert media == "data:video/jpeg;base64"  # vLLM's name of several pictures
    pictures = [Image.open(BytesIO(b64decode(frame))) for frame in frames.split(",")]
    given, known = images.data_of(item)
    assert (np.stack([np.asarray(one) for one in pictures]) == given).all()
    assert known["total_num_frames"] == 3
    assert (given[0] != given[1]).any()


def test_items_of_a_request_keep_their_order_and_urls() -> None:
    data, film = "data:image/png;base64,aa", "data:video/mp4;base64,bb"
    spec = RequestSpec(chat=True, items=(("video", film), ("image", data), ("video", film)))
    content = spec.body("model")["messages"][0]["content"]
    assert [part[part["type"]]["url"] for part in content[:-1]] == [film, data, film]
    assert {name: spec.asked[name] for name in ("image", "video")} == {"image": (data,), "video": (film, film)}


class Processing:
    """An engine that makes tensors of items and does nothing else.

    Args:
        fault: the size of images follows from how many there are.
        most: images of a request.
    """

    def __init__(self, fault: bool = False, most: int = 2) -> None:
        kinds = {"image": ABOUT["kinds"]["image"] | {"most": most}}
        self.info = {"context": 1024, "vocabulary": 4096, "most_logprobs": -1, "tokenizer": False}
        self.info |= {"images": {"kinds": kinds, "whole": False}}
        self.fault, self.asked = fault, list[list[images.Item]]()

    def call(self, function: str, requests: list[list[images.Item]]) -> list[list[list[str]]]:
        assert function == MADE
        self.asked += requests
        return [
            [
                ["grid [3] int64", f"pixels {one['size']} {one['seed']} {len(items) if self.fault else 1}"]
                for one in items
            ]
            for items in requests
        ]


def processed(engine: Processing) -> CheckResults:
    """What a check finds in what an engine makes of items."""
    results = CheckResults("1", [PROCESSED])
    ImagesRun(engine, "as served", QUICK, results, lambda now: None).processed()
    return results


def test_a_check_compares_what_a_processor_makes_of_an_item_first_and_last_among_others() -> None:
    engine = Processing()
    results = processed(engine)
    assert results.status == Status.REPRODUCIBLE
    target = {"kind": "image", "size": [84, 140], "seed": images.DIFFERENT, "at": 0}
    among = [items for items in engine.asked if target in items]
    assert {(items.index(target), len(items)) for items in among} == {(0, 1), (0, 2), (1, 2)}


def test_a_processor_that_looks_at_how_many_items_there_are_is_found() -> None:
    results = processed(Processing(fault=True))
    assert results.status == Status.DIVERGED
    [case] = results.cases
    found = "tensor 1, image of 28x28 as 1 of 2: pixels [28, 28] 5 2 instead of pixels [28, 28] 5 1"
    assert case.difference == found
    assert summary(results).startswith("1: breaks batch (from tensor 1 on)")


def test_a_processor_of_one_item_a_request_is_not_compared() -> None:
    [case] = processed(Processing(most=1)).cases
    assert (case.outcome, case.required) == (Outcome.NOT_TESTED, False)


def test_an_image_that_is_no_file_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for option, file in (("--image", "no.png"), ("--audio", "no.wav"), ("--video", "no.mp4")):
        said = ended(capsys, "reproduce", "--base-url", "http://localhost:1", option, file)
        assert said.status == 2
        assert f"{option} {Path(file).resolve()}: no such file" in said.err


def test_images_go_with_no_pooling_task(capsys: pytest.CaptureFixture[str]) -> None:
    said = ended(capsys, "reproduce", "--base-url", "http://localhost:1", "--task", "embed", "--image", "no.png")
    assert "--task embed goes without --image" in said.err
    both = ("--audio", "no.wav", "--video", "no.mp4")
    said = ended(capsys, "reproduce", "--base-url", "http://localhost:1", "--task", "embed", *both)
    assert "--task embed goes without --audio, --video" in said.err


def test_a_receipt_of_a_prompt_with_images_needs_what_they_were_made_into() -> None:
    output = SimpleNamespace(prompt_token_ids=[1, 7, 7], finished=True, outputs=[None])
    info = EngineInfo(Model("seeing", why_no_digest="none"), Environment(), of_items=frozenset((7,)))
    with pytest.raises(NoTestError, match="a receipt needs what they were made into"):
        receipt_engine.make(output, None, info)

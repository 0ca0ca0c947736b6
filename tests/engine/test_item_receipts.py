"""Receipts of answers about images and sounds: of the tensors that an encoder gets, in which one pixel is found."""

import json
import os
import wave
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine import audio, images, multimodal
from tests.engine.engines import OF_DEVICE, PATHS, SETTINGS, Engine, arguments_of
from tests.engine.test_images import LIMITS, text
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.verify.harness.images import png
from vllm_batch_invariant.verify.receipt import Receipt, Sampling
from vllm_batch_invariant.verify.receipt.in_engine import make, verify
from vllm_batch_invariant.verify.receipt.record import BadReceipt, Prompt

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

SIDE = 32
"""Pixels of what a token stands for."""
WIDE, TALL = [3 * SIDE, 5 * SIDE], [5 * SIDE, 3 * SIDE]
PICTURES = [{"kind": "image", "size": WIDE, "seed": 1, "at": 9}, {"kind": "image", "size": TALL, "seed": 2, "at": 30}]
SOUND = {"kind": "audio", "size": [9000], "seed": 3, "at": 9}
FIRST, SECOND = PICTURES
OTHERS = {
    "a flipped pixel": [FIRST, SECOND | {"flipped": True}],
    "another size": [FIRST, SECOND | {"size": WIDE}],
    "exchanged": [SECOND, FIRST],
    "one alone": [FIRST],
    "none": [],
}
MAKE, VERIFY = (f"{function.__module__}:{function.__name__}" for function in (make, verify))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    version, on = pytest.importorskip("vllm").__version__, "cuda" if torch.cuda.is_available() else "cpu"
    if not version.startswith(RAN.encoding[on]):
        pytest.skip("encoders of images have not run here")
    return os.pathsep.join([*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS])


@pytest.fixture(scope="module")
def seeing(path: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("seeing")
    images.save(images.qwen3_vl(), torch.float32, folder)
    arguments = arguments_of(LIMITS | OF_DEVICE | {"dtype": "float32", "max_num_batched_tokens": 128})
    with Engine(str(folder), arguments, "1", SETTINGS | {"PYTHONPATH": path}, patience=400) as engine:
        yield engine


@pytest.fixture(scope="module")
def found(seeing: Engine) -> dict[str, Any]:
    return seeing.call("tests.engine.receipts:about_items", text(40, 1), PICTURES, OTHERS)


def test_a_receipt_holds_what_an_encoder_gets_and_where_it_stands(found: dict[str, Any]) -> None:
    made = Receipt.from_json(found["receipt"])
    assert [(item.kind, item.at, item.tokens) for item in made.items] == [("image", 10, 15), ("image", 48, 15)]
    tensors = made.items[0].tensors
    assert {*tensors} == {"image_grid_thw", "pixel_values"}
    assert (tensors["pixel_values"].shape, tensors["pixel_values"].dtype) == ((60, 1536), "uint8")
    assert tensors["pixel_values"] != made.items[1].tensors["pixel_values"]
    assert [made.prompt.token_ids[item.at] for item in made.items] == [images.IMAGE] * 2
    assert "a receipt needs what they were made into" in found["without items"]


def test_the_same_pictures_give_its_bits_beside_requests_with_others(found: dict[str, Any]) -> None:
    last = found["said"]["the same"].splitlines()[-1]
    assert last.startswith("equal: 8 tokens about 2 items and the bits of ")
    assert "computed again with" in last


def test_another_picture_is_found_and_named(found: dict[str, Any]) -> None:
    made, said = Receipt.from_json(found["receipt"]), found["said"]
    digests = [item.tensors["pixel_values"].sha256[:12] for item in made.items]
    last = {name: verdict.splitlines()[-1] for name, verdict in said.items()}
    assert last["a flipped pixel"].startswith("differs: item 1 (image): pixel_values is [60, 1536] uint8 (")
    assert last["a flipped pixel"].endswith(f"instead of [60, 1536] uint8 ({digests[1]})")
    assert last["another size"].startswith("differs: item 1 (image): image_grid_thw is [3] int64 (")
    assert last["exchanged"].startswith("differs: item 0 (image): ")
    assert said["one alone"].startswith("refused: the receipt's request has 2 images, and 1 image given")
    assert said["none"].startswith("refused: the receipt's request has 2 images, and none given")


def test_a_picture_that_comes_twice_is_held_twice(seeing: Engine) -> None:
    twice = [FIRST, FIRST | {"at": 30}]
    found = seeing.call("tests.engine.receipts:about_items", text(40, 2), twice, {"the second other": PICTURES})
    first, second = Receipt.from_json(found["receipt"]).items
    assert (first.tensors, first.at) == (second.tensors, second.at - 38)
    last = {name: said.splitlines()[-1] for name, said in found["said"].items()}
    assert last["the same"].startswith("equal: 8 tokens about 2 items and")
    assert last["the second other"].startswith("differs: item 1 (image): ")


def test_a_request_without_items_has_the_receipt_that_it_had(seeing: Engine) -> None:
    written = seeing.call("tests.engine.receipts:text_alone", text(20, 4))
    assert "items" not in json.loads(written)
    assert Receipt.from_json(written).to_json() == written


def test_items_stand_one_behind_the_other_in_the_prompt(found: dict[str, Any]) -> None:
    made = Receipt.from_json(found["receipt"])
    with pytest.raises(BadReceipt, match="do not stand one behind the other"):
        replace(made, items=made.items[::-1])
    with pytest.raises(BadReceipt, match="do not stand one behind the other"):
        replace(made, prompt=Prompt.of((1, 2, 3)))


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("private", [False, True])
def test_the_command_computes_an_answer_about_files_and_data_again(
    seeing: Engine, tmp_path: Path, chat: bool, private: bool
) -> None:
    files = [tmp_path / "first.png", tmp_path / "second.png"]
    for file, seed in zip(files, (1, 2), strict=True):
        file.write_bytes(png(*WIDE, seed))
    data = f"data:image/png;base64,{b64encode(files[1].read_bytes()).decode()}"
    prompt = {"text": "w5 w6 w7", "chat": chat}
    asked = {"prompt": prompt, "private": private, "trace": False, "adapter": None}
    sampling = vars(Sampling(max_tokens=5, logprobs=2))
    both = [("image", str(files[0])), ("image", files[1].as_uri())]
    written = seeing.call(MAKE, asked | {"sampling": sampling, "items": both})
    assert (Receipt.from_json(written).prompt.token_ids is None) == private

    def told(items: list[tuple[str, str]]) -> dict[str, Any]:
        given = {"receipt": written, "prompt": prompt if private else None, "concurrent": 3, "adapter": None}
        return seeing.call(VERIFY, given | {"items": items})

    assert told([both[0], ("image", data)])["difference"] is None
    files[1].write_bytes(png(*TALL, 2))
    assert told(both)["difference"]["text"].startswith("item 1 (image): ")


BESIDE = {"kind": "image", "size": [336, 480], "seed": 4, "at": 20}
"""A picture behind a sound, of a model that takes both."""


@pytest.mark.parametrize(
    ("config", "beside"),
    [(audio.qwen3_asr, []), (partial(images.gemma4, "E2B"), [BESIDE])],
    ids=["qwen3-asr", "gemma4"],
)
def test_a_receipt_of_a_sound_is_of_what_its_encoder_gets(
    config: Callable[[], Any], beside: list[dict[str, Any]], path: str, tmp_path: Path
) -> None:
    audio.save(config(), torch.float32, tmp_path)
    limits = {"max_model_len": 256, "max_num_seqs": 16, "skip_mm_profiling": True, "dtype": "float32"}
    changed = {"a flipped sample": SOUND | {"flipped": True}, "longer": SOUND | {"size": [20000]}}
    others = {name: [one, *beside] for name, one in changed.items()}
    sounds = tmp_path / "sound.wav"
    with wave.open(str(sounds), "wb") as file:
        file.setparams((1, 2, audio.RATE, 0, "NONE", ""))
        file.writeframes(bytes(range(250)) * 100)
    asked = {"prompt": {"text": "w5 w6"}, "private": False, "trace": False, "adapter": None}
    asked |= {"sampling": vars(Sampling(max_tokens=4)), "items": [("audio", str(sounds))]}
    with Engine(str(tmp_path), arguments_of(limits | OF_DEVICE), "1", SETTINGS | {"PYTHONPATH": path}, 400) as engine:
        found = engine.call("tests.engine.receipts:about_items", text(40, 1), [SOUND, *beside], others)
        of_file = engine.call(MAKE, asked)
        again = {"receipt": of_file, "prompt": None, "concurrent": 3, "adapter": None, "items": asked["items"]}
        verdict = engine.call(VERIFY, again)
    last = {name: said.splitlines()[-1] for name, said in found["said"].items()}
    assert last["the same"].startswith("equal: 8 tokens about ")
    assert last["a flipped sample"].startswith("differs: item 0 (audio): ")
    assert last["longer"].startswith("differs: item 0 (audio): ")
    assert verdict["difference"] is None
    assert Receipt.from_json(of_file).items[0].kind == "audio"

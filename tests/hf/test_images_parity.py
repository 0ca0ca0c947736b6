"""A patched model that sees images has the logprobs of a real rollout, bit for bit; one that is not patched has others,
and so has one with a fault.
"""

import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import pytest
import torch

from scripts.parity import plain_logprobs
from tests.assertions import assert_same_bits
from tests.engine import multimodal
from tests.engine.engines import OF_DEVICE, PATHS, SETTINGS, Engine, arguments_of, some_exhaustive
from tests.hf.models import DEVICE
from tests.hf.pictures import MODELS, PROMPTS, WORDS, Checkpoint, Seen, of_images, packed, ways
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.hf import attention, check_engine, images, patch, token_logprobs
from vllm_batch_invariant.ops.norm_rotary import Sections

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(DEVICE == "cuda", reason="trainers of images were compared with engines on a CPU alone"),
]

QUICK = ("Qwen2.5-VL",)
"""What CI has time for."""
LIMITS = {
    "max_model_len": 1024, "max_num_batched_tokens": 128, "skip_mm_profiling": True,
    "limit_mm_per_prompt": '{"image": 4}',
}  # fmt: skip
"""A step has fewer tokens than a picture: chunks end inside of it."""


class Rollout:
    """Samples of an engine that was asked all prompts together."""

    def __init__(self, name: str, dtype: torch.dtype, folder: Any, path: str) -> None:
        self.checkpoint = Checkpoint(name, dtype, folder)
        asked = {
            "temperature": 1.0, "max_tokens": 12, "logprobs": 0, "prompt_logprobs": 0, "ignore_eos": True,
            "allowed_token_ids": list(WORDS),
        }  # fmt: skip
        requests = [
            {"prompt": words, "images": pictures, "videos": [], "params": asked | {"seed": seed}}
            for seed, (words, pictures) in enumerate(PROMPTS)
        ]
        arguments = arguments_of(LIMITS | OF_DEVICE | {"dtype": str(dtype).removeprefix("torch.")})
        with Engine(str(folder), arguments, "1", SETTINGS | {"PYTHONPATH": path}, patience=400) as engine:
            answers = engine.call("tests.engine.images:answers", requests, self.checkpoint.patch, "cache")["given"]
            self.declared = engine.call("tests.engine.engines:declared")
        self.samples = [_seen(answer, pictures) for answer, (_, pictures) in zip(answers, PROMPTS, strict=True)]

    def differing(self, trainer: Any, logprobs: Callable[..., torch.Tensor] = token_logprobs) -> list[int]:
        """Of each sample alone, how many logprobs a trainer has others."""
        return [
            int((found != sample.logprobs).sum())
            for sample in self.samples
            for found in _of_trainer(trainer, self.checkpoint, [sample], *ways([sample])["right"], logprobs)
        ]


def _seen(answer: dict[str, Any], pictures: Any) -> Seen:
    [completion] = answer["completions"]
    every = answer["prompt"] + completion["tokens"]
    entries = answer["prompt_logprobs"][1:] + completion["logprobs"]
    listed = [{token: value for token, value, _ in entry} for entry in entries]
    values = [float.fromhex(values[token]) for token, values in zip(every[1:], listed, strict=True)]
    return Seen(every, pictures, torch.tensor(values, dtype=torch.float32))


@torch.no_grad()
def _of_trainer(
    trainer: Any,
    checkpoint: Checkpoint,
    samples: list[Seen],
    tokens: torch.Tensor,
    mask: torch.Tensor,
    logprobs: Callable[..., torch.Tensor] = token_logprobs,
) -> list[torch.Tensor]:
    """The logprobs of every sample's tokens but its first, from one padded batch."""
    seen = checkpoint.pixels(*samples)
    logits = trainer(tokens, attention_mask=mask, mm_token_type_ids=of_images(tokens), **seen).logits
    found = logprobs(logits[:, :-1], tokens[:, 1:])
    return [row[real[1:].bool() & real[:-1].bool()] for row, real in zip(found, mask, strict=True)]


@pytest.fixture(scope="module")
def rolled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Rollout]]:
    path = os.pathsep.join([*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS])

    @cache
    def roll(name: str, dtype: torch.dtype = torch.bfloat16) -> Rollout:
        return Rollout(name, dtype, tmp_path_factory.mktemp("checkpoint"), path)

    yield roll


def _patched(rollout: Rollout) -> Any:
    return patch(rollout.checkpoint.load(), image_processor=rollout.checkpoint.processor)


@pytest.mark.parametrize("name", some_exhaustive(MODELS, QUICK))
def test_logprobs_about_images_have_the_rollouts_bits_however_a_batch_is_padded_or_packed(
    name: str, rolled: Callable[..., Rollout], threads: Callable[[int], None]
) -> None:
    rollout = rolled(name)
    trainer, samples = _patched(rollout), rollout.samples
    check_engine(trainer, rollout.declared)
    by_processors = [one | {"engine": one["engine"] | {"mm_device_do_normalize": "False"}} for one in rollout.declared]
    with pytest.raises(NotCovered, match=r"mm_device_do_normalize False beside a trainer with .* unset"):
        check_engine(trainer, by_processors)
    for count in (1, 2):
        threads(count)
        assert rollout.differing(trainer) == [0] * len(samples)
    for way, (tokens, mask) in ways(samples).items():
        found = _of_trainer(trainer, rollout.checkpoint, samples, tokens, mask)
        for number, (ours, sample) in enumerate(zip(found, samples, strict=True)):
            assert_same_bits(ours, sample.logprobs, f"{way}, sequence {number}")
    tokens, positions = packed(samples)
    with torch.no_grad():
        logits = trainer(tokens, position_ids=positions, **rollout.checkpoint.pixels(*samples)).logits
    within = positions[0, 1:] > 0
    found = token_logprobs(logits[0, :-1], tokens[0, 1:])[within]
    assert_same_bits(found, torch.cat([sample.logprobs for sample in samples]), "packed")


@pytest.mark.parametrize("name", some_exhaustive(MODELS, QUICK))
def test_hugging_face_has_others(name: str, rolled: Callable[..., Rollout]) -> None:
    rollout = rolled(name)
    differing = rollout.differing(rollout.checkpoint.load(), plain_logprobs)
    assert all(count > len(sample.tokens) / 2 for count, sample in zip(differing, rollout.samples, strict=True))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", MODELS)
def test_they_have_them_in_fp32(name: str, rolled: Callable[..., Rollout]) -> None:
    rollout = rolled(name, torch.float32)
    trainer = _patched(rollout)
    check_engine(trainer, rollout.declared)
    assert rollout.differing(trainer) == [0] * len(rollout.samples)
    trainer.model.pixel_norm = lambda pixels: pixels  # as Transformers has normalised them
    assert [count > 0 for count in rollout.differing(trainer)] == [bool(one.pictures) for one in rollout.samples]


def _other_sections(of: Callable[[Any], Sections], config: Any) -> Sections:
    sections = of(config)
    return Sections(sections.height, sections.time, sections.width, not sections.interleaved)


def _one_sequence(attend: Callable[..., torch.Tensor], qkv: Any, starts: torch.Tensor, scale: float) -> torch.Tensor:
    return attend(qkv, starts[[0, -1]], scale)


def _none_added(features: Callable[..., list[torch.Tensor]], *given: Any) -> list[torch.Tensor]:
    return features(*given)[:1]


FAULTS = {
    "other sections of positions": (images, "sections_of", _other_sections),
    "attention over all images": (attention, "attend_within", _one_sequence),
    "nothing is added to layers": (images, "_features", _none_added),
}
"""What is replaced, and by what, which is given the original first. The last is one of Qwen3-VL alone."""
PLANTED = [(name, fault) for name in MODELS for fault in list(FAULTS)[: 3 if name == "Qwen3-VL" else 2]]


@pytest.mark.parametrize(
    ("name", "fault"),
    [pytest.param(*one, marks=[] if one[0] in QUICK else [pytest.mark.exhaustive]) for one in PLANTED],
)
def test_a_fault_of_the_trainer_is_found(
    name: str, fault: str, rolled: Callable[..., Rollout], monkeypatch: pytest.MonkeyPatch
) -> None:
    rollout = rolled(name)
    trainer, (module, attribute, replaced) = _patched(rollout), FAULTS[fault]
    monkeypatch.setattr(module, attribute, partial(replaced, getattr(module, attribute)))
    differing = rollout.differing(trainer)
    assert differing[1] > 0, "three images"
    assert differing[2] == 0, "no image"

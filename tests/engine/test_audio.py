"""Models that hear audio: an item's embedding follows from its own sound, so a request has the same bits alone, among
others with other audio, from the caches, in chunks and after preemption; and is near what Transformers gives.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import transformers

from tests.engine import audio, images, multimodal
from tests.engine.engines import OF_DEVICE, PATHS, SETTINGS, Engine, arguments_of, differing_answers
from tests.engine.test_images import text
from vllm_batch_invariant.envs import UNTRIED
from vllm_batch_invariant.integration.coverage import RAN

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

LIMITS = {
    "max_model_len": 1024, "max_num_seqs": 64, "max_logprobs": -1, "skip_mm_profiling": True,
    "limit_mm_per_prompt": '{"audio": 4}', "max_num_batched_tokens": 128, "dtype": "float32",
}  # fmt: skip
SHORTEST = 201
"""Samples: a processor mirrors half a window of 400 at each end."""
LENGTHS = (*range(1, 213), 799, 800, 801, 1037, 3000)
"""Frames of items."""
CALLS: list[list[int]] = [
    list(range(0, len(LENGTHS), 2)), list(range(len(LENGTHS) - 1, 0, -3)), [0, 1], [1, 0], [5, 216, 5], [216, 99],
    [*range(40)], [98, 99, 100], [99, 98], [212, 49, 213, 48, 214], [7] * 30, [30, *[11] * 20, 215],
]  # fmt: skip
"""Items that share one."""
FEW_LENGTHS, FEW_CALLS = (1, 7, 50, 99, 100, 101, 250, 640, 801), [[0, 1], [0, 7], [3, 2], [6, 5, 3], [8, 7, 6, 2, 0]]
TOLERANCE = 2e-5
"""Of logprobs in fp32 beside float64, absolute: rounding of two layers of a tower, and of two of a decoder."""


def asked(seed: int, before: int, lengths: Sequence[int], after: int = 3, count: int = 6) -> dict[str, Any]:
    """A request with tokens, a sound of so many samples each, and some tokens behind each."""
    prompt = text(before, seed)
    for place in range(len(lengths)):
        prompt += [audio.START, audio.AUDIO, audio.END, *text(after, seed + 50 + place)]
    params = {"temperature": 0, "max_tokens": count, "logprobs": 20, "ignore_eos": True}
    return {"prompt": prompt, "sounds": [(one, 100 * seed + i) for i, one in enumerate(lengths)], "params": params}


SECOND = audio.RATE
TARGETS = [
    asked(1, 60, [17 * SECOND + 77], 20),  # over borders of steps and pages
    asked(2, 7, [SECOND // 2, 3 * SECOND, SHORTEST]),
    asked(3, 20, [SECOND]),
    asked(4, 30, [SECOND // 3]) | {"sounds": [(SECOND // 3, 400)]},
    asked(4, 30, [SECOND // 3]) | {"sounds": [(SECOND // 3, 401)]},  # the same words about another sound
    asked(5, 40, []),
]
FEW = [asked(11, 3, [2 * SECOND, SECOND // 4]), asked(12, 45, []), asked(13, 1, [9 * SECOND])]
MANY = [
    asked(20 + n, 1 + 7 * n % 40, [[], [SECOND // 5], [SHORTEST, SECOND + 300], [3 * SECOND]][n % 4], count=2)
    for n in range(24)
]
COUNT = len(TARGETS)
RUNS = images.runs_of(TARGETS, FEW, MANY)


@dataclass
class Served:
    """What an engine gave, and its checkpoint."""

    runs: dict[str, dict[str, Any]]
    encoded: dict[str, Any]
    faults: dict[str, list[str]]
    model: torch.nn.Module
    extract: Any

    def given(self, name: str) -> list[dict[str, Any]]:
        return self.runs[name]["given"][RUNS[name][1]]

    @property
    def alone(self) -> list[dict[str, Any]]:
        return [self.given(f"alone {number}")[0] for number in range(COUNT)]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str | None], tuple[Engine, Any, Any]]:
    """An engine of a family's model in the mode ("1") or without it (None); the model, and what extracts features."""
    version, on = pytest.importorskip("vllm").__version__, "cuda" if torch.cuda.is_available() else "cpu"
    if not version.startswith(RAN.encoding[on]):
        pytest.skip("encoders have not run here")
    path = os.pathsep.join([*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS])

    @cache
    def made(name: str) -> tuple[str, Any, Any]:
        folder = tmp_path_factory.mktemp("model")
        model = audio.save(FAMILIES[name](), torch.float32, folder)
        return str(folder), model, transformers.AutoFeatureExtractor.from_pretrained(folder)

    def start(name: str, flag: str | None) -> tuple[Engine, Any, Any]:
        folder, model, extract = made(name)
        environment = SETTINGS | {"PYTHONPATH": path, UNTRIED.name: "1"}
        eager = {} if flag else {"enforce_eager": True}
        return Engine(folder, arguments_of(LIMITS | OF_DEVICE | eager), flag, environment, patience=400), model, extract

    return start


FAMILIES = {"qwen3-asr": audio.qwen3_asr}


@pytest.fixture(scope="module")
def served(engine_of: Callable[[str, str | None], tuple[Engine, Any, Any]]) -> Callable[[str], Served]:
    @cache
    def serve(name: str) -> Served:
        starting, model, extract = engine_of(name, "1")
        with starting as engine:
            runs = {
                run: engine.call("tests.engine.audio:answers", requests, reset)
                for run, (requests, _, reset) in RUNS.items()
            }
            encoded = engine.call("tests.engine.audio:embeddings", LENGTHS, CALLS)
            faults = {
                fault: engine.call("tests.engine.audio:with_fault", fault, "embeddings", FEW_LENGTHS, FEW_CALLS)[
                    "moved"
                ]
                for fault in ("", *audio.FAULTS)
            }
        return Served(runs, encoded, faults, model, extract)

    return serve


@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_with_audio_has_the_same_bits_in_any_company(name: str, served: Callable[[str], Served]) -> None:
    found = served(name)
    differing = {run: differing_answers(found.given(run), found.alone) for run in RUNS if "alone" not in run}
    assert {run: numbers for run, numbers in differing.items() if numbers} == {}
    runs = found.runs
    assert runs["behind 3"]["calls"]["items"] > runs["behind 3"]["calls"]["calls"], "no items shared a call"
    assert runs["from the prefix cache"]["calls"]["calls"] == 0
    assert runs["from the prefix cache"]["cached"][0] >= 128
    assert runs["from the cache of embeddings"]["calls"]["calls"] == 0
    assert max(runs["from the cache of embeddings"]["cached"]) == 0
    assert runs["preempted"]["preemptions"] > 0
    assert found.alone[3]["completions"] != found.alone[4]["completions"], "the model does not listen"


@pytest.mark.parametrize("name", FAMILIES)
def test_an_item_of_any_length_has_the_same_bits_whatever_shares_its_call(
    name: str, served: Callable[[str], Served]
) -> None:
    found = served(name).encoded
    assert found["moved"] == []
    assert len(set(found["alone"])) == len(LENGTHS)


@pytest.mark.parametrize("name", FAMILIES)
def test_encoders_with_faults_fail_the_same_comparison(name: str, served: Callable[[str], Served]) -> None:
    faults = dict(served(name).faults)
    assert faults.pop("") == []
    assert [fault for fault, moved in faults.items() if not moved] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_vllm_fails_the_same_comparison(
    name: str, engine_of: Callable[[str, str | None], tuple[Engine, Any, Any]]
) -> None:
    with engine_of(name, None)[0] as engine:
        assert engine.call("tests.engine.audio:embeddings", FEW_LENGTHS, FEW_CALLS)["moved"]


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_near_transformers_in_float64(name: str, served: Callable[[str], Served]) -> None:
    found = served(name)
    model, errors = found.model.double().eval(), []
    for number, target in enumerate(TARGETS):
        given = found.given("together")[number]
        [answer] = given["completions"]
        ends = [place for place, token in enumerate(answer["tokens"]) if token in audio.SPECIAL]  # to be a sound
        tokens = answer["tokens"][: ends[0] + 1 if ends else None]
        expected = by_transformers(model, found.extract, target, given["prompt"], tokens)
        listed = [
            (place, token, float.fromhex(logprob))
            for place, entry in enumerate(answer["logprobs"][: len(expected)])
            for token, logprob, _ in entry
        ]
        errors.append(max(abs(logprob - expected[place, token].item()) for place, token, logprob in listed))
    assert max(errors) < TOLERANCE, errors
    prompt = found.given("together")[3]["prompt"]
    one, other = (by_transformers(model, found.extract, TARGETS[number], prompt, [7]) for number in (3, 4))
    assert (one - other).abs().max() > 10 * TOLERANCE, "another sound is as near"


def by_transformers(
    model: Any, extract: Any, target: dict[str, Any], prompt: list[int], answer: list[int]
) -> torch.Tensor:
    """[tokens of the answer, vocabulary] logprobs.

    Args:
        model: in float64.
        extract: makes features of a sound.
        target: with its sounds.
        prompt: its tokens, one for each row that the tower gives.
        answer: tokens.
    """
    heard: dict[str, torch.Tensor] = {}
    if target["sounds"]:
        made = [
            extract(audio.sound(samples, seed), sampling_rate=audio.RATE, padding=True, return_attention_mask=True)
            for samples, seed in target["sounds"]
        ]
        longest = max(one["input_features"].shape[-1] for one in made)
        for ours, theirs in (("input_features", "input_features"), ("input_features_mask", "attention_mask")):
            rows = [torch.nn.functional.pad(one[theirs], (0, longest - one[theirs].shape[-1])) for one in made]
            heard[ours] = torch.cat(rows)
        heard["input_features"] = heard["input_features"].double()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt + answer[:-1]]), **heard).logits[0]
    return logits[-len(answer) :].log_softmax(-1)

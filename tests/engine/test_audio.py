"""Models that hear audio: an item's embedding follows from its own sound, so a request has the same bits alone, among
others with other audio, from the caches, in chunks and after preemption; and is near what Transformers gives.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine import audio, images, multimodal, nemotron_vl
from tests.engine.engines import OF_DEVICE, PATHS, SETTINGS, Engine, arguments_of, differing_answers
from tests.engine.test_images import by_tools, exact, text
from vllm_batch_invariant.envs import UNTRIED
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.verify.answers import RequestSpec
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.harness.images import wav_of
from vllm_batch_invariant.verify.outcome import Status
from vllm_batch_invariant.verify.reproduce import offline
from vllm_batch_invariant.verify.reproduce.report import ReproduceResult

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

SECOND = audio.RATE
SHORTEST = 201
"""Samples: a processor mirrors half a window of 400 at each end."""
TOLERANCE = 2e-5
"""Of logprobs in fp32 beside float64, absolute: rounding of two layers of a tower, and of two of a decoder."""
Requests = list[dict[str, Any]]


def params(count: int) -> dict[str, Any]:
    return {"temperature": 0, "max_tokens": count, "logprobs": 20, "ignore_eos": True}


def asked(seed: int, before: int, lengths: Sequence[int], after: int = 3, count: int = 6) -> dict[str, Any]:
    """A request with tokens, a sound of so many samples each, and some tokens behind each."""
    prompt = text(before, seed)
    for place in range(len(lengths)):
        prompt += [audio.START, audio.AUDIO, audio.END, *text(after, seed + 50 + place)]
    sounds = [(one, 100 * seed + place) for place, one in enumerate(lengths)]
    return {"prompt": prompt, "sounds": sounds, "params": params(count)}


FOUR_SOUNDS = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 128} | {
    "limit_mm_per_prompt": '{"audio": 4}'
}


def targets_of(longest: int, shortest: int, whole: int) -> list[dict[str, Any]]:
    """Of a family that is given any number of sounds: a sound over borders of steps and pages, several, the shortest
    among them, a whole one, two that differ in their noise, and none.

    Args:
        longest: samples.
        shortest: samples.
        whole: samples of what fills a step of its encoder, or a second.
    """
    return [
        asked(1, 60, [longest], 20),
        asked(2, 7, [SECOND // 2, 3 * SECOND, shortest]),
        asked(3, 20, [whole]),
        asked(4, 30, [SECOND // 3]) | {"sounds": [(SECOND // 3, 400)]},
        asked(4, 30, [SECOND // 3]) | {"sounds": [(SECOND // 3, 401)]},
        asked(5, 40, []),
    ]


def heard(seed: int, samples: int, before: int = 1, count: int = 6) -> dict[str, Any]:
    """A request about one sound, with tokens of a transcript before it is written."""
    prompt = [audio.START, *text(before, seed)]
    return {"prompt": prompt, "sounds": [(samples, 100 * seed)], "params": params(count)}


@dataclass(frozen=True)
class Family:
    """A kind of models, and what is asked of it.

    Attributes:
        config: of a checkpoint.
        settings: of an engine.
        targets: requests that are looked at; the fourth and the fifth differ in their sounds alone.
        few: others before them.
        many: others behind them.
        has_caches: whether prefixes and embeddings are kept.
        lengths: frames of items.
        calls: items that share one.
        few_lengths: of items that an encoder with a fault is given.
        few_calls: which of them share one.
        faults: of its encoder.
        tolerance: of logprobs.
    """

    config: Callable[[], transformers.PretrainedConfig]
    settings: dict[str, Any]
    targets: Requests
    few: Requests
    many: Requests
    has_caches: bool
    lengths: tuple[int, ...]
    calls: tuple[Sequence[int], ...]
    few_lengths: tuple[int, ...]
    few_calls: tuple[Sequence[int], ...]
    faults: tuple[str, ...]
    tolerance: float = TOLERANCE

    @property
    def runs(self) -> dict[str, tuple[Requests, slice, str]]:
        runs = images.runs_of(self.targets, self.few, self.many)
        return {name: run for name, run in runs.items() if self.has_caches or not name.startswith("from ")}


QWEN3_ASR = Family(
    config=audio.qwen3_asr,
    settings=FOUR_SOUNDS,
    targets=targets_of(17 * SECOND + 77, SHORTEST, SECOND),
    few=[asked(11, 3, [2 * SECOND, SECOND // 4]), asked(12, 45, []), asked(13, 1, [9 * SECOND])],
    many=[
        asked(20 + n, 1 + 7 * n % 40, [[], [SECOND // 5], [SHORTEST, SECOND + 300], [3 * SECOND]][n % 4], count=2)
        for n in range(24)
    ],
    has_caches=True,
    lengths=(*range(1, 213), 799, 800, 801, 1037, 3000),
    calls=(
        range(0, 217, 2), range(216, 0, -3), [0, 1], [1, 0], [5, 216, 5], [216, 99], range(40), [98, 99, 100],
        [99, 98], [212, 49, 213, 48, 214], [7] * 30, [30, *[11] * 20, 215],
    ),
    few_lengths=(1, 7, 50, 99, 100, 101, 250, 640, 801),
    few_calls=([0, 1], [0, 7], [3, 2], [6, 5, 3], [8, 7, 6, 2, 0]),
    faults=(audio.OF_CALLS, audio.OF_LENGTHS, audio.OF_CHUNKS),
)  # fmt: skip
LEAST = 321
"""Samples of a token of Qwen2-Audio."""
QWEN2_AUDIO = Family(
    config=audio.qwen2_audio,
    settings=FOUR_SOUNDS,
    targets=targets_of(13 * SECOND + 77, LEAST, SECOND),
    few=[
        asked(11, 3, [2 * SECOND, SECOND // 4]),
        asked(12, 45, []),
        asked(13, 1, [31 * SECOND]),
    ],  # the last one's end is cut off
    many=[
        asked(20 + n, 1 + 7 * n % 40, [[], [SECOND // 5], [LEAST, SECOND + 300], [3 * SECOND]][n % 4], count=2)
        for n in range(16)
    ],
    has_caches=True,
    lengths=(3, 4, 5, 7, 100, 101, 127, 128, 129, 511, 512, 513, 2047, 2048, 2049, 2999, 3000),
    calls=([0, 1], [1, 0], range(17), range(16, 0, -5), [0] * 9, [3, 16, 3], [12, 13, 14], [14, 2, 12]),
    few_lengths=(3, 100, 640, 3000),
    few_calls=([0, 1], [2, 1, 0], [3, 2]),
    faults=(audio.OF_CALLS, audio.OF_LENGTHS),
)
WHISPER = Family(
    config=audio.whisper,
    settings={"max_model_len": 256, "max_num_seqs": 16, "max_num_batched_tokens": 2048},
    targets=[
        heard(1, 6 * SECOND, 3),
        heard(2, SECOND // 2, 130),  # over the border of a page
        heard(3, SHORTEST),
        heard(4, 2 * SECOND, 9) | {"sounds": [(2 * SECOND, 400)]},
        heard(4, 2 * SECOND, 9) | {"sounds": [(2 * SECOND, 401)]},
        heard(5, 9 * SECOND, 40),  # of which three seconds are cut off
    ],
    few=[heard(11, 3 * SECOND, 200), heard(12, SECOND, count=12), heard(13, 5 * SECOND, 20, 2)],
    many=[heard(20 + n, SHORTEST + n * SECOND // 5, 1 + 7 * n % 40, 1 + n % 3) for n in range(24)],
    has_caches=False,
    lengths=(*range(0, 601, 24), 1, 599),
    calls=([0, 1], [1, 0], range(27), range(26, 0, -5), [25] * 9, [3, 25, 3]),
    few_lengths=(1, 100, 600),
    few_calls=([0, 1], [2, 1, 0]),
    faults=(audio.OF_CALLS,),
)
CHUNK = 2 * SECOND


def spoken(seed: int, before: int, lengths: Sequence[int], after: int = 3, count: int = 6) -> dict[str, Any]:
    """The same of Voxtral, in whose prompts a sound has all its tokens."""
    made = asked(seed, before, lengths, after, count)
    prompt = text(before, seed)
    for place, length in enumerate(lengths):
        prompt += [*audio.voxtral_tokens(length), *text(after, seed + 50 + place)]
    return made | {"prompt": [64 + token % 4032 if token > 25 else token for token in prompt]}


VOXTRAL = Family(
    config=audio.voxtral,
    settings={"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 128}
    | {"limit_mm_per_prompt": '{"audio": 4}'}
    | dict.fromkeys(("tokenizer_mode", "config_format", "load_format"), "mistral"),
    targets=[
        spoken(1, 60, [17 * SECOND + 77], 20),  # over borders of steps and pages
        spoken(2, 7, [SECOND // 2, 3 * SECOND, 1]),
        spoken(3, 20, [CHUNK]),
        spoken(4, 30, [SECOND // 3]) | {"sounds": [(SECOND // 3, 400)]},
        spoken(4, 30, [SECOND // 3]) | {"sounds": [(SECOND // 3, 401)]},
        spoken(5, 40, []),
    ],
    few=[spoken(11, 3, [CHUNK + 1, SECOND // 4]), spoken(12, 45, []), spoken(13, 1, [9 * SECOND])],
    many=[
        spoken(20 + n, 1 + 7 * n % 40, [[], [SECOND // 5], [1, SECOND + 300], [3 * SECOND]][n % 4], count=2)
        for n in range(16)
    ],
    has_caches=True,
    lengths=(1, 160, 1279, 1280, SECOND, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 9 * SECOND + 5),
    calls=([0, 1], [1, 0], range(10), range(9, 0, -2), [0] * 9, [3, 8, 3], [6, 7], [7, 6], [9, 2, 9]),
    few_lengths=(1, SECOND, CHUNK + 1),
    few_calls=([0, 1], [2, 1, 0], [1] * 9),
    faults=(audio.OF_CALLS, images.OF_NUMBER),
)
BRIEFEST = 961
"""Samples of a token of GLM-ASR."""
GLM_ASR = Family(
    config=audio.glm_asr,
    settings=FOUR_SOUNDS,
    targets=targets_of(17 * SECOND + 77, BRIEFEST, CHUNK),
    few=[
        asked(11, 3, [CHUNK + 1, SECOND // 4]),
        asked(12, 45, []),
        asked(13, 1, [41 * SECOND]),
    ],  # the last one's end is cut off
    many=[
        asked(20 + n, 1 + 7 * n % 40, [[], [SECOND // 5], [BRIEFEST, SECOND + 300], [3 * SECOND]][n % 4], count=2)
        for n in range(16)
    ],
    has_caches=True,
    lengths=(7, 8, 9, 15, 16, 17, 99, 100, 101, 127, 128, 129, 193, 199, 200, 201, 399, 400, 401, 1000, 1703),
    calls=(
        [0, 1], [1, 0], range(21), range(20, 0, -3), [0] * 9, [3, 20, 3], [13, 14, 15], [15, 14, 2, 12], [20, 19, 18],
        [15] * 30,
    ),
    few_lengths=(7, 100, 200, 201, 640),
    few_calls=([0, 1], [2, 1, 0], [4, 3], [1] * 9),
    faults=(audio.OF_CALLS, images.OF_NUMBER),
)  # fmt: skip
FRAME = 161
"""Samples of a frame of Gemma 4's."""


def told(seed: int, before: int, lengths: Sequence[int], after: int = 3, count: int = 6) -> dict[str, Any]:
    """The same of Gemma 4, in whose prompts a sound is one token, around which a processor writes others."""
    made = asked(seed, before, lengths, after, count)
    prompt = text(before, seed)
    for place in range(len(lengths)):
        prompt += [audio.OF_GEMMA_4, *text(after, seed + 50 + place)]
    return made | {"prompt": prompt}


GEMMA_4 = Family(
    config=partial(images.gemma4, "E2B"),
    settings={"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 128}
    | {"limit_mm_per_prompt": '{"audio": 4, "image": 2, "video": 0}'},
    targets=[
        told(1, 60, [17 * SECOND + 77], 20),  # over borders of steps and pages
        told(2, 7, [SECOND // 2, 3 * SECOND, FRAME]),
        told(3, 20, [SECOND]),
        told(4, 30, [SECOND // 3]) | {"sounds": [(SECOND // 3, 400)]},
        told(4, 30, [SECOND // 3]) | {"sounds": [(SECOND // 3, 401)]},
        told(5, 40, []),
    ],
    few=[told(11, 3, [2 * SECOND, SECOND // 4]), told(12, 45, []), told(13, 1, [9 * SECOND])],
    many=[
        told(20 + n, 1 + 7 * n % 40, [[], [SECOND // 5], [FRAME, SECOND + 300], [3 * SECOND]][n % 4], count=2)
        for n in range(16)
    ],
    has_caches=True,
    lengths=(*range(1, 60), 95, 96, 97, 191, 192, 193, 750, 1201, 2999),
    calls=(
        range(0, 68, 2), range(67, 0, -3), [0, 1], [1, 0], [0] * 9, [5, 67, 5], [66, 2], range(40), [47, 48, 49],
        [49, 46], [60, 47, 61, 46, 62], [7] * 30, [30, *[11] * 20, 65],
    ),
    few_lengths=(1, 4, 6, 50, 99, 100, 801),
    few_calls=([0, 1], [2, 1, 0], [3, 5, 6], [6, 5, 4, 1, 0]),
    faults=(audio.OF_MASKS, audio.OF_CONVOLUTIONS),
    tolerance=2e-4,  # of four layers of a decoder with inputs of their own
)  # fmt: skip
GEMMA_4_UNIFIED = replace(
    GEMMA_4,
    config=partial(images.gemma4, "12B"),
    settings=GEMMA_4.settings | {"max_num_batched_tokens": 800},  # a step has all of the longest sound
    faults=(images.OF_ITEMS,),
)
OF_GEMMA_4 = GEMMA_4, GEMMA_4_UNIFIED
NEMOTRON_OMNI = Family(  # whose prompts have one token of a sound, too
    config=nemotron_vl.hearing,
    settings={"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": 128}
    | {"limit_mm_per_prompt": '{"audio": 4, "image": 2, "video": 0}', "dtype": "bfloat16", "trust_remote_code": True},
    targets=[
        told(1, 60, [17 * SECOND + 77], 20),  # over borders of steps and pages
        told(2, 7, [SECOND // 2, 3 * SECOND, 1]),
        told(3, 20, [SECOND]),
        told(4, 30, [SECOND // 3]) | {"sounds": [(SECOND // 3, 400)]},
        told(4, 30, [SECOND // 3]) | {"sounds": [(SECOND // 3, 401)]},
        told(5, 40, []),
    ],
    few=[told(11, 3, [2 * SECOND, SECOND // 4]), told(12, 45, []), told(13, 1, [31 * SECOND])],  # of two clips
    many=GEMMA_4.many,
    has_caches=True,
    lengths=(*range(10, 60), 95, 96, 97, 191, 192, 193, 750, 1201, 2999, 3000),
    calls=(
        range(0, 60, 2), range(59, 0, -3), [0, 1], [1, 0], [0] * 9, [5, 59, 5], [58, 2], range(40), [47, 48, 49],
        [49, 46], [50, 37, 51, 36, 52], [7] * 30, [30, *[11] * 20, 55],
    ),
    few_lengths=(10, 14, 16, 50, 99, 100, 801),
    few_calls=([0, 1], [2, 1, 0], [3, 5, 6], [6, 5, 4, 1, 0]),
    faults=(images.OF_ITEMS,),
    tolerance=0.2,
)  # fmt: skip
FAMILIES = {
    "voxtral": VOXTRAL, "qwen3-asr": QWEN3_ASR, "qwen2-audio": QWEN2_AUDIO, "whisper": WHISPER, "gemma4": GEMMA_4,
    "gemma4 12B": GEMMA_4_UNIFIED, "nemotron nano omni": NEMOTRON_OMNI, "glm-asr": GLM_ASR,
}  # fmt: skip
EXTRACTORS = {"voxtral": audio.voxtral_features, "nemotron nano omni": nemotron_vl.clips}
"""What makes features of a sound, where no class of Transformers' does."""
LIMITS = {"max_logprobs": -1, "skip_mm_profiling": True, "dtype": "float32"}


@dataclass
class Served:
    """What an engine gave: answers by their run, embeddings of items alone and in calls, the same with faults; answers
    to requests that come back beside new ones, and with faults of what lies behind the encoder; and its checkpoint.
    """

    family: Family
    runs: dict[str, dict[str, Any]]
    encoded: dict[str, Any]
    faults: dict[str, list[str]]
    beside_new: dict[str, dict[str, Any]]
    fuzzed: dict[str, str]
    checked: dict[str, CheckResults]
    model: torch.nn.Module
    extract: Any

    def given(self, name: str) -> list[dict[str, Any]]:
        return self.runs[name]["given"][self.family.runs[name][1]]

    @property
    def alone(self) -> list[dict[str, Any]]:
        return [self.given(f"alone {number}")[0] for number in range(len(self.family.targets))]


Starts = Callable[..., tuple[Engine, Any, Any]]


@pytest.fixture(scope="module")
def engine_of(tmp_path_factory: pytest.TempPathFactory) -> Starts:
    """An engine of a family's model in the mode ("1") or without it (None), with further settings; the model, and what
    extracts features.
    """
    version, on = pytest.importorskip("vllm").__version__, "cuda" if torch.cuda.is_available() else "cpu"
    if not version.startswith(RAN.encoding[on]):
        pytest.skip("encoders have not run here")
    paths = (of.python_path(tmp_path_factory.mktemp("path")) for of in (multimodal, nemotron_vl))
    path = os.pathsep.join([*(one for found in paths for one in found), PATHS])

    @cache
    def made(name: str) -> tuple[str, Any, Any]:
        folder = tmp_path_factory.mktemp("model")
        family = FAMILIES[name]
        dtype = getattr(torch, family.settings.get("dtype", "float32"))
        model = audio.save(family.config(), dtype, folder)
        if name in EXTRACTORS:
            return str(folder), model, EXTRACTORS[name]
        if name == "glm-asr":
            return str(folder), model, partial(audio.glm_asr_features, str(folder))
        return str(folder), model, transformers.AutoFeatureExtractor.from_pretrained(folder)

    def start(name: str, flag: str | None, **more: Any) -> tuple[Engine, Any, Any]:
        folder, model, extract = made(name)
        settings = LIMITS | OF_DEVICE | FAMILIES[name].settings | ({} if flag else {"enforce_eager": True}) | more
        environment = SETTINGS | {"PYTHONPATH": path, UNTRIED.name: "1"}
        return Engine(folder, arguments_of(settings), flag, environment, patience=400), model, extract

    return start


@pytest.fixture(scope="module")
def served(engine_of: Starts) -> Callable[[str], Served]:
    @cache
    def serve(name: str) -> Served:
        family = FAMILIES[name]
        starting, model, extract = engine_of(name, "1")
        with starting as engine:
            runs = {
                run: engine.call("tests.engine.audio:answers", requests, reset)
                for run, (requests, _, reset) in family.runs.items()
            }
            encoded = engine.call("tests.engine.audio:embeddings", family.lengths, [[*call] for call in family.calls])
            call = "embeddings", family.few_lengths, family.few_calls
            faults = {
                fault: engine.call("tests.engine.audio:with_fault", fault, *call)["moved"]
                for fault in ("", *family.faults)
            }
            call = "answers_beside_new", family.targets[:3], family.targets[3:]
            others = () if family.has_caches else (audio.OF_ORDER, audio.OF_REQUESTS)
            if torch.cuda.is_available():  # whose model runner has the order of its batch
                others = others[1:]
            beside = {fault: engine.call("tests.engine.audio:with_fault", fault, *call) for fault in ("", *others)}
            found = by_tools(engine) if family.has_caches else ({}, {})
        return Served(family, runs, encoded, faults, beside, *found, model, extract)

    return serve


@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_with_audio_has_the_same_bits_in_any_company(name: str, served: Callable[[str], Served]) -> None:
    found = served(name)
    runs, alone = found.runs, found.alone
    differing = {run: differing_answers(found.given(run), alone) for run in runs if "alone" not in run}
    assert {run: numbers for run, numbers in differing.items() if numbers} == {}
    assert runs["behind 3"]["calls"]["items"] > runs["behind 3"]["calls"]["calls"], "no items shared a call"
    assert runs["preempted"]["preemptions"] > 0
    assert alone[3]["completions"] != alone[4]["completions"], "the model does not listen"
    if found.family.has_caches:
        assert runs["from the prefix cache"]["calls"]["calls"] == 0
        assert runs["from the prefix cache"]["cached"][0] >= 128
        assert runs["from the cache of embeddings"]["calls"]["calls"] == 0
        assert max(runs["from the cache of embeddings"]["cached"]) == 0


@pytest.mark.parametrize("name", FAMILIES)
def test_requests_that_come_back_beside_new_ones_have_the_same_bits(name: str, served: Callable[[str], Served]) -> None:
    found = served(name)
    differing = {fault: differing_answers(run["given"], found.alone) for fault, run in found.beside_new.items()}
    assert differing.pop("") == []
    assert found.beside_new[""]["preemptions"] > 1
    assert [fault for fault, numbers in differing.items() if not numbers] == []


@pytest.mark.parametrize("name", FAMILIES)
def test_an_item_of_any_length_has_the_same_bits_whatever_shares_its_call(
    name: str, served: Callable[[str], Served]
) -> None:
    found = served(name)
    assert found.encoded["moved"] == []
    assert len(set(found.encoded["alone"])) == len(found.family.lengths)


@pytest.mark.parametrize("name", FAMILIES)
def test_encoders_with_faults_fail_the_same_comparison(name: str, served: Callable[[str], Served]) -> None:
    faults = dict(served(name).faults)
    assert faults.pop("") == []
    assert [fault for fault, moved in faults.items() if not moved] == []


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.has_caches])
def test_a_check_finds_nothing_but_an_encoder_that_looks_at_its_call_and_a_fuzzer_nothing(
    name: str, served: Callable[[str], Served]
) -> None:
    """The fault is one of calls with several items, as most requests that are drawn have themselves."""
    found = served(name)
    assert found.fuzzed[""] == ""
    multimodal.assert_a_check_finds_the_faulty_tower(found.checked)


def test_answers_about_a_sound_are_reproduced_beside_others(engine_of: Starts, tmp_path: Path) -> None:
    """With a sampler that looks at a request's place they are not. What is encoded is kept from one to the next."""
    files = [tmp_path / "first.wav", tmp_path / "second.wav"]
    for file, seed in zip(files, (1, 2), strict=True):
        file.write_bytes(wav_of({"kind": "audio", "size": [SECOND], "seed": seed}))
    spec = RequestSpec(prompt="w1 w2", chat=True, max_tokens=4, ignore_eos=True, items=(("audio", str(files[0])),))
    asked = {"samples": 12, "concurrency": 8, "seed": 0}

    def found(spec: RequestSpec) -> ReproduceResult:
        told = engine.call(offline.RUN, asked | {"spec": vars(spec)})
        return ReproduceResult.of("offline", *offline.run_of(told), engine.info)

    with engine_of("qwen3-asr", "1")[0] as engine:
        first, second = found(spec), found(replace(spec, items=(("audio", str(files[1])),)))
        engine.call("tests.faults.fuzz:inject", "sampler")
        faulty = found(spec)
    assert [one.status for one in (first, second)] == [Status.REPRODUCIBLE] * 2
    assert first.run.failed_others == 0, first.run.failure
    assert first.answers[0] != second.answers[0], "the model does not listen"
    assert faulty.status == Status.DIVERGED


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", ["gemma4", "glm-asr", "whisper"])
def test_sounds_keep_their_bits_in_other_dtypes(name: str, dtype: str, engine_of: Starts) -> None:
    family = FAMILIES[name]
    few, targets = family.few, family.targets
    with engine_of(name, "1", dtype=dtype)[0] as engine:
        call = "tests.engine.audio:embeddings", family.few_lengths, family.few_calls
        assert engine.call(*call)["moved"] == []
        alone, among = (
            engine.call("tests.engine.audio:answers", requests, "cache")["given"][-1:]
            for requests in (targets[1:2], [*few, *targets[:2]])
        )
    assert differing_answers(among, alone) == []


def test_limits_of_1_move_no_bit(engine_of: Starts, served: Callable[[str], Served]) -> None:
    limits = {"max_num_batched_tokens": 1, "max_num_seqs": 1, "enable_prefix_caching": False}
    with engine_of("gemma4", "1", **limits)[0] as engine:
        given = engine.call("tests.engine.audio:answers", GEMMA_4.targets[1:], "cache")["given"]
    assert differing_answers(given, served("gemma4").alone[1:]) == []


def test_plain_vllm_fails_the_same_comparison(engine_of: Starts) -> None:
    with engine_of("qwen3-asr", None)[0] as engine:
        call = QWEN3_ASR.few_lengths, QWEN3_ASR.few_calls
        assert engine.call("tests.engine.audio:embeddings", *call)["moved"]


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_near_transformers_in_float64(
    name: str, served: Callable[[str], Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = served(name)
    targets, model, errors = found.family.targets, exact(found.model), []
    if found.family in OF_GEMMA_4:
        monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)  # which its norms are computed in
    named = {*audio.SPECIAL, *(images.OF_GEMMA_4 if found.family in OF_GEMMA_4 else ())}
    named |= {*nemotron_vl.SPECIAL} if found.family is NEMOTRON_OMNI else set()
    for number, target in enumerate(targets):
        given = found.given("together")[number]
        [answer] = given["completions"]
        ends = [place for place, token in enumerate(answer["tokens"]) if token in named]  # to be a sound
        tokens = answer["tokens"][: ends[0] + 1 if ends else None]
        expected = by_transformers(model, found.extract, target, given["prompt"], tokens)
        listed = [
            (place, token, float.fromhex(logprob))
            for place, entry in enumerate(answer["logprobs"][: len(expected)])
            for token, logprob, _ in entry
        ]
        errors.append(max(abs(logprob - expected[place, token].item()) for place, token, logprob in listed))
    assert max(errors) < found.family.tolerance, errors
    prompt = found.given("together")[3]["prompt"]
    one, other = (by_transformers(model, found.extract, targets[number], prompt, [7]) for number in (3, 4))
    apart = 5 if found.family is NEMOTRON_OMNI else 10  # in bf16
    assert (one - other).abs().max() > apart * found.family.tolerance, "another sound is as near"


def by_transformers(
    model: Any, extract: Any, target: dict[str, Any], prompt: list[int], answer: list[int]
) -> torch.Tensor:
    """[tokens of the answer, vocabulary] logprobs.

    Args:
        model: in float64.
        extract: makes features of a sound.
        target: with its sounds.
        prompt: its tokens, one for each row that a tower gives of what stands in it.
        answer: tokens.
    """
    kind = model.config.model_type.removesuffix("_unified")
    is_whisper = kind == "whisper"
    padding = "max_length" if kind == "qwen2_audio" else True
    form = {} if kind in ("whisper", "gemma4") else {"padding": padding, "return_attention_mask": True}
    sounds = [audio.sound(samples, seed) for samples, seed in target["sounds"]]
    tokens = torch.tensor([prompt + answer[:-1]])
    if extract is nemotron_vl.clips:
        with torch.no_grad():
            logits = model(tokens, sounds=[clip for one in sounds for clip in extract(one)]).logits[0]
        return logits[-len(answer) :].log_softmax(-1)
    made = [
        extract([one] if kind == "gemma4" else one, sampling_rate=SECOND, return_tensors="pt", **form) for one in sounds
    ]
    given: dict[str, torch.Tensor] = {}
    mask = "feature_attention_mask" if kind == "qwen2_audio" else "input_features_mask"
    has_masks = kind not in ("whisper", "voxtral")
    masks = "input_features_mask" if kind == "gemma4" else "attention_mask"
    names = {"input_features": "input_features"} | ({masks: mask} if has_masks else {})
    axis = 1 if kind == "gemma4" else -1
    longest = max((one["input_features"].shape[axis] for one in made), default=0)
    for theirs, ours in names.items() if made else ():
        rows = [torch.as_tensor(one[theirs]) for one in made]
        behind = (0, 0) if axis == 1 and theirs == "input_features" else ()
        given[ours] = torch.cat([torch.nn.functional.pad(one, (*behind, 0, longest - one.shape[axis])) for one in rows])
    if model.config.model_type == "gemma4_unified" and made:  # vLLM may leave out a part of 40 ms at the end
        is_sound = torch.tensor([0, *(token == audio.OF_GEMMA_4 for token in prompt), 0]).diff()
        counts = (is_sound == -1).nonzero() - (is_sound == 1).nonzero()
        given[mask] &= torch.arange(longest) < counts
    given |= {"input_features": given["input_features"].double()} if made else {}
    with torch.no_grad():
        logits = model(**{"decoder_input_ids" if is_whisper else "input_ids": tokens}, **given).logits[0]
    return logits[-len(answer) :].log_softmax(-1)

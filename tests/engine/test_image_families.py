"""Further models that see images: a request has the same bits alone, among others with other images, from the caches,
in chunks that end inside an image and after preemption; and is near what Transformers gives.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from tests.engine import images, multimodal
from tests.engine.engines import OF_DEVICE, PATHS, SETTINGS, Engine, arguments_of, differing_answers
from tests.engine.test_images import LEAST, OBLONG, SMALL, STRIP, TALL, text
from vllm_batch_invariant.integration.coverage import RAN

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive]

LIMITS = {
    "max_model_len": 1024, "max_num_seqs": 64, "max_logprobs": -1, "skip_mm_profiling": True,
    "limit_mm_per_prompt": '{"image": 8}', "max_num_batched_tokens": 128, "dtype": "float32",
}  # fmt: skip
LARGE = (20, 22)
FAULTS = images.FAULTS[:2]
TOLERANCE = 1e-3
"""Of logprobs in fp32 beside float64, absolute: rounding of three layers of a tower, and of two of a decoder."""


@dataclass(frozen=True)
class Family:
    """Models of one kind, and what Transformers' class is given beside the tokens."""

    config: Callable[[], transformers.PretrainedConfig]
    seen: Callable[[list[np.ndarray]], dict[str, torch.Tensor]]


def padded(pictures: list[np.ndarray]) -> dict[str, torch.Tensor]:
    """Pictures in the corner of the largest, and their sizes."""
    mean, std = (torch.tensor(one).double() for one in images.NORM.values())
    pixels = [((torch.from_numpy(one).double() / 255 - mean) / std).permute(2, 0, 1) for one in pictures]
    sizes = torch.tensor([one.shape[1:] for one in pixels])
    together = torch.zeros(len(pixels), 3, *sizes.amax(0).tolist(), dtype=torch.float64)
    for into, one in zip(together, pixels, strict=True):
        into[:, : one.shape[1], : one.shape[2]] = one
    return {"pixel_values": together, "image_sizes": sizes}


FAMILIES = {"mistral3": Family(images.mistral3, padded)}


def asked(seed: int, before: int, grids: list[tuple[int, int]], after: int = 3, count: int = 6) -> dict[str, Any]:
    """A request with tokens, an image of each grid, and some tokens behind each."""
    prompt = text(before, seed)
    for place in range(len(grids)):
        prompt += [images.IMAGE, *text(after, seed + 50 + place)]
    params = {"temperature": 0, "max_tokens": count, "logprobs": 20, "ignore_eos": True}
    pictures = [(grid, 100 * seed + place) for place, grid in enumerate(grids)]
    return {"prompt": prompt, "images": pictures, "videos": [], "params": params}


TARGETS = [
    asked(1, 60, [LARGE], 20),
    asked(2, 7, [SMALL, OBLONG, LEAST]),
    asked(3, 20, [STRIP]),
    asked(4, 30, [SMALL]) | {"images": [(SMALL, 400)]},
    asked(4, 30, [SMALL]) | {"images": [(SMALL, 401)]},  # the same words about another picture
    asked(5, 40, []),
]
FEW = [asked(11, 3, [TALL, LEAST]), asked(12, 45, []), asked(13, 1, [(8, 30)])]
MANY = [asked(20 + n, 1 + 7 * n % 40, [[], [SMALL], [LEAST, (6, 10)], [TALL]][n % 4], count=2) for n in range(24)]
COUNT = len(TARGETS)
RUNS = images.runs_of(TARGETS, FEW, MANY)


@dataclass
class Served:
    """What an engine gave; what it gave a target alone and behind another request, by the fault of its encoder; and its
    checkpoint.
    """

    runs: dict[str, dict[str, Any]]
    faulty: dict[str, list[list[dict[str, Any]]]]
    model: torch.nn.Module

    def given(self, name: str) -> list[dict[str, Any]]:
        return self.runs[name]["given"][RUNS[name][1]]

    @property
    def alone(self) -> list[dict[str, Any]]:
        return [self.given(f"alone {number}")[0] for number in range(COUNT)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Served]:
    version, on = pytest.importorskip("vllm").__version__, "cuda" if torch.cuda.is_available() else "cpu"
    if not version.startswith(RAN.encoding[on]):
        pytest.skip("encoders of images have not run here")
    path = os.pathsep.join([*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS])

    @cache
    def serve(name: str) -> Served:
        config, folder = FAMILIES[name].config(), tmp_path_factory.mktemp("model")
        model, patch = images.save(config, torch.float32, folder), config.vision_config.patch_size
        environment = SETTINGS | {"PYTHONPATH": path}
        with Engine(str(folder), arguments_of(LIMITS | OF_DEVICE), "1", environment, patience=400) as engine:

            def by_faulty(fault: str, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
                call = "answers", requests, patch, "cache"
                return engine.call("tests.engine.images:with_fault", fault, *call)["given"][-1:]

            runs = {
                run: engine.call("tests.engine.images:answers", requests, patch, reset)
                for run, (requests, _, reset) in RUNS.items()
            }
            company = [TARGETS[2]], [FEW[2], TARGETS[2]]
            faulty = {fault: [by_faulty(fault, requests) for requests in company] for fault in FAULTS}
        return Served(runs, faulty, model)

    return serve


@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_with_images_has_the_same_bits_in_any_company(name: str, served: Callable[[str], Served]) -> None:
    found = served(name)
    differing = {run: differing_answers(found.given(run), found.alone) for run in RUNS if "alone" not in run}
    assert {run: numbers for run, numbers in differing.items() if numbers} == {}
    runs = found.runs
    assert runs["behind 3"]["calls"]["items"] > runs["behind 3"]["calls"]["calls"], "no images shared a call"
    assert runs["from the prefix cache"]["calls"]["calls"] == 0
    assert runs["from the prefix cache"]["cached"][0] >= 128
    assert runs["from the cache of embeddings"]["calls"]["calls"] == 0
    assert max(runs["from the cache of embeddings"]["cached"]) == 0
    assert runs["preempted"]["preemptions"] > 0
    assert found.alone[3]["completions"] != found.alone[4]["completions"], "the model does not look at images"


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("fault", FAULTS)
def test_encoders_with_faults_fail_the_same_comparison(name: str, fault: str, served: Callable[[str], Served]) -> None:
    """The negative control: on a CPU plain vLLM may have the same bits."""
    assert differing_answers(*served(name).faulty[fault]) == [0]


@pytest.mark.parametrize("name", FAMILIES)
def test_logprobs_are_near_transformers_in_float64(name: str, served: Callable[[str], Served]) -> None:
    found = served(name)
    model, errors = found.model.double().eval(), []
    for number, target in enumerate(TARGETS):
        given = found.given("together")[number]
        [answer] = given["completions"]
        ends = [place for place, token in enumerate(answer["tokens"]) if token in images.SPECIAL]  # to be an image
        tokens = answer["tokens"][: ends[0] + 1 if ends else None]
        expected = by_transformers(name, model, target, given["prompt"], tokens)
        listed = [
            (place, token, float.fromhex(logprob))
            for place, entry in enumerate(answer["logprobs"][: len(expected)])
            for token, logprob, _ in entry
        ]
        errors.append(max(abs(logprob - expected[place, token].item()) for place, token, logprob in listed))
    assert max(errors) < TOLERANCE, errors
    prompt = found.given("together")[3]["prompt"]
    one, other = (by_transformers(name, model, TARGETS[number], prompt, [7]) for number in (3, 4))
    assert (one - other).abs().max() > 10 * TOLERANCE, "another picture is as near"


def by_transformers(
    name: str, model: Any, target: dict[str, Any], prompt: list[int], answer: list[int]
) -> torch.Tensor:
    """[tokens of the answer, vocabulary] logprobs."""
    patch = model.config.vision_config.patch_size
    pictures = [images.picture(patch, grid, seed) for grid, seed in target["images"]]
    seen = FAMILIES[name].seen(pictures) if pictures else {}
    ids = torch.tensor([prompt + answer[:-1]])
    with torch.no_grad():
        logits = model(input_ids=ids, **seen).logits[0]
    return logits[-len(answer) :].log_softmax(-1)

"""A model whose tokens see all of their image (Gemma 3): a request has the same bits alone, among others, from the
caches, in chunks that end between images and after preemption; and is near what Transformers gives.
"""

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.engine import images, multimodal
from tests.engine.engines import OF_DEVICE, PATHS, SETTINGS, Engine, arguments_of, differing_answers
from tests.engine.test_images import text
from vllm_batch_invariant.integration.coverage import RAN

pytestmark = pytest.mark.engine

LIMITS = {
    "max_model_len": 1024, "max_num_seqs": 64, "max_logprobs": -1, "skip_mm_profiling": True, "block_size": 32,
    "limit_mm_per_prompt": '{"image": {"count": 4, "width": 224, "height": 224}}', "max_num_batched_tokens": 140,
}  # fmt: skip
"""A step has room for two images of 64 tokens, and pages end inside."""
GRID, PATCH = (16, 16), 14
TOLERANCE = 3e-5
"""Of logprobs in fp32 beside float64, absolute: rounding of two layers each of a tower and of a decoder."""


def asked(seed: int, parts: list[int], count: int = 6) -> dict[str, Any]:
    """A request of so many tokens before, between and behind images."""
    prompt: list[int] = []
    for place, length in enumerate(parts):
        prompt += ([images.START] if place else []) + text(length, 100 * seed + place)
    pictures = [(GRID, 100 * seed + place) for place in range(len(parts) - 1)]
    params = {"temperature": 0, "max_tokens": count, "logprobs": 20, "ignore_eos": True}
    return {"prompt": prompt, "images": pictures, "videos": [], "params": params}


TARGETS = [asked(1, [100, 20]), asked(2, [7, 3, 3]), asked(3, [0, 5]), asked(4, [130, 2, 9]), asked(5, [40])]
FEW = [asked(11, [3, 3]), asked(12, [45]), asked(13, [1, 2, 2, 2])]
MANY = [asked(20 + number, [1 + 7 * number % 40, 2][: 1 + number % 2], count=2) for number in range(12)]
COUNT = len(TARGETS)
RUNS = images.runs_of(TARGETS, FEW, MANY)


@dataclass
class Served:
    """What an engine gave, also to the first target alone while its image came in parts; and its checkpoint."""

    runs: dict[str, dict[str, Any]]
    in_parts: list[dict[str, Any]]
    model: torch.nn.Module

    def differing(self) -> dict[str, list[int]]:
        """Targets that got something else in a run than alone."""
        alone = [self.runs[f"alone {number}"]["given"][0] for number in range(COUNT)]
        found = {
            name: differing_answers(done["given"][RUNS[name][1]], alone)
            for name, done in self.runs.items()
            if "alone" not in name
        }
        return {name: differing for name, differing in found.items() if differing}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    version, on = pytest.importorskip("vllm").__version__, "cuda" if torch.cuda.is_available() else "cpu"
    if not version.startswith(RAN.encoding[on]):
        pytest.skip("tokens that see all of their image have not run here")
    path = os.pathsep.join([*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS])
    folder = tmp_path_factory.mktemp("model")
    model = images.save(images.gemma3(), torch.float32, folder)
    arguments = arguments_of(LIMITS | OF_DEVICE | {"dtype": "float32"})
    with Engine(str(folder), arguments, "1", SETTINGS | {"PYTHONPATH": path}, patience=400) as engine:
        runs = {
            name: engine.call("tests.engine.images:answers", requests, PATCH, reset)
            for name, (requests, _, reset) in RUNS.items()
        }
        in_parts = engine.call("tests.engine.images:with_images_in_parts", "answers", TARGETS[:1], PATCH, "cache")
    return Served(runs, in_parts["given"], model)


def test_a_request_with_images_has_the_same_bits_in_any_company(served: Served) -> None:
    assert served.differing() == {}
    runs = served.runs
    assert runs["behind 3"]["calls"]["items"] > runs["behind 3"]["calls"]["calls"], "no images shared a call"
    assert runs["from the prefix cache"]["calls"]["calls"] < runs["together"]["calls"]["calls"]
    assert any(count % 32 == 0 and count > 64 for count in runs["from the prefix cache"]["cached"])
    assert max(runs["from the cache of embeddings"]["cached"]) == 0
    assert runs["preempted"]["preemptions"] > 0


def test_images_in_parts_fail_the_same_comparison(served: Served) -> None:
    """The negative control: what a scheduler does that does not know of them."""
    assert differing_answers(served.in_parts, served.runs["alone 0"]["given"])


def test_logprobs_are_near_transformers_in_float64(served: Served) -> None:
    model, further = served.model.double().eval(), 0.0
    for number, target in enumerate(TARGETS):
        given = served.runs["together"]["given"][number]
        [answer] = given["completions"]
        expected = {both: by_transformers(model, target, given["prompt"], answer["tokens"], both) for both in (1, 0)}
        listed = [
            (place, token, float.fromhex(logprob))
            for place, entry in enumerate(answer["logprobs"])
            for token, logprob, _ in entry
        ]
        errors = [
            max(abs(logprob - of[place, token].item()) for place, token, logprob in listed) for of in expected.values()
        ]
        assert errors[0] < TOLERANCE, f"target {number}: {errors[0]:.1e}"
        further = max(further, errors[1])
    assert further > 10 * TOLERANCE, "causal attention of images is as near"


def by_transformers(
    model: Any, target: dict[str, Any], prompt: list[int], answer: list[int], both: int
) -> torch.Tensor:
    """[tokens of the answer, vocabulary] logprobs; with ``both`` of images whose tokens see each other."""
    ids = torch.tensor([prompt + answer[:-1]])
    seen: dict[str, Any] = {}
    if target["images"]:
        pictures = [images.picture(PATCH, grid, seed) for grid, seed in target["images"]]
        mean, std = (torch.tensor(one).double() for one in images.NORM.values())
        pixels = torch.stack([torch.from_numpy(one).double() / 255 for one in pictures])
        seen["pixel_values"] = ((pixels - mean) / std).permute(0, 3, 1, 2)
        seen["token_type_ids"] = both * (ids == images.IMAGE).int()
    with torch.no_grad():
        logits = model(input_ids=ids, **seen).logits[0]
    return logits[-len(answer) :].log_softmax(-1)

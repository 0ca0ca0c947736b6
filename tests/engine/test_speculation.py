"""With speculative decoding an answer has the tokens and logprobs that it has without, whatever a drafter proposes."""

import json
import random
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.drafters import (
    ANSWERS,
    KINDS,
    make_dflash,
    make_ernie,
    make_glm,
    make_head,
    make_medusa,
    make_mtp_model,
)
from tests.engine.engines import OF_DEVICE, Result, differing_answers, run, some_exhaustive, tokens
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.reviews.patch_points import installed_version
from vllm_batch_invariant.verify.harness.requests import KINDS as ASKED
from vllm_batch_invariant.verify.harness.requests import NGRAMS, NOT_BESIDE_DRAFTS, Accepts, draw

pytestmark = [pytest.mark.engine, pytest.mark.core]

ACCEPTS = Accepts(range(16, 1000), 4096, 20, tuple(kind for kind in ASKED if kind not in NOT_BESIDE_DRAFTS))
LENGTHS = (1, 20, 119, 125, 250, 255, 300)
"""Of prompts whose answers cross the ends of pages (128) and of splits (256) within a verify step, or cross none."""
MOST_TOKENS = 24
ON_GPU = torch.cuda.is_available()
RUNNERS = ("0", "1") if ON_GPU else ("",)
"""Values of VLLM_USE_V2_MODEL_RUNNER: the two draw other noise of a seed."""
NO_KERNELS = not ON_GPU and find_spec("vllm") is not None and installed_version().startswith("0.30.")
"""vLLM 0.30 breaks off on a CPU, with the mode and without, where a draft model runs or its own rule accepts: it
launches kernels in Triton.
"""
PLAIN_SEEDED = {"temperature", "max_tokens", "ignore_eos", "seed", "logprobs"}
SMALL = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 16 if ON_GPU else 8, "max_num_seqs": 17}
"""Prompts come in chunks beside verify steps, and requests are preempted between them."""


def requests() -> list[dict[str, Any]]:
    """Two of every kind, the first with drafts of which any number are right; some with drafts that are right and go
    beyond a stop string; and greedy ones that repeat.
    """
    chance = random.Random(17)
    made = []
    for number, kind in enumerate(ACCEPTS.kinds):
        for drafts in (KINDS.index("mixed"), number % 3):
            prompt = tokens(LENGTHS[(number + drafts) % len(LENGTHS)], 100 * number + drafts)
            prompt[0] = len(KINDS) * (10 + number) + drafts
            params = draw(chance, ACCEPTS, kind, MOST_TOKENS, len(prompt), (None, 0, 3))
            made.append({"prompt": prompt, "params": params})
    for number, word in enumerate(("x", "ing", "=", "ll")):
        stop = {"stop": [word], "include_stop_str_in_output": number % 2 == 0, "logprobs": 3, "ignore_eos": True}
        prompt = [len(KINDS) * (60 + number) + KINDS.index("right"), *tokens(40, 60 + number)]
        made.append({"prompt": prompt, "params": stop | {"temperature": 1.0, "seed": number, "max_tokens": 64}})
    for number in range(2):
        params = {"temperature": 0.0, "max_tokens": 48, "logprobs": 2, "ignore_eos": True}
        made.append({"prompt": [len(KINDS) * (40 + number), *tokens(8, 40 + number) * 6], "params": params})
    return made


TOGETHER = {"name": "together", "reset_prefix_cache": True, "requests": requests()}
WARM = {"name": "warm", "requests": requests()}
IN_PARTS = [{"name": str(start), "requests": requests()[start : start + 11]} for start in range(0, len(requests()), 11)]


@pytest.fixture(scope="module")
def engine(checkpoint: Path) -> Callable[..., Result]:
    def start(steps: list[dict], afterwards: Callable[[Any], Any] = lambda _: None, **others: Any) -> Result:
        environment = others.pop("environment", {})
        if runner := others.pop("runner", RUNNERS[0]):
            environment = environment | {"VLLM_USE_V2_MODEL_RUNNER": runner}
        settings = {"max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512, **OF_DEVICE} | others
        return run({"model": str(checkpoint)} | settings, steps, "1", afterwards=afterwards, **environment)

    return start


@pytest.fixture(scope="module")
def plain_of(engine: Callable[..., Result]) -> Callable[[str], list[dict[str, Any]]]:
    """The answers of a model runner without speculation."""

    @cache
    def answers(runner: str) -> list[dict[str, Any]]:
        done = engine(IN_PARTS, runner=runner)
        return [answer for step in IN_PARTS for answer in done.steps[step["name"]]]

    return answers


@pytest.fixture(scope="module")
def plain(plain_of: Callable[[str], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Those of the first runner, which alone has drafters of one's own."""
    return plain_of(RUNNERS[0])


def differing(
    answers: list[dict[str, Any]], others: list[dict[str, Any]], which: slice = slice(None)
) -> list[dict[str, Any]]:
    """The parameters of some requests whose tokens, logprobs, listed candidates or prompt logprobs are not the
    others'.
    """
    asked = requests()[which]
    return [asked[number]["params"] for number in differing_answers(answers, others)]


def counts(running: Any) -> dict[str, int]:
    return running.call("tests.engine.drafters:counts")


@pytest.fixture(scope="module")
def drafted(
    engine: Callable[..., Result], plain: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> Result:
    """With a drafter that knows the answers and gives them, others, or none; at last by vLLM's rule of acceptance."""
    file = tmp_path_factory.mktemp("answers") / "answers.json"
    pairs = list(zip(requests(), plain, strict=True))
    file.write_text(
        json.dumps([asked["prompt"] + one["tokens"] for asked, answer in pairs for one in answer["completions"]])
    )

    def afterwards(running: Any) -> tuple[dict[str, int], int]:
        counted = counts(running)
        if NO_KERNELS:
            return counted, 0
        running.call("tests.engine.drafters:accept_as_vllm_does", "first")
        # vLLM's rule breaks off where requests with top-k and without are together, on a CPU.
        seeded = [(asked, answer["completions"]) for asked, answer in pairs if asked["params"].keys() == PLAIN_SEEDED]
        by_their_rule = running.step("their rule", [asked for asked, _ in seeded]).requests
        others = zip(by_their_rule, seeded, strict=True)
        return counted, sum(answer["completions"] != expected for answer, (_, expected) in others)

    drafts = {"method": "custom_class", "model": "tests.engine.drafters.Drafter", "num_speculative_tokens": 7}
    settings = {"speculative_config": json.dumps(drafts), **SMALL}
    return engine([TOGETHER, WARM], afterwards, environment={ANSWERS: str(file)}, **settings)


@pytest.mark.parametrize("step", ["together", "warm"])
def test_an_answer_is_that_of_plain_decoding_whatever_is_proposed(
    drafted: Result, plain: list[dict[str, Any]], step: str
) -> None:
    assert differing(drafted.steps[step], plain) == []


def test_drafts_are_accepted_and_rejected_and_requests_preempted(drafted: Result) -> None:
    counted, _ = drafted.afterwards
    assert 0 < counted["accepted"] < counted["drafts"]
    assert counted["preemptions"]


@pytest.mark.skipif(NO_KERNELS, reason="vLLM 0.30 has no kernels for it on a CPU")
def test_vllms_rule_of_acceptance_fails_the_same_comparison(drafted: Result) -> None:
    _, different = drafted.afterwards
    assert different


DRAFTERS: dict[str, Callable[[Path, Path], dict[str, Any]]] = {
    "n-grams": lambda target, folder: NGRAMS,
    "the model itself": lambda target, folder: {"method": "draft_model", "model": str(target)},
    "EAGLE": lambda target, folder: {"method": "eagle", "model": str(make_head(target, folder, "eagle"))},
    "EAGLE-3": lambda target, folder: {"method": "eagle3", "model": str(make_head(target, folder, "eagle3"))},
    "DFlash": lambda target, folder: {"method": "dflash", "model": str(make_dflash(target, folder))},
    "Medusa": lambda target, folder: {"method": "medusa", "model": str(make_medusa(target, folder, 3))},
    "suffixes": lambda target, folder: {"method": "suffix"},
    "n-grams on a GPU": lambda target, folder: NGRAMS | {"method": "ngram_gpu"},
}
HEADS = ("EAGLE", "EAGLE-3", "DFlash", "Medusa")
"""Of random weights, so they are never right."""
FEW = slice(0, None, 2)
"""One of each kind."""


IN_THE_SECOND_RUNNER = {
    "n-grams": "ngram", "the model itself": "standalone_ar", "EAGLE": "eagle", "EAGLE-3": "eagle",
    "DFlash": "dflash", "n-grams on a GPU": "ngram",
}  # fmt: skip
"""vLLM's package of each drafter that the second model runner has."""


def skip_where_vllm_has_none(name: str, runner: str) -> None:
    """Skip a drafter that the installed vLLM, the machine or the model runner does not have."""
    package = IN_THE_SECOND_RUNNER.get(name)
    if runner == "1" and (package is None or find_spec(f"vllm.v1.worker.gpu.spec_decode.{package}") is None):
        pytest.skip("this vLLM has the drafter in its first model runner alone")
    if name == "Medusa" and (ON_GPU or find_spec("vllm.v1.spec_decode.medusa") is None):
        pytest.skip("vLLM has had no Medusa since 0.33, and before it is refused on a GPU")
    if name == "suffixes" and find_spec("arctic_inference") is None:
        pytest.skip("pip install --no-deps arctic-inference==0.1.1")
    if name == "n-grams on a GPU" and not ON_GPU:
        pytest.skip("needs a GPU")


@pytest.mark.parametrize("runner", RUNNERS, ids="runner_{}".format)
@pytest.mark.parametrize("name", some_exhaustive(["n-grams"] if NO_KERNELS else DRAFTERS, ["n-grams"]))
def test_drafters_of_vllms_leave_answers_alone(
    request: pytest.FixtureRequest,
    engine: Callable[..., Result],
    plain_of: Callable[[str], list[dict[str, Any]]],
    checkpoint: Path,
    tmp_path: Path,
    name: str,
    runner: str,
) -> None:
    skip_where_vllm_has_none(name, runner)
    plain = plain_of(runner)
    speculation = {"num_speculative_tokens": 3} | DRAFTERS[name](checkpoint, tmp_path)
    few = slice(None) if name.startswith("n-grams") else FEW
    step = TOGETHER | {"requests": requests()[few]}

    def afterwards(running: Any) -> tuple[dict[str, int], list[dict[str, Any]]]:
        counted = counts(running)
        if runner != "1":
            return counted, []
        running.call("tests.engine.drafters:accept_as_vllm_does", "second")
        return counted, running.step(**step).requests

    settings = {"speculative_config": json.dumps(speculation), "runner": runner}
    done = engine([step], afterwards, **settings)
    assert differing(done.steps["together"], plain[few], few) == []
    counted, by_their_rule = done.afterwards
    assert counted["drafts"] > 0
    assert (counted["accepted"] > 0) == (name not in HEADS)
    assert not by_their_rule or differing(by_their_rule, plain[few], few), "vLLM's rule gives other answers"


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs")
@pytest.mark.parametrize("number", [1, 5, 16])
def test_a_draft_model_runs_in_cuda_graphs_and_is_right(
    engine: Callable[..., Result], checkpoint: Path, number: int
) -> None:
    """The model itself, which knows every next token."""
    if not patch_points.DRAFT_MODEL.is_there():
        pytest.skip("this vLLM has the drafter in its first model runner alone")
    params = {"temperature": 0.0, "max_tokens": 61, "ignore_eos": True, "logprobs": 1}
    asked = [{"prompt": tokens(3 + 2 * one, 700 + one), "params": params} for one in range(number)]
    step = {"name": "greedy", "reset_prefix_cache": True, "requests": asked}
    plain = engine([step], runner="1").steps["greedy"]

    def afterwards(running: Any) -> tuple[dict[str, int], dict[str, int], list[dict[str, Any]]]:
        running.call("tests.engine.drafters:draft_passes")
        before = counts(running)
        answers = running.step(**step).requests
        counted = {name: count - before[name] for name, count in counts(running).items()}
        return counted, running.call("tests.engine.drafters:draft_passes"), answers

    speculation = {"num_speculative_tokens": 3, "method": "draft_model", "model": str(checkpoint)}
    done = engine([step], afterwards, speculative_config=json.dumps(speculation), runner="1")
    counted, passes, answers = done.afterwards
    assert differing_answers(answers, plain) == []
    assert counted["accepted"] >= 0.9 * counted["drafts"] > 0
    assert passes.keys() == {"graphs"}
    assert passes["graphs"] >= 3 * 15


@pytest.mark.skipif(not ON_GPU, reason="CUDA graphs")
def test_drafts_by_one_graph_are_those_by_several(
    engine: Callable[..., Result], checkpoint: Path, tmp_path: Path
) -> None:
    """Layers have the same bits in any graph, so a draft that differs has read or written what it should not."""
    if not patch_points.DRAFT_MODEL.is_there():
        pytest.skip("this vLLM has the drafter in its first model runner alone")
    drafts = DRAFTERS["EAGLE-3"](checkpoint, tmp_path)
    settings = {"runner": "1", "speculative_config": json.dumps(drafts | {"num_speculative_tokens": 3})}
    greedy = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}
    sampled = greedy | {"temperature": 1.0, "seed": 5}
    asked = [
        {"prompt": tokens(3 + 17 * one, 800 + one), "params": (greedy, sampled)[one % 2] | {"max_tokens": 40 + one}}
        for one in range(7)
    ]
    step = {"name": "drafted", "reset_prefix_cache": True, "requests": asked}

    def afterwards(running: Any) -> tuple[list[list[int]], list[dict[str, Any]]]:
        running.call("tests.engine.drafters:proposals")
        answers = running.step(**step).requests
        return running.call("tests.engine.drafters:proposals"), answers

    launched, by_graphs = (
        engine([], afterwards, enforce_eager=eager, **settings).afterwards for eager in (True, False)
    )
    assert differing_answers(by_graphs[1], launched[1]) == []
    assert len(launched[0]) > 7
    assert by_graphs[0] == launched[0]


@pytest.mark.parametrize("runner", RUNNERS, ids="runner_{}".format)
@pytest.mark.parametrize("make", [make_mtp_model, make_glm, make_ernie], ids=["MiMo", "GLM-4.5", "ERNIE 4.5"])
@pytest.mark.exhaustive
def test_a_layer_that_predicts_more_tokens_leaves_answers_alone(
    engine: Callable[..., Result], checkpoint: Path, tmp_path: Path, make: Callable[[Path], Path], runner: str
) -> None:
    """Of random weights, by the layer that a model has for a second token; three drafts run it three times."""
    step = TOGETHER | {"requests": requests()[FEW]}
    settings = {"model": str(make(tmp_path)), "tokenizer": str(checkpoint), "runner": runner}
    plain = engine([step], **settings).steps["together"]
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    done = engine([step], counts, speculative_config=speculation, **settings)
    assert differing(done.steps["together"], plain, FEW) == []
    assert done.afterwards["drafts"] > 0

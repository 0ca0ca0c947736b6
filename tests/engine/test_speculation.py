"""With speculative decoding an answer has the tokens and logprobs that it has without, whatever a drafter proposes, by
one worker and by several, which give it bits of their own.
"""

import json
import random
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

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
from tests.engine.engines import OF_DEVICE, UNTRIED_THERE, Result, differing_answers, run, tokens
from tests.engine.kept_states import WORKERS, cores_of
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.reviews.patch_points import installed_version
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
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


class Shared(NamedTuple):
    """How many workers share a model, and how they do its experts; ``experts`` is empty of a dense one."""

    workers: int = 1
    experts: str = ""

    def __str__(self) -> str:
        return " ".join(filter(None, (f"{self.workers} workers", self.experts)))


ONE = Shared()
COLUMNS, WHOLE = "experts by columns", "whole experts"
FOR_WORKERS: dict[str, Any] = {"hidden": 512, "layers": 3, "heads": 8, "kv_heads": 2, "max_length": 4096}
"""Of a model whose heads two and four workers share."""
EXPERTS = {"experts": 8, "top_k": 3, "expert_intermediate": 256}


def shared_by_workers(*experts: str) -> list[Any]:
    """Parameters: two and four workers, and each way to share experts."""
    return [
        pytest.param(Shared(*workers.values, how), marks=[*workers.marks, pytest.mark.exhaustive])
        for workers in WORKERS
        for how in experts
    ]


ALONE, DENSE, OF_EXPERTS = [pytest.param(ONE)], shared_by_workers(""), shared_by_workers(COLUMNS, WHOLE)
BY_ANY = pytest.mark.parametrize("shared", [*ALONE, *DENSE, *OF_EXPERTS], ids=str)


def beside(names: Iterable[str], shared: Sequence[Any], quick: Collection[str] = ()) -> list[Any]:
    """Parameters: these names with each way to share a model, of which ``make test`` takes those in ``quick``."""
    return [
        pytest.param(name, *one.values, marks=[*one.marks, *([] if name in quick else [pytest.mark.exhaustive])])
        for one in shared
        for name in names
    ]


@pytest.fixture(scope="module")
def target(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Shared], Path]:
    """A model that so many workers can share."""

    @cache
    def written(experts: bool) -> Path:
        return make_checkpoint(tmp_path_factory.mktemp("shared"), Shape(**FOR_WORKERS, **EXPERTS if experts else {}))

    return lambda shared: checkpoint if shared == ONE else written(bool(shared.experts))


@pytest.fixture(scope="module")
def engine(target: Callable[[Shared], Path]) -> Callable[..., Result]:
    def start(
        steps: list[dict], afterwards: Callable[[Any], Any] = lambda _: None, shared: Shared = ONE, **others: Any
    ) -> Result:
        environment = others.pop("environment", {})
        if runner := others.pop("runner", RUNNERS[0]):
            environment = environment | {"VLLM_USE_V2_MODEL_RUNNER": runner}
        settings = {"max_model_len": 512, "max_num_seqs": 64, "max_num_batched_tokens": 512, **OF_DEVICE} | others
        if shared.workers > 1:
            environment = environment | UNTRIED_THERE | cores_of(shared.workers)
            settings |= {"tensor_parallel_size": shared.workers, "enable_expert_parallel": shared.experts == WHOLE}
        return run({"model": str(target(shared))} | settings, steps, "1", afterwards=afterwards, **environment)

    return start


@pytest.fixture(scope="module")
def plain_of(engine: Callable[..., Result]) -> Callable[[str, Shared], list[dict[str, Any]]]:
    """The answers of a model runner without speculation."""

    @cache
    def answers(runner: str, shared: Shared) -> list[dict[str, Any]]:
        done = engine(IN_PARTS, runner=runner, shared=shared)
        return [answer for step in IN_PARTS for answer in done.steps[step["name"]]]

    return answers


@pytest.fixture(scope="module")
def plain(plain_of: Callable[[str, Shared], list[dict[str, Any]]]) -> Callable[[Shared], list[dict[str, Any]]]:
    """Those of the first runner, which alone has drafters of one's own."""
    return partial(plain_of, RUNNERS[0])


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
    engine: Callable[..., Result],
    plain: Callable[[Shared], list[dict[str, Any]]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[[Shared], Result]:
    """With a drafter that knows the answers and gives them, others, or none; at last by vLLM's rule of acceptance."""

    @cache
    def answers(shared: Shared) -> Result:
        file = tmp_path_factory.mktemp("answers") / "answers.json"
        pairs = list(zip(requests(), plain(shared), strict=True))
        file.write_text(
            json.dumps([asked["prompt"] + one["tokens"] for asked, answer in pairs for one in answer["completions"]])
        )

        def afterwards(running: Any) -> tuple[dict[str, int], int]:
            counted = counts(running)
            if NO_KERNELS:
                return counted, 0
            running.call("tests.engine.drafters:accept_as_vllm_does", "first")
            # vLLM's rule breaks off where requests with top-k and without are together, on a CPU.
            alike = [
                (asked, answer["completions"]) for asked, answer in pairs if asked["params"].keys() == PLAIN_SEEDED
            ]
            by_their_rule = running.step("their rule", [asked for asked, _ in alike]).requests
            others = zip(by_their_rule, alike, strict=True)
            return counted, sum(answer["completions"] != expected for answer, (_, expected) in others)

        drafts = {"method": "custom_class", "model": "tests.engine.drafters.Drafter", "num_speculative_tokens": 7}
        settings = {"speculative_config": json.dumps(drafts), "shared": shared, **SMALL}
        return engine([TOGETHER, WARM], afterwards, environment={ANSWERS: str(file)}, **settings)

    return answers


@BY_ANY
@pytest.mark.parametrize("step", ["together", "warm"])
def test_an_answer_is_that_of_plain_decoding_whatever_is_proposed(
    drafted: Callable[[Shared], Result], plain: Callable[[Shared], list[dict[str, Any]]], step: str, shared: Shared
) -> None:
    assert differing(drafted(shared).steps[step], plain(shared)) == []


@BY_ANY
def test_drafts_are_accepted_and_rejected_and_requests_preempted(
    drafted: Callable[[Shared], Result], shared: Shared
) -> None:
    counted, _ = drafted(shared).afterwards
    assert 0 < counted["accepted"] < counted["drafts"]
    assert counted["preemptions"]


@BY_ANY
@pytest.mark.skipif(NO_KERNELS, reason="vLLM 0.30 has no kernels for it on a CPU")
def test_vllms_rule_of_acceptance_fails_the_same_comparison(
    drafted: Callable[[Shared], Result], shared: Shared
) -> None:
    _, different = drafted(shared).afterwards
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
"""Of random weights, so they are hardly ever right."""
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


RUNNING = ["n-grams"] if NO_KERNELS else [*DRAFTERS]
BY_WORKERS = [name for name in RUNNING if name != "DFlash"]
"""Those that several may have, and of a mixture of experts."""
BY_WORKERS_OF_EXPERTS = [name for name in ("n-grams", "the model itself", "EAGLE-3") if name in RUNNING]


@pytest.mark.parametrize("runner", RUNNERS, ids="runner_{}".format)
@pytest.mark.parametrize(
    ("name", "shared"),
    [
        *beside(RUNNING, ALONE, ["n-grams"]),
        *beside(BY_WORKERS, DENSE),
        *beside(BY_WORKERS_OF_EXPERTS, OF_EXPERTS),
    ],
    ids=str,
)
def test_drafters_of_vllms_leave_answers_alone(
    engine: Callable[..., Result],
    plain_of: Callable[[str, Shared], list[dict[str, Any]]],
    target: Callable[[Shared], Path],
    tmp_path: Path,
    name: str,
    shared: Shared,
    runner: str,
) -> None:
    skip_where_vllm_has_none(name, runner)
    plain = plain_of(runner, shared)
    speculation = {"num_speculative_tokens": 3} | DRAFTERS[name](target(shared), tmp_path)
    few = slice(None) if name.startswith("n-grams") else FEW
    step = TOGETHER | {"requests": requests()[few]}

    def afterwards(running: Any) -> tuple[dict[str, int], list[dict[str, Any]]]:
        counted = counts(running)
        if runner != "1":
            return counted, []
        running.call("tests.engine.drafters:accept_as_vllm_does", "second")
        return counted, running.step(**step).requests

    settings = {"speculative_config": json.dumps(speculation), "runner": runner, "shared": shared}
    done = engine([step], afterwards, **settings)
    assert differing(done.steps["together"], plain[few], few) == []
    counted, by_their_rule = done.afterwards
    assert counted["drafts"] > 0
    assert counted["accepted"] > 0 or name in HEADS
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


PREDICTING = {"MiMo": make_mtp_model, "GLM-4.5": make_glm, "ERNIE 4.5": make_ernie}


@pytest.mark.parametrize("runner", RUNNERS, ids="runner_{}".format)
@pytest.mark.parametrize(
    ("name", "shared"),
    [*beside(PREDICTING, ALONE), *beside(["MiMo"], DENSE), *beside(["GLM-4.5", "ERNIE 4.5"], OF_EXPERTS)],
    ids=str,
)
def test_a_layer_that_predicts_more_tokens_leaves_answers_alone(
    engine: Callable[..., Result], checkpoint: Path, tmp_path: Path, name: str, shared: Shared, runner: str
) -> None:
    """Of random weights, by the layer that a model has for a second token; three drafts run it three times."""
    step = TOGETHER | {"requests": requests()[FEW]}
    folder = str(PREDICTING[name](tmp_path))
    settings = {"model": folder, "tokenizer": str(checkpoint), "runner": runner, "shared": shared}
    plain = engine([step], **settings).steps["together"]
    speculation = json.dumps({"method": "mtp", "num_speculative_tokens": 3})
    done = engine([step], counts, speculative_config=speculation, **settings)
    assert differing(done.steps["together"], plain, FEW) == []
    assert done.afterwards["drafts"] > 0

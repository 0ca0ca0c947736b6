"""Models that embed, classify and reward: what a request gets has the same bits alone and among others, in chunks, from
a warm prefix cache and after a preemption.
"""

import json
import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.bisected import assert_each_is_named
from tests.engine.engines import (
    CHECK,
    EAGER_ON_GPU,
    OF_DEVICE,
    SETTINGS,
    Engine,
    arguments_of,
    some_exhaustive,
    tokens,
    untried_on_gpu,
)
from tests.engine.engines import run as run_engine
from tests.engine.pooled import PREEMPTED_AFTER
from tests.engine.test_models import SIZES
from tests.faults.fuzz import OF_POOLING
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.verify.answers import RequestSpec, answer_of
from vllm_batch_invariant.verify.check.engine import PoolingRun
from vllm_batch_invariant.verify.check.guarantees import AGAIN, PREEMPTED
from vllm_batch_invariant.verify.check.results import CheckResults
from vllm_batch_invariant.verify.fuzz.finding import Row
from vllm_batch_invariant.verify.fuzz.schedule import Settings, draw_schedule, draw_targets
from vllm_batch_invariant.verify.fuzz.trial import Trial
from vllm_batch_invariant.verify.outcome import Outcome, Status
from vllm_batch_invariant.verify.receipt import PooledReceipt
from vllm_batch_invariant.verify.reproduce import offline
from vllm_batch_invariant.verify.reproduce.report import ReproduceResult

ON_GPU = torch.cuda.is_available()
pytestmark = pytest.mark.engine

WIDE = SIZES | {"hidden_size": 512, "intermediate_size": 1024, "num_attention_heads": 8, "num_key_value_heads": 2}
CHUNKS, WHOLE = 128, 1024
"""Tokens of a step: prompts come in chunks, or as a whole, which some poolers ask for."""
LENGTHS = (700, 300, 45, 1)
"""The longest first, so that it is preempted between its chunks."""
MARK = 7
"""A token behind which a process reward model is asked."""


@dataclass(frozen=True)
class Case:
    """A model that pools.

    Attributes:
        model: makes it; None for the checkpoint that engine tests share, which is wide enough for plain vLLM to vary.
        wanted: what requests ask for, what collects rows chunk by chunk first.
        method: of ``LLM``, which gives the last of these, too.
        step: tokens of a step.
        settings: of the engine.
    """

    model: Callable[[], torch.nn.Module] | None
    wanted: tuple[dict[str, Any], ...]
    method: str
    step: int = CHUNKS
    settings: dict[str, Any] = field(default_factory=dict)


def qwen3() -> torch.nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**WIDE, head_dim=64, tie_word_embeddings=True))


def mistral() -> torch.nn.Module:
    """As e5-mistral, whose checkpoint has no head and a window as long as its prompts."""
    return transformers.MistralModel(transformers.MistralConfig(**WIDE, sliding_window=4096))


def llama_that_classifies() -> torch.nn.Module:
    return transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**WIDE, num_labels=3))


def reward_model(labels: int) -> Callable[[], torch.nn.Module]:
    """A Qwen2 with two linear layers at its end, as Qwen's reward models have them."""

    def made() -> torch.nn.Module:
        model = transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**WIDE, tie_word_embeddings=True))
        size = WIDE["hidden_size"]
        model.score = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, labels))
        return model

    return made


def called(architecture: str) -> dict[str, str]:
    """Hugging Face writes the name of its own class."""
    return {"hf_overrides": json.dumps({"architectures": [architecture]})}


def embedding(pooling: str | None = None) -> dict[str, Any]:
    chosen = {"pooler_config": json.dumps({"pooling_type": pooling})} if pooling else {}
    return {"runner": "pooling", "convert": "embed", "hf_overrides": json.dumps({"is_matryoshka": True})} | chosen


CASES = {
    "embeddings of the last token": Case(
        None,
        (
            {"task": "token_embed"},
            {"task": "embed", "use_activation": False},
            {"task": "embed", "dimensions": 100},
            {"task": "embed"},
        ),
        "embed",
        settings=embedding(),
    ),
    "embeddings of the mean": Case(
        qwen3,
        ({"task": "embed", "use_activation": False}, {"task": "embed"}),
        "embed",
        WHOLE,
        embedding("MEAN"),
    ),
    "e5-mistral": Case(
        mistral,
        ({"task": "token_embed"}, {"task": "embed", "use_activation": False}, {"task": "embed"}),
        "embed",
        settings={"runner": "pooling"},
    ),
    "a Llama that classifies": Case(
        llama_that_classifies,
        ({"task": "token_classify"}, {"task": "classify", "use_activation": False}, {"task": "classify"}),
        "classify",
        settings={"pooler_config": json.dumps({"logit_mean": 0.1, "logit_sigma": 1.7})},
    ),
    "a Qwen3 whose head is made of two words": Case(
        qwen3,
        ({"task": "classify", "use_activation": False}, {"task": "classify"}),
        "classify",
        settings={
            "runner": "pooling",
            "hf_overrides": json.dumps(
                {
                    "architectures": ["Qwen3ForSequenceClassification"],
                    "classifier_from_token": ["no", "if"],
                    "is_original_qwen3_reranker": True,
                }
            ),
        },
    ),
    "a head in the model's dtype": Case(
        llama_that_classifies,
        ({"task": "token_classify", "use_activation": False}, {"task": "classify"}),
        "classify",
        settings={"hf_overrides": json.dumps({"head_dtype": "model"})},
    ),
    "a reward of each token": Case(
        reward_model(1),
        ({"task": "token_classify", "use_activation": True}, {"task": "token_classify"}),
        "encode token_classify",
        settings=called("Qwen2ForRewardModel"),
    ),
    "a reward of each step": Case(
        reward_model(2),
        ({"task": "token_classify", "use_activation": False}, {"task": "token_classify"}),
        "encode token_classify",
        WHOLE,
        called("Qwen2ForProcessRewardModel") | {"pooler_config": json.dumps({"step_tag_id": MARK})},
    ),
}
FUZZED = Settings(16, CHUNKS, 32, True, False, True, False, "", 200, pooler="own")
"""As the engine of the first case, so far as schedules look at it."""
PLANTED = tuple(fault for fault in OF_POOLING if fault == "pooler" or not ON_GPU)
"""Faults: the graphs of a GPU would leave out what is planted in a layer."""
PAIR = ["Which order?", "An order of additions."]
RECEIPTS = {
    "embed": [{"task": "embed", "dimensions": 100}, {"task": "embed", "activation": False}, {"task": "score"}],
    "classify": [{"task": "classify"}, {"task": "classify", "activation": False}],
}
"""What receipts are made of, by the method of ``LLM``."""
QUICK = ("embeddings of the last token", "a Llama that classifies")
"""Those that run also where each minute counts."""


def prompt(length: int, seed: int) -> list[int]:
    """With marks in it."""
    made = tokens(length, seed)
    return [MARK if place % 9 == 8 else token for place, token in enumerate(made)]


def requests_of(case: Case) -> list[dict[str, Any]]:
    return [{"prompt": prompt(length, length), "params": wanted} for length in LENGTHS for wanted in case.wanted]


def others(case: Case, count: int) -> list[dict[str, Any]]:
    wanted = case.wanted
    return [{"prompt": prompt(1 + 37 * i % 200, 500 + i), "params": wanted[i % len(wanted)]} for i in range(count)]


def plan(case: Case) -> dict[str, tuple[list[dict[str, Any]], str]]:
    """The requests of each run, the targets first, and what is let go of."""
    targets = requests_of(case)
    alone = {f"alone {number}": ([target], "cache") for number, target in enumerate(targets)}
    return alone | {
        "together": (targets, "cache"),
        "among 3": ([*targets, *others(case, 3)], "cache"),
        "among 40": ([*targets, *others(case, 40)], "cache"),
        "warm": (targets, ""),
        "preempted": (targets, "running"),
    }


def run(case: Case, folder: Path, shared: Path, flag: str, **more: Any) -> dict[str, Any]:
    """What one engine gives in all runs of the plan, and by a method of ``LLM``, for the last of what is wanted."""
    if case.model is None:
        folder = shared
    else:
        torch.manual_seed(0)
        case.model().to(torch.bfloat16).save_pretrained(folder)
        for file in shared.glob("tokenizer*"):
            shutil.copy(file, folder)
    limits = {"max_model_len": 1024, "max_num_seqs": 64, "max_num_batched_tokens": case.step, "dtype": "bfloat16"}
    arguments = arguments_of(limits | OF_DEVICE | case.settings | more)
    environment = SETTINGS | ({"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if "tensor_parallel_size" in more else {})
    with Engine(str(folder), arguments, flag, environment, patience=400) as engine:
        done: dict[str, Any] = {}
        if flag == "1" and not more and case is CASES[QUICK[0]]:  # one engine for all
            done["fuzzed"], done["reproduced"], done["checked"] = fuzzed(engine), reproduced(engine), checked(engine)
        if flag == "1" and not more and (wanted := RECEIPTS.get(case.method)):
            done["receipts"] = engine.call("tests.engine.receipts:pooled", prompt(45, 45), PAIR, wanted)
        done |= {
            name: engine.call("tests.engine.pooled:pooled", requests, reset)
            for name, (requests, reset) in plan(case).items()
        }
        done["resumed by vLLM"] = (
            engine.call("tests.engine.pooled:as_vllm_resumes", requests_of(case))
            if flag == "1" and not ON_GPU and case.step == CHUNKS and "tensor_parallel_size" not in more
            else None
        )
        by_method = engine.call(
            "tests.engine.pooled:by_methods", case.method, [prompt(length, length) for length in LENGTHS]
        )
    return done | {"by a method": {"given": by_method}}


def fuzzed(engine: Engine) -> dict[str, str]:
    """How a target differs in a schedule, by the fault that the engine has; "" is none."""
    drawing = Trial(engine, Row("checkpoint", "1", "", 0)).accepts
    targets = dict(enumerate(draw_targets(1, 8, drawing, FUZZED.context)))
    targets = {number: one for number, one in targets.items() if one.kind in drawing.kinds}
    schedule = draw_schedule("pooling 6", FUZZED, targets, drawing, 6)  # of few tokens, and finds each fault
    found = {}
    for fault in ("", *PLANTED):
        engine.call("tests.faults.fuzz:inject", fault)
        found[fault] = Trial(engine, Row("checkpoint", "1", "", 0)).fuzz(schedule)[1]
    engine.call("tests.faults.fuzz:inject", "")
    return found


def reproduced(engine: Engine) -> ReproduceResult:
    """What ``reproduce --offline --task embed`` finds."""
    spec = RequestSpec(prompt="Which sum?", task="embed", dimensions=100)
    asked = {"samples": 8, "concurrency": 3, "seed": 0, "spec": vars(spec)}
    return ReproduceResult.of("offline", *offline.run_of(engine.call(offline.RUN, asked)), engine.info)


def checked(engine: Engine) -> CheckResults:
    """What ``check`` finds in an engine that is as served."""
    results = CheckResults("1", PoolingRun.cases(CHECK))
    checking = PoolingRun(engine, "as served", CHECK, results, lambda now: None)
    checking.again()
    steps = [checking.step("many", checking.many(), True, preempted) for preempted in (None, PREEMPTED_AFTER)]
    checking.many_answers, answers = ([answer_of(one["completions"][0]) for one in step.requests] for step in steps)
    checking.compare_many(PREEMPTED, answers, checking)
    results.proof[PREEMPTED] = f"{steps[-1].preemptions} preemptions"
    return results


def moved(case: Case, done: dict[str, Any], names: Sequence[str]) -> list[str]:
    """Runs in which a target got something else than alone."""
    count = len(requests_of(case))
    alone = [done[f"alone {number}"]["given"][0] for number in range(count)]
    return [
        f"{name}: {number}"
        for name in names
        for number, (given, expected) in enumerate(zip(done[name]["given"][:count], alone, strict=True))
        if given != expected
    ]


RUNS = ("together", "among 3", "among 40", "warm", "preempted")


@pytest.fixture(autouse=True, scope="module")
def pools() -> None:
    version = pytest.importorskip("vllm").__version__
    if not version.startswith(RAN.pooling["cuda" if ON_GPU else "cpu"]):
        pytest.skip(f"pooling with vLLM {version} is refused")


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Callable[[str], dict[str, Any]]:
    """What an engine of a case gives, started when first asked for."""
    kept: dict[str, dict[str, Any]] = {}

    def of(name: str) -> dict[str, Any]:
        if name not in kept:
            kept[name] = run(CASES[name], tmp_path_factory.mktemp("model"), checkpoint, "1")
        return kept[name]

    return of


@pytest.mark.parametrize("name", some_exhaustive(CASES, QUICK))
def test_a_pooled_request_has_the_same_bits_under_any_schedule(
    name: str, asked: Callable[[str], dict[str, Any]]
) -> None:
    case, done = CASES[name], asked(name)
    assert moved(case, done, RUNS) == []
    assert done["among 40"]["largest"] > 1
    if case.step == CHUNKS:
        assert done["preempted"]["preemptions"] > 0
        caches = any(wanted["task"] in ("embed", "classify") for wanted in case.wanted)
        assert (max(done["warm"]["cached"]) > 0) == caches


@pytest.mark.parametrize("name", some_exhaustive(CASES, QUICK))
def test_what_a_request_gets_follows_from_its_prompt_and_what_it_wants(
    name: str, asked: Callable[[str], dict[str, Any]]
) -> None:
    """Otherwise equal bits would say nothing."""
    case, given = CASES[name], asked(name)["together"]["given"]
    there = [(tuple(one["shape"]), one["bits"]) for one in given if one["bits"]]  # a short prompt may have no mark
    assert len(there) >= len(case.wanted) * 3
    assert len(set(there)) == len(there)


@pytest.mark.parametrize("name", some_exhaustive(CASES, QUICK))
def test_a_method_of_the_offline_interface_gives_the_same(name: str, asked: Callable[[str], dict[str, Any]]) -> None:
    case, done = CASES[name], asked(name)
    kinds = len(case.wanted)
    expected = done["together"]["given"][kinds - 1 : kinds * len(LENGTHS) : kinds]
    for given, one in zip(done["by a method"]["given"], expected, strict=True):
        assert given["fp32"] == one["fp32"]


def test_a_fuzzer_finds_nothing_and_each_fault_that_is_planted(asked: Callable[[str], dict[str, Any]]) -> None:
    found = asked(QUICK[0])["fuzzed"]
    assert found.pop("") == ""
    assert set(found) == set(PLANTED)
    for where in found.values():
        assert where.startswith(("value ", "row "))


def test_commands_compare_the_embeddings_of_an_engine(asked: Callable[[str], dict[str, Any]]) -> None:
    done = asked(QUICK[0])
    result, results = done["reproduced"], done["checked"]
    assert result.status == Status.REPRODUCIBLE
    assert result.answers[0].shape == (100,)
    assert result.run.failed_others == 0, result.run.failure
    assert "dimensions" in result.run.varied
    tested = {case.name: case.detail for case in results.cases if case.outcome is Outcome.HOLDS}
    assert set(tested) == {AGAIN[1], PREEMPTED[1]}
    assert re.search(r"12 answers of \d+ rows and values .* [1-9]\d* preemptions", tested[PREEMPTED[1]])


@pytest.mark.parametrize("name", QUICK)
def test_a_receipt_of_what_is_pooled_is_equal_among_others_and_a_changed_bit_is_found(
    name: str, asked: Callable[[str], dict[str, Any]]
) -> None:
    """With a pooler that takes another row beside others it is not equal."""
    made = asked(name)["receipts"]
    assert [one["said"].splitlines()[-1] for one in made if one["said"].splitlines()[-1][:6] != "equal:"] == []
    for one in made:
        kept = PooledReceipt.from_json(one["receipt"])
        assert one["by method"] == one["receipt"]
        assert "computed again 8 times with" in one["said"]
        last, count = one["of changed"].splitlines()[-1], len(kept.pooled.values)
        assert re.fullmatch(rf"differs: value {count - 1} is 0x.*; 1 of {count} values differ", last)
        assert one["faulty"].splitlines()[-1].startswith("differs: value ")
        assert "pooler_config" in kept.environment.engine


@pytest.mark.skipif(ON_GPU, reason="the second model runner forgets what a preempted request has collected")
def test_vllm_gives_a_preempted_request_the_rows_of_its_chunks_twice(asked: Callable[[str], dict[str, Any]]) -> None:
    case, done = CASES[QUICK[0]], asked(QUICK[0])
    assert moved(case, done, ["resumed by vLLM"]) == ["resumed by vLLM: 0"]
    assert done["resumed by vLLM"]["given"][0]["shape"][0] == LENGTHS[0] + CHUNKS * PREEMPTED_AFTER


@pytest.mark.exhaustive
def test_plain_vllm_fails_the_same_comparison(tmp_path: Path, checkpoint: Path) -> None:
    case = CASES[QUICK[0]]
    done = run(case, tmp_path, checkpoint, "0", enforce_eager=True, max_num_batched_tokens=2048, dtype="float32")
    assert moved(case, done, RUNS[:3])


@untried_on_gpu
@pytest.mark.exhaustive
def test_two_workers_keep_the_bits(tmp_path: Path, checkpoint: Path) -> None:
    case = CASES["a reward of each token"]
    done = run(case, tmp_path, checkpoint, "1", tensor_parallel_size=2)
    assert moved(case, done, RUNS[:4]) == []


def bisected(folder: Path, task: str, flag: str = "1", function: str = "pooled", **settings: Any) -> dict[str, Any]:
    """What bisections of an engine find: of the usual function by what is planted."""
    limits = {"model": str(folder), "max_model_len": 512, "dtype": "bfloat16"}
    return run_engine(
        limits | {"enforce_eager": True} | settings | OF_DEVICE, [], flag, bisection=(function, {"task": task})
    ).bisected


@untried_on_gpu
@pytest.mark.exhaustive
def test_a_bisection_names_the_layer_the_mean_or_the_norm_that_looks_at_the_batch(checkpoint: Path) -> None:
    assert_each_is_named(bisected(checkpoint, "embed", **embedding("MEAN")))


@untried_on_gpu
@pytest.mark.exhaustive
def test_a_bisection_names_the_classifier_or_its_activation(tmp_path: Path, checkpoint: Path) -> None:
    torch.manual_seed(0)
    llama_that_classifies().to(torch.bfloat16).save_pretrained(tmp_path)
    for file in checkpoint.glob("tokenizer*"):
        shutil.copy(file, tmp_path)
    assert_each_is_named(bisected(tmp_path, "classify"))


@untried_on_gpu
@pytest.mark.exhaustive
def test_a_bisection_of_plain_vllm_names_an_operation(checkpoint: Path) -> None:
    settings = embedding("MEAN") | {"dtype": "float32"}
    found = bisected(checkpoint, "embed", "0", "pooled_of_a_word", **settings)["found"]
    assert found["divergence"]["key"]["module"].startswith("model.layers.")
    assert found["operands_differ"] == []


@pytest.mark.skipif(not ON_GPU, reason="a CPU has one model runner")
@pytest.mark.parametrize("name", QUICK)
def test_the_first_model_runner_of_a_gpu_keeps_the_bits(
    name: str, tmp_path: Path, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    case = CASES[name]
    assert moved(case, run(case, tmp_path, checkpoint, "1", **EAGER_ON_GPU), RUNS) == []

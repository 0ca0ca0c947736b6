"""A trained model keeps its bits as models of random weights do: real questions, answered alone and among others, by
drawn requests and settings, in exact arithmetic, in four bits, and by a trainer.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from scripts.parity import Gap, Sample, of_trainer, plain_logprobs, rollout
from tests.engine.engines import OF_DEVICE, ROOT, Result, concurrent_requests, request, run
from vllm_batch_invariant.envs import ARITHMETIC, FLAG
from vllm_batch_invariant.hf import patch
from vllm_batch_invariant.verify.fuzz.command import started
from vllm_batch_invariant.verify.fuzz.finding import Row
from vllm_batch_invariant.verify.fuzz.schedule import Settings, draw_schedule, draw_targets
from vllm_batch_invariant.verify.fuzz.trial import Trial
from vllm_batch_invariant.verify.harness.worker import Engine
from vllm_batch_invariant.verify.quantised_model import quantise

pytestmark = pytest.mark.engine

ON_GPU = torch.cuda.is_available()
QUESTIONS = (
    "Every year in October the trees in front of my window turn yellow and red, and a few weeks later they are bare. "
    "Why do leaves change their colour, why do they fall, and is the tree dead in winter? Please answer so that a "
    "child of six years understands it, and end with something that we can do together in the garden.",
    "Why do we dream?",
    "What is the capital of France, and what is it known for?",
)
ANSWER = 10
"""Tokens of an answer."""
VOCABULARY = range(1000, 20000)
OTHERS = 9
DRAWN = Settings(16, 300, 32, True, False, True, True, "0" if ON_GPU else "", 512)
"""Of the fuzzer's engine: small steps and pages, and a KV cache that preempts."""


@pytest.fixture(scope="module")
def prompts(real_model: Path) -> list[list[int]]:
    """The questions as the model's chat template has them."""
    tokenizer = AutoTokenizer.from_pretrained(real_model)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]


def asked(model: Path, prompts: list[list[int]], flag: str, answer: int = ANSWER, **options: Any) -> Result:
    """Each question alone, then all of them beside other requests."""
    targets = [request(prompt, max_tokens=answer) for prompt in prompts]
    steps = [{"name": f"alone {place}", "requests": [target]} for place, target in enumerate(targets)]
    others = concurrent_requests(OTHERS, 5, vocabulary=VOCABULARY)
    steps.append({"name": "among", "reset_prefix_cache": True, "requests": [*targets, *others]})
    limits = {"max_model_len": 1024, "max_num_seqs": 32, "max_num_batched_tokens": 1024, "skip_tokenizer_init": True}
    eager = {"enforce_eager": True} if flag == "0" else {}  # plain vLLM would compile for a minute
    return run({"model": str(model)} | limits | OF_DEVICE | eager, steps, flag, **options)


def that_differ(result: Result, questions: int) -> list[int]:
    """The questions whose answer among others is not the one alone, in tokens, logprobs or listed candidates."""
    return [
        place
        for place in range(questions)
        if result.completions("among", place) != result.completions(f"alone {place}")
    ]


@pytest.fixture(scope="module")
def kept(real_model: Path, prompts: list[list[int]]) -> Result:
    """An engine with the mode on, which then rolls out for a trainer."""

    def rolled_out(engine: Engine) -> list[Sample]:
        return rollout(engine, prompts[1:], ANSWER)

    return asked(real_model, prompts, "1", afterwards=rolled_out)


def test_an_answer_to_a_real_question_has_the_same_bits_alone_and_among_others(kept: Result) -> None:
    assert that_differ(kept, len(QUESTIONS)) == []


def test_plain_vllm_fails_the_same_comparison(real_model: Path, prompts: list[list[int]]) -> None:
    assert that_differ(asked(real_model, prompts, "0"), len(QUESTIONS))


def test_a_trainer_has_the_logprobs_of_the_rollout(kept: Result, real_model: Path) -> None:
    samples = kept.afterwards
    device = "cuda" if ON_GPU else "cpu"
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.bfloat16).to(device).eval()
    assert Gap.of(samples, of_trainer(model, samples, plain_logprobs)).different
    gap = Gap.of(samples, of_trainer(patch(model), samples))
    assert gap.tokens > 2 * (ANSWER + 20)
    assert (gap.different, gap.kl) == (0, 0.0)


@pytest.mark.exhaustive
def test_a_fuzzed_engine_keeps_every_bit(real_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"PYTHONPATH": str(ROOT), "VLLM_NO_USAGE_STATS": "1", FLAG: "1"}.items():
        monkeypatch.setenv(name, value)
    with started(str(real_model), (), "1", DRAWN) as engine:
        trial = Trial(engine, Row("real model", "1", DRAWN.label, 0))
        targets = enumerate(draw_targets(0, 6, trial.accepts, DRAWN.context))
        answered = {number: target for number, target in targets if trial.take(target) is not None}
        schedules = [draw_schedule(f"real {number}", DRAWN, answered, trial.accepts, 8) for number in range(2)]
        assert [trial.fuzz(schedule) for schedule in schedules] == [("", "")] * 2
    assert trial.row.concurrent
    assert trial.row.compared >= 2


@pytest.mark.exhaustive
@pytest.mark.skipif(ON_GPU, reason="test_exact_cuda.py runs engines on a GPU")
def test_in_exact_arithmetic_an_answer_has_the_same_bits_alone_and_among_others(
    real_model: Path, prompts: list[list[int]]
) -> None:
    exact = asked(real_model, prompts[1:], "1", answer=4, **{ARITHMETIC.name: "exact"})
    assert that_differ(exact, 2) == []
    assert exact.completions("alone 0") != exact.completions("alone 1")


@pytest.mark.exhaustive
def test_in_four_bits_an_answer_has_the_bits_of_the_matrices_alone_and_among_others(
    kept: Result, real_model: Path, prompts: list[list[int]], tmp_path: Path
) -> None:
    shutil.copytree(real_model, tmp_path / "packed")
    quantise(tmp_path / "packed", "w4a16-g32", tmp_path / "unpacked")
    packed, unpacked = (asked(tmp_path / name, prompts, "1") for name in ("packed", "unpacked"))
    assert that_differ(packed, len(QUESTIONS)) == []
    for place in range(len(QUESTIONS)):
        assert packed.completions("among", place) == unpacked.completions("among", place)
        assert packed.completions("among", place) != kept.completions("among", place)

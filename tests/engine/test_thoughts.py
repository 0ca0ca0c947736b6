"""A parser of thoughts beside drafts: answers are those of plain decoding, also with a grammar that begins behind a
thought; a thinking budget is refused.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer

from tests.engine import kept_states, multimodal
from tests.engine.drafters import ANSWERS, KINDS, add_mtp
from tests.engine.engines import UNTRIED_THERE, differing_answers, tokens
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.demo_model import save_tokenizer, train_tokenizer
from vllm_batch_invariant.verify.harness.requests import BUDGET, NGRAMS
from vllm_batch_invariant.verify.harness.worker import Engine

VERSIONS = reviews.ran().grammars_behind_thoughts | {"cuda": "0.33."}
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(
        not patch_points.installed_version().startswith(VERSIONS["cuda" if kept_states.ON_GPU else "cpu"]),
        reason="refused with this vLLM",
    ),
]
PLUGIN = Path(__file__).parent / "thoughts.py"
PARSER = {
    "structured_outputs_config": json.dumps({"reasoning_parser": "last_mark", "reasoning_parser_plugin": str(PLUGIN)}),
    "reasoning_config": json.dumps({"reasoning_start_str": "def", "reasoning_end_str": "self"}),
    "skip_tokenizer_init": False,
}
GRAMMARS: tuple[dict[str, Any], ...] = ({"regex": "[a-f]{200}"}, {"regex": "(ab|ba|c)*de{9,}"}, {"choice": ["a" * 99]})
SMALL = {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 12, "enable_prefix_caching": False}
FAULTS = ("end_as_vllm_says", "end_with_the_step")


def requests(tokenizer: Tokenizer, page: int) -> list[dict[str, Any]]:
    """Some with a grammar behind a thought, of few tokens, so that it soon ends and a new one would begin; and some
    without. Prompts have marks, and repeat, and answers go over the end of a page, so that requests are preempted.
    """
    start, end, *letters = (tokenizer.token_to_id(one) for one in ("def", "self", *"abcdef"))
    made = []
    for number in range(16):
        kind = number % len(KINDS)
        spoken = [start, end, *letters]
        prompt = [len(KINDS) * (20 + number) + kind, *tokens(page - 48 + number, number, range(300, 480)), *letters[:2]]
        prompt += [end, start, letters[number % 6]] * (1 + number % 5) + [start]
        seeded = {"temperature": 1.0, "seed": number} if number % 3 else {"temperature": 0.0}
        params = seeded | {"max_tokens": 40, "logprobs": 3, "ignore_eos": True}
        if number % 4 < 3:
            params |= {"structured_outputs": GRAMMARS[number % 3], "allowed_token_ids": spoken, "temperature": 1.0}
            params["seed"] = number
        made.append({"prompt": prompt, "params": params})
    return made


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    path = multimodal.python_path(tmp_path_factory.mktemp("path"))
    return partial(kept_states.started, path=path, variables=UNTRIED_THERE, **PARSER)


@pytest.fixture(scope="module", params=["Llama", pytest.param("Qwen3.5", marks=pytest.mark.exhaustive)])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, checkpoint: Path) -> Path:
    if request.param == "Llama":
        return checkpoint
    folder, sizes = tmp_path_factory.mktemp("qwen3.5"), kept_states.QWEN3_5
    save_tokenizer(train_tokenizer(sizes["vocab_size"]), folder, 1024)
    written = kept_states.written(transformers.Qwen3_5ForCausalLM(transformers.Qwen3_5TextConfig(**sizes)), folder)
    return add_mtp(written)


@pytest.fixture(scope="module")
def asked(model: Path) -> list[dict[str, Any]]:
    return requests(Tokenizer.from_file(str(model / "tokenizer.json")), 256 if _has_mtp(model) else 128)


def _has_mtp(model: Path) -> bool:
    return "mtp_num_hidden_layers" in (model / "config.json").read_text()


@pytest.fixture(scope="module")
def plain(started: Callable[..., Any], model: Path, asked: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each request alone, without drafts."""

    def alone(engine: Engine) -> list[dict[str, Any]]:
        return [engine.step(f"{number}", [one], True).requests[0] for number, one in enumerate(asked)]

    return started(model, afterwards=alone, **SMALL)


def drafted(engine: Engine, asked: list[dict[str, Any]], faults: tuple[str, ...]) -> dict[str, Any]:
    together = engine.step("together", asked)
    found: dict[str, Any] = {"together": together.requests, "preemptions": together.preemptions}
    found["counts"] = engine.call("tests.engine.drafters:counts")
    budget = {"prompt": [5, 6, 7], "params": {"max_tokens": 4, BUDGET: 2}, "may_be_refused": True}
    found["refused"] = engine.step("refused", [budget]).requests[0]
    for fault in faults:
        engine.call(f"tests.engine.thoughts:{fault}")
        found[fault] = engine.step(fault, asked).requests
    return found


METHODS = (pytest.param("known answers", marks=pytest.mark.exhaustive), "n-grams", "mtp")


@pytest.mark.parametrize("method", METHODS)
def test_an_answer_is_that_of_plain_decoding_with_and_without_a_grammar(
    started: Callable[..., Any],
    model: Path,
    asked: list[dict[str, Any]],
    plain: list[dict[str, Any]],
    tmp_path: Path,
    method: str,
) -> None:
    """With a thought's end taken for one elsewhere in a step it is not."""
    if method == "mtp" and not _has_mtp(model):
        pytest.skip("it has no layer for more tokens")
    if method == "known answers" and kept_states.ON_GPU:
        pytest.skip("a drafter of one's own needs the first model runner")
    known = tmp_path / "answers.json"
    pairs = zip(asked, plain, strict=True)
    known.write_text(json.dumps([one["prompt"] + answer["completions"][0]["tokens"] for one, answer in pairs]))
    drafts = {"known answers": kept_states.KNOWN_ANSWERS, "n-grams": NGRAMS, "mtp": {"method": "mtp"}}[method]
    found = started(
        model,
        afterwards=partial(drafted, asked=asked, faults=FAULTS),
        speculative_config=json.dumps(drafts | {"num_speculative_tokens": 4}),
        variables=UNTRIED_THERE | {ANSWERS: str(known)},
        **SMALL,
    )
    assert differing_answers(found["together"], plain) == []
    assert found["preemptions"] > 0
    assert found["refused"].get("refused", "").startswith("batch-invariant mode does not cover a thinking budget")
    assert found["counts"]["drafts"] > 0
    if method == "mtp":  # of random weights, which no thought ends beside
        return
    assert found["counts"]["accepted"] > 0
    assert differing_answers(found["end_with_the_step"], plain)
    assert method != "n-grams" or differing_answers(found["end_as_vllm_says"], plain)

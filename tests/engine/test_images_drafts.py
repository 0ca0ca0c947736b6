"""Images and videos beside speculative decoding: a request has the tokens, logprobs and candidates of plain decoding,
alone, among others, in chunks that cut its images, from the caches and after a preemption.
"""

import json
import os
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.engine import images, kept_states, multimodal
from tests.engine.drafters import ANSWERS, KINDS, add_mtp
from tests.engine.engines import (
    OF_DEVICE,
    PATHS,
    SETTINGS,
    UNTRIED_THERE,
    Engine,
    arguments_of,
    differing_answers,
    untried_on_gpu,
)
from tests.engine.quantised_layers import (
    BLOCKS,
    FORMS,
    KEPT,
    MODELOPT,
    NVFP4,
    with_each_expert,
    with_scales_of_cache,
    write,
)
from tests.engine.test_delta_rule import PAGES_OF, SMALL_STATES
from tests.engine.test_images import FILM, LARGE, LEAST, LIMITS, OBLONG, SMALL, STRIP, TALL, asked, text
from tests.engine.test_quantised_images import MIXED, MIXTURE
from tests.mixed_checkpoints import write as write_mixed
from vllm_batch_invariant.integration.coverage import RAN
from vllm_batch_invariant.verify.harness.requests import NGRAMS

pytestmark = [pytest.mark.engine, pytest.mark.exhaustive, untried_on_gpu]

IN_PAGES, OF_EXPERTS = "qwen3.5 in small pages", "qwen3.5 with experts in small pages"
OF_INTERN = "intern-s2 in small pages"
IN_CODES = {f"{name}, {form}": form for form in (BLOCKS, "gptq", NVFP4[1]) for name in (IN_PAGES, OF_EXPERTS)}
CODED = {f"{name}, {NVFP4[1]}, KV cache in FP8": NVFP4[1] for name in (IN_PAGES, OF_EXPERTS)}
CODED |= {f"{IN_PAGES}, {form}, KV cache in FP8": form for form in (MODELOPT, MIXED)}
"""Whose checkpoints have scales of it, as published."""
IN_CODES |= CODED
OF_CODED = {
    "head_dim": 128,
    "rope_parameters": kept_states.QWEN3_5["rope_parameters"] | {"partial_rotary_factor": 0.125},
}
"""A page of codes is larger than a state, too."""
WHOLE_BLOCKS = dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "num_key_value_heads"), 4)
"""Each part of what a delta rule reads, of heads of 32, has whole blocks of 128; a page of keys is larger, too."""
MODELS = {
    "qwen2.5-vl": images.qwen2_5_vl,
    "qwen3-vl": images.qwen3_vl,
    "qwen3.5": images.qwen3_5,
    IN_PAGES: partial(images.qwen3_5, kept_states.QWEN3_5 | SMALL_STATES[1]),
    OF_EXPERTS: partial(images.qwen3_5, kept_states.QWEN3_5_MOE | SMALL_STATES[1]),
    OF_INTERN: partial(images.intern_s2, kept_states.QWEN3_5_MOE | SMALL_STATES[1]),
}
MODELS |= {
    name: partial(
        images.qwen3_5,
        (kept_states.QWEN3_5_MOE if OF_EXPERTS in name else kept_states.QWEN3_5)
        | SMALL_STATES[1]
        | WHOLE_BLOCKS
        | (OF_CODED if name in CODED else {}),
    )
    for name in IN_CODES
}
METHODS: dict[str, dict[str, Any]] = {
    "known answers": kept_states.KNOWN_ANSWERS,
    "n-grams": NGRAMS,
    "mtp": {"method": "mtp"},
}
CASES = [
    *((IN_PAGES, method) for method in ("mtp", "n-grams")),
    *(("qwen3.5", method) for method in ("n-grams", "known answers", "mtp")),
    *((name, method) for name in ("qwen3-vl", "qwen2.5-vl") for method in ("known answers", "n-grams")),
    *((name, "mtp") for name in (OF_EXPERTS, OF_INTERN, *IN_CODES)),
]
SETTINGS_OF: dict[str, dict[str, Any]] = {
    "qwen3.5": {"enable_prefix_caching": False},
    **{
        name: {"block_size": PAGES_OF[1], **kept_states.KEEPS_ALL}
        for name in (IN_PAGES, OF_EXPERTS, OF_INTERN, *IN_CODES)
    },
}
SETTINGS_OF[OF_INTERN] |= {"trust_remote_code": True, "mamba_ssm_cache_dtype": "float32"}
"""A model with states has one of each request, or one at the end of each page."""
BUDGET = 128
"""Tokens of a step: fewer than a target has, so that its chunks end inside its images."""
SOFTENED, MOVED, KEEPING = (
    "tests.engine.images_drafts:soften_verify_steps",
    "tests.engine.images_drafts:move_drafts",
    "tests.engine.states:keep_drafts",
)
"""Faults of verify steps: scores, places, and states that have seen rejected drafts."""


def repeating(number: int, before: int, grids: list[Any], after: int = 12, **params: Any) -> dict[str, Any]:
    """A request whose text, whose first token chooses what a drafter that knows the answers gives, repeats."""
    made = asked(number, before, grids, after, count=24)
    words = text(4, number)
    prompt = [words[place % 4] if token not in images.SPECIAL else token for place, token in enumerate(made["prompt"])]
    prompt[0] = len(KINDS) * (10 + number) + number % len(KINDS)
    return made | {"prompt": prompt, "params": made["params"] | {"logprobs": 5} | params}


def remember(folder: Path) -> None:
    """Have states last: of Transformers' random weights most forget within a few tokens."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    slower = {name: tensor - 4 for name, tensor in tensors.items() if name.endswith("A_log")}
    save_file(tensors | slower, file, metadata={"format": "pt"})


SEEDED = {"temperature": 1.0, "seed": 5}
TARGETS = [
    repeating(4, 60, [LARGE], 20),  # over the border of a page
    repeating(7, 7, [SMALL, OBLONG, LEAST], **SEEDED),
    repeating(8, 20, [STRIP]),
    repeating(12, 30, [SMALL]) | {"images": [(SMALL, 400)]},
    repeating(12, 30, [SMALL]) | {"images": [(SMALL, 401)]},  # the same words about another picture
    repeating(16, 150, []),
    repeating(20, 12, [SMALL, FILM]),
    repeating(15, 9, [TALL, SMALL], **SEEDED | {"top_p": 0.8}),
]
FEW = [repeating(21, 3, [TALL, LEAST]), repeating(22, 45, []), repeating(24, 1, [(8, 30), (3, 10, 8)])]
MANY = [
    repeating(30 + n, 1 + 7 * n % 40, [[], [SMALL], [LEAST, (6, 10)], [TALL], [(1, 4, 6)]][n % 5]) for n in range(12)
]
COUNT = len(TARGETS)
RUNS = images.runs_of(TARGETS, FEW, MANY)
ALONE = [name for name in RUNS if name.startswith("alone")]
Answers = list[dict[str, Any]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    if not pytest.importorskip("vllm").__version__.startswith(RAN.encoding["cuda" if kept_states.ON_GPU else "cpu"]):
        pytest.skip("encoders of images have not run here")
    return os.pathsep.join([*multimodal.python_path(tmp_path_factory.mktemp("path")), PATHS])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    @cache
    def made(name: str) -> Path:
        folder = tmp_path_factory.mktemp("model")
        images.save(MODELS[name](), torch.bfloat16, folder)
        if "vl" in name:
            return folder
        remember(add_mtp(folder))
        if name not in IN_CODES:
            return folder
        form, packed = IN_CODES[name], tmp_path_factory.mktemp("codes") / "packed"
        kept = rf"^mtp\.|{KEPT}" if form == "gptq" else KEPT  # as published
        if form == MIXED:
            write_mixed(folder, MIXTURE, packed)
        else:
            write(with_each_expert(folder), FORMS[form], packed, kept=kept)
        if name in CODED:
            with_scales_of_cache(packed)
        return packed

    return made


@pytest.fixture(scope="module")
def engine(path: str, model: Callable[[str], Path]) -> Callable[..., Engine]:
    def start(name: str, variables: dict[str, str] | None = None, **more: object) -> Engine:
        settings = {"dtype": "bfloat16", "max_num_batched_tokens": BUDGET} | SETTINGS_OF.get(name, {}) | more
        environment = SETTINGS | {"PYTHONPATH": path} | UNTRIED_THERE | (variables or {})
        return Engine(str(model(name)), arguments_of(LIMITS | OF_DEVICE | settings), "1", environment, patience=400)

    return start


def answers(running: Engine, name: str, run: str) -> dict[str, Any]:
    requests, _, reset = RUNS[run]
    patch = MODELS[name]().vision_config.patch_size
    return running.call("tests.engine.images:answers", requests, patch, reset, 9)


@pytest.fixture(scope="module")
def plain(engine: Callable[..., Engine]) -> Callable[[str], Answers]:
    """Each target alone, without drafts."""

    @cache
    def given(name: str) -> Answers:
        with engine(name) as running:
            return [answers(running, name, run)["given"][0] for run in ALONE]

    return given


@pytest.mark.parametrize(("name", "method"), CASES)
def test_a_request_with_images_has_the_bits_of_plain_decoding_in_any_company(
    engine: Callable[..., Engine],
    plain: Callable[[str], Answers],
    tmp_path: Path,
    name: str,
    method: str,
) -> None:
    """But not where the rows of drafts have other scores, or other places, or states have seen rejected ones."""
    if method == "known answers" and kept_states.ON_GPU:
        pytest.skip("a drafter of the test's needs the first model runner")
    expected, known = plain(name), tmp_path / "answers.json"
    assert expected[3]["completions"] != expected[4]["completions"], "the model does not look at images"
    known.write_text(json.dumps([one["prompt"] + one["completions"][0]["tokens"] for one in expected]))
    faults = [SOFTENED]
    if not kept_states.ON_GPU and "vl" in name:
        faults.append(MOVED)
    elif not kept_states.ON_GPU and method != "n-grams":  # which are few; a GPU's kernels read them from the ring
        faults.append(KEEPING)
    elif name in IN_CODES:
        faults.clear()  # which take an engine of their own on a GPU
    drafts = json.dumps(METHODS[method] | {"num_speculative_tokens": 4})
    drafting = partial(engine, name, variables={ANSWERS: str(known)}, speculative_config=drafts)

    def with_faults(running: Engine) -> dict[str, Answers]:
        faulty = {}
        for fault in faults:
            running.call(fault)
            faulty[fault] = answers(running, name, "together")["given"]
            running.call(fault)
        return faulty

    with drafting() as running:
        found = {run: answers(running, name, run) for run in RUNS}
        counts = running.call("tests.engine.drafters:counts")
        faulty = {} if kept_states.ON_GPU else with_faults(running)
    if kept_states.ON_GPU and faults:
        with drafting(enforce_eager=True) as running:  # graphs would keep what they were captured with
            faulty = with_faults(running)
    differing = {
        run: differing_answers(found[run]["given"][RUNS[run][1]], expected) for run in RUNS if run not in ALONE
    }
    differing["alone"] = differing_answers([found[run]["given"][0] for run in ALONE], expected)
    assert {run: which for run, which in differing.items() if which} == {}
    assert counts["drafts"] > 0
    assert counts["accepted"] > 0 or method == "mtp"  # of random weights
    assert found["preempted"]["preemptions"] > 0
    assert name == "qwen3.5" or max(found["from the prefix cache"]["cached"]) > 0
    assert [fault for fault in faults if not differing_answers(faulty[fault], expected)] == []

"""What engines of models with states are asked: the same requests in every company, at any cut, after a preemption,
from the prefix cache, and in pages that others have left.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
import transformers

from tests.engine.drafters import ANSWERS, KINDS
from tests.engine.engines import (
    EAGER_ON_GPU,
    OF_DEVICE,
    PATHS,
    UNTRIED_THERE,
    concurrent_requests,
    differing_answers,
    request,
    run,
    tokens,
)
from tests.engine.states import FAULTS
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.coverage import CORES
from vllm_batch_invariant.verify.harness.worker import Engine

LFM2 = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "layer_types": ["conv", "full_attention", "conv"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "block_auto_adjust_ff_dim": False,
    "tie_word_embeddings": True,
    **dict.fromkeys(("conv_dim", "conv_dim_out", "block_dim"), 256),
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
"""vLLM reads fields that Transformers' class does not have of its own."""
QWEN3_5 = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
QWEN3_5_MOE = QWEN3_5 | {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
}
"""Each layer has experts, and one that all tokens share."""
AS_PUBLISHED = QWEN3_5 | {
    "hidden_size": 512,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
"""With heads of the sizes of published models, whose pages of keys are no power of two."""
NEMOTRON_H = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention", "mlp"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "mamba_num_heads": 4,
    "mamba_head_dim": 64,
    "ssm_state_size": 64,
    "n_groups": 2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
GRANITE_4_H = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "shared_intermediate_size": 384,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "position_embedding_type": None,
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 1,
    "mamba_expand": 1,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "embedding_multiplier": 4.0,
    "attention_multiplier": 0.0625,
    "residual_multiplier": 0.5,
    "logits_scaling": 2.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
FALCON_H1 = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "mamba_d_ssm": 256,
    "mamba_n_heads": 4,
    "mamba_d_head": 64,
    "mamba_d_state": 64,
    "mamba_n_groups": 2,
    "mamba_rms_norm": False,
    "mamba_norm_before_gate": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e11},
    "embedding_multiplier": 4.0,
    "lm_head_multiplier": 0.5,
    "key_multiplier": 0.5,
    "mlp_multipliers": [0.75, 0.5],
    "attention_in_multiplier": 0.75,
    "attention_out_multiplier": 0.9375,
    "ssm_in_multiplier": 1.25,
    "ssm_out_multiplier": 0.5,
    "ssm_multipliers": [0.5, 0.75, 0.5, 1.5, 0.625],
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ON_GPU = torch.cuda.is_available()
needs_two, needs_four = (
    pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < count, reason=f"needs {count} GPUs") for count in (2, 4)
)
WORKERS = [pytest.param(2, marks=needs_two), pytest.param(4, marks=needs_four)]
BY_WORKERS = pytest.mark.parametrize("workers", WORKERS)
BY_ANY = pytest.mark.parametrize("workers", [1, *WORKERS])


def by_any_that_draft(beside: str) -> pytest.MarkDecorator:
    """One worker and several; on a CPU those that may draft beside a prefix cache and layers of a kind."""
    ran = reviews.ran().drafting_workers[beside]["cpu"]
    several = [
        pytest.param(count, marks=[*one.marks, pytest.mark.skipif(not ON_GPU and count not in ran, reason="refused")])
        for one in WORKERS
        for count in one.values
    ]
    return pytest.mark.parametrize("workers", [1, *several])


by_first_runner = pytest.mark.skipif(
    ON_GPU, reason="refused there: a drafter of the test's needs the first model runner"
)
needs_two_gpus = pytest.mark.skipif(not ON_GPU or torch.cuda.device_count() < 2, reason="needs 2 GPUs")
IN_GRAPHS: dict[str, Any] = {"enforce_eager": False, "max_num_seqs": 8} if ON_GPU else {}
"""Settings of an engine whose steps are CUDA graphs: vLLM wants a page for each request of the largest graph."""
IN_ENGINE = "tests.engine.states"
VOCABULARY = range(3, 500)
LIMITS = {"max_model_len": 512, "max_num_seqs": 24, "skip_tokenizer_init": True} | OF_DEVICE | EAGER_ON_GPU
TARGETS = [
    request(tokens(300, 1, VOCABULARY), max_tokens=6, logprobs=5),
    request(tokens(70, 2, VOCABULARY), max_tokens=12, temperature=1.0, seed=7, logprobs=2, prompt_logprobs=2),
]
SAME = ("among others", "warm", "in pages of NaN", "among others in pages of NaN", "no fault")


def written(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """Random weights in bf16. Gates are near 1, so that a token reads states of long ago: with others a model shows no
    difference that its states have.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(0, 0.3 if "conv1d" in name else 0.08, generator=generator)
            elif name.endswith("A_log"):
                weight.uniform_(0.002, 0.05, generator=generator).log_()
            elif name.endswith("dt_bias"):
                weight.zero_()
    model.bfloat16().save_pretrained(folder)
    return folder


def others(length: int) -> list[dict[str, Any]]:
    """Requests beside the targets, the first ones with prompts of a length, a few tokens below that of a page of keys:
    they need one page more than they begin with.
    """
    first = [request(tokens(length, 100 + number, VOCABULARY), max_tokens=16) for number in range(8)]
    return first + concurrent_requests(5, 3, vocabulary=VOCABULARY)


def seen(answers: list[dict[str, Any]]) -> list[Any]:
    """Tokens, logprobs and candidates of the targets, which come last."""
    return [[one["completions"], one["prompt_logprobs"]] for one in answers[-len(TARGETS) :]]


def alone(engine: Engine, name: str = "alone") -> list[Any]:
    return seen([engine.step(f"{name} {number}", [one], True).requests[0] for number, one in enumerate(TARGETS)])


def decode_again(engine: Engine, answers: list[Any]) -> list[Any]:
    """What the tokens of the first target's answer get at the end of a prompt."""
    whole = request(TARGETS[0]["prompt"] + answers[0][0][0]["tokens"], max_tokens=1, prompt_logprobs=5)
    return engine.step("whole", [whole], True).requests[0]["prompt_logprobs"]


def ask_briefly(engine: Engine) -> dict[str, Any]:
    """The least of :func:`ask`."""
    found = {"alone": alone(engine)}
    few = concurrent_requests(4, 3, vocabulary=VOCABULARY)
    found["among others"] = seen(engine.step("among others", [*few, *TARGETS], True).requests)
    return found | {"decoded": decode_again(engine, found["alone"])}


def everywhere(engine: Engine, company: list[dict[str, Any]], poison: str) -> dict[str, Any]:
    """Answers of the targets alone, in company, from the prefix cache and in pages of NaN, and what shows that they
    were there.

    Args:
        poison: the function of :mod:`.states` that fills pages.
    """
    found = {"alone": alone(engine)}
    among = engine.step("among others", [*company, *TARGETS], True)
    found |= {"among others": seen(among.requests), "preemptions": among.preemptions}
    warm = engine.step("warm", TARGETS)
    found |= {"warm": seen(warm.requests), "cached": [one["cached"] for one in warm.requests]}
    found["poisoned"] = engine.call(f"{IN_ENGINE}:{poison}")
    found["in pages of NaN"] = alone(engine, "poisoned")
    engine.call(f"{IN_ENGINE}:{poison}")
    found["among others in pages of NaN"] = seen(engine.step("poisoned", [*company, *TARGETS], True).requests)
    return found | {"decoded": decode_again(engine, found["alone"])}


def at_edges(engine: Engine, lengths: Sequence[int]) -> tuple[list[Any], list[Any]]:
    """Answers to prompts of these lengths, one after the other and all together."""
    asked = [request(tokens(length, 50, VOCABULARY), max_tokens=3, logprobs=1, prompt_logprobs=1) for length in lengths]
    alone = [engine.step(f"edge {number}", [one], True).requests[0] for number, one in enumerate(asked)]
    together = engine.step("edges", asked, True).requests
    seen = ([[one["completions"], one["prompt_logprobs"]] for one in found] for found in (alone, together))
    return next(seen), next(seen)


def everywhere_and_with_faults(
    engine: Engine, company: list[dict[str, Any]], edges: Sequence[int], plant: str, faults: Sequence[str]
) -> dict[str, Any]:
    """As :func:`everywhere`, with pages of NaN in caches of keys, and :func:`at_edges`; and answers in company with
    each of these faults, and at last without.

    Args:
        plant: the function that has an engine compute with a fault, and called again without.
    """
    found = everywhere(engine, company, "poison_keys")
    found["edges"] = at_edges(engine, edges)
    for fault in faults:
        engine.call(plant, fault)
        found[fault] = seen(engine.step(fault, [*company, *TARGETS], True).requests)
        engine.call(plant, fault)
    found["no fault"] = alone(engine, "no fault")
    return found


def replaced(engine: Engine, folders: Sequence[str], ways: Sequence[str]) -> dict[tuple[str, str], Any]:
    """Answers of the targets after each way of :mod:`.reloads` to replace weights by those of each folder."""
    answers = {}
    for way in ways:
        for folder in folders:
            engine.call(f"tests.engine.reloads:{way}", folder)
            answers[way, folder] = alone(engine, f"{way} {folder}")
    return answers


def ask(engine: Engine, of: Sequence[str], length: int) -> dict[str, Any]:
    """Answers of the targets in every company, and what shows that they were in it.

    Args:
        of: classes of states that are told faults.
        length: of the prompts of :func:`others`.
    """
    found = everywhere(engine, others(length), "poison")
    for kind in of:
        for fault in FAULTS[kind]:
            engine.call(f"{IN_ENGINE}:plant", fault, kind)
            found[f"{fault}: {kind}"] = seen(engine.step(f"{fault}: {kind}", TARGETS, True).requests)
    engine.call(f"{IN_ENGINE}:plant", "")
    found["no fault"] = alone(engine, "no fault")
    return found


def started(
    checkpoint: Path,
    afterwards: Callable[[Engine], Any],
    flag: str = "1",
    path: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    **more: object,
) -> Any:
    """What ``afterwards`` finds of an engine of its own, with more folders on its ``path`` and more ``variables``."""
    environment = {"PYTHONPATH": os.pathsep.join([*path, PATHS]), **variables}
    return run({"model": str(checkpoint), **LIMITS, **more}, [], flag, afterwards=afterwards, **environment).afterwards


def check_company(found: dict[str, Any]) -> None:
    """Of what :func:`ask` finds: a request had the same bits in any company, at any cut and in any page."""
    assert found["preemptions"] > 0
    assert found["poisoned"] > 0
    assert found["cached"][0] >= 256
    assert [name for name in SAME if found[name] != found["alone"]] == []


def with_one_scale(
    engine: Engine, company: list[dict[str, Any]], fault: str = "one_scale_a_step"
) -> tuple[list[Any], list[Any]]:
    """Answers of the targets alone and in a company, of an engine that from here on quantises all rows of a step by one
    scale, or those of experts alone.
    """
    engine.call(f"tests.engine.quantisers:{fault}")
    among = engine.step("one scale among others", [*company, *TARGETS], True)
    return alone(engine, "one scale"), seen(among.requests)


def decodes_as_it_prefills(found: dict[str, Any]) -> bool:
    """Whether the logprobs of decoded tokens have the bits of the same tokens' at the end of a prompt."""
    made = found["alone"][0][0][0]["logprobs"]
    rows = found["decoded"][len(TARGETS[0]["prompt"]) :]
    return made == [row[: len(of)] for row, of in zip(rows, made, strict=True)]


def distance_from_float64(
    checkpoint: Path, answers: list[Any], prepare: Callable[[torch.nn.Module], object] = lambda _: None
) -> float:
    """The largest of listed logprobs of a prompt of 70 tokens from those of Transformers' model in float64, which
    ``prepare`` may change.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    prepare(model)
    return distance_from(model, answers)


def distance_from(model: torch.nn.Module, answers: list[Any]) -> float:
    """The same of any model."""
    prompt, listed = TARGETS[1]["prompt"], answers[1][1]
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    rows = zip(expected, listed[1:], strict=False)
    return max(abs(float.fromhex(value) - row[token].item()) for row, of in rows for token, value, _ in of)


def in_company(engine: Engine, length: int) -> tuple[Any, Any]:
    """The first target by itself, and among others: for plain vLLM, which has no seeds for a request beside others on a
    CPU.
    """
    beside = [*others(length)[:8], TARGETS[0]]
    steps = engine.step("alone", TARGETS[:1], True), engine.step("among others", beside, True)
    by_itself, among = (step.requests[-1]["completions"] for step in steps)
    return by_itself, among


def drafted_requests() -> list[dict[str, Any]]:
    """Requests whose first tokens say of which kind their drafts are, with prompts and answers over ends of chunks."""
    made = []
    for number, length in enumerate((1, 7, 14, 16, 30, 47, 130, 250)):
        for kind in range(len(KINDS)):
            prompt = [len(KINDS) * (10 + number) + kind, *tokens(length, 50 * number + kind, VOCABULARY)]
            seeded = {"temperature": 1.0, "seed": number} if (number + kind) % 2 else {}
            made.append(request(prompt, max_tokens=40, logprobs=2, **seeded))
    return made


KNOWN_ANSWERS = {"method": "custom_class", "model": "tests.engine.drafters.Drafter"}
"""A method of drafting that knows the answers."""
REPEATING = [request(tokens(5, 900 + number, VOCABULARY) * 8, max_tokens=150) for number in range(4)]
"""n-grams find drafts in them."""


def with_any_drafts(
    started: Callable[..., Any],
    checkpoint: Path,
    folder: Path,
    fault: str,
    settings: Mapping[str, Any],
    variables: Mapping[str, str] = MappingProxyType({}),
    **of_drafting: Any,
) -> dict[str, Any]:
    """Answers to :func:`drafted_requests` without drafts, and by a drafter that knows the answers and gives them,
    others, or none; and with a fault.

    Args:
        started: gives what an engine answers.
        folder: for the drafter.
        fault: the function of :mod:`.states` that plants it, if any.
        settings: of both engines.
        variables: of both.
        of_drafting: what the engine with drafts is given beside them; workers get their cores.
    """
    undrafted = started(checkpoint, afterwards=_plainly, variables=variables, **settings)
    known = zip(drafted_requests(), undrafted, strict=True)
    answers = folder / "answers.json"
    answers.write_text(json.dumps([asked["prompt"] + answer["completions"][0]["tokens"] for asked, answer in known]))

    def ask(engine: Engine) -> dict[str, Any]:
        together = engine.step("together", drafted_requests())
        found = {"together": together.requests, "preemptions": together.preemptions}
        found["counts"] = engine.call("tests.engine.drafters:counts")
        if fault:
            engine.call(f"{IN_ENGINE}:{fault}")
            found["fault"] = engine.step("fault", drafted_requests()).requests
        return found

    drafts = json.dumps(KNOWN_ANSWERS | {"num_speculative_tokens": 5})
    workers = of_drafting.get("tensor_parallel_size", 1)
    variables = {ANSWERS: str(answers), **variables} | (cores_of(workers) if workers > 1 else {})
    found = started(
        checkpoint, afterwards=ask, speculative_config=drafts, variables=variables, **settings, **of_drafting
    )
    return found | {"undrafted": undrafted}


def _plainly(engine: Engine) -> list[dict[str, Any]]:
    return engine.step("plain", drafted_requests()).requests


def check_drafts(found: dict[str, Any]) -> None:
    """Of what :func:`with_any_drafts` finds: answers are those of plain decoding, and a fault shows."""
    assert differing_answers(found["together"], found["undrafted"]) == []
    assert 0 < found["counts"]["accepted"] < found["counts"]["drafts"]
    assert "fault" not in found or differing_answers(found["fault"], found["undrafted"])


def with_drafts(
    started: Callable[..., Any],
    checkpoint: Path,
    drafts: Mapping[str, Any],
    asked: list[dict[str, Any]],
    settings: Mapping[str, Any],
    fault: str = "",
    **of_drafting: Any,
) -> tuple[Any, ...]:
    """Which answers are others with three drafts by a method, what became of these, and which are others with a fault.

    Args:
        started: gives what an engine answers.
        drafts: the method, as vLLM's configuration names it.
        asked: the requests.
        settings: of both engines.
        fault: the function of :mod:`.states` that plants it, if any.
        of_drafting: what the engine with drafts is given beside them.
    """

    def plain(engine: Engine) -> list[dict[str, Any]]:
        return engine.step("plain", asked).requests

    def drafted(engine: Engine) -> tuple[Any, ...]:
        found = engine.step("drafted", asked).requests, engine.call("tests.engine.drafters:counts")
        if not fault:
            return found
        engine.call(f"{IN_ENGINE}:{fault}")
        return *found, engine.step("fault", asked).requests

    config = json.dumps({**drafts, "num_speculative_tokens": 3})
    answers, counted, *faulty = started(
        checkpoint, afterwards=drafted, speculative_config=config, **{**settings, **of_drafting}
    )
    expected = started(checkpoint, afterwards=plain, **settings)
    return differing_answers(answers, expected), counted, *(differing_answers(one, expected) for one in faulty)


def cores_of(workers: int) -> dict[str, str]:
    """The variable that gives each worker of a CPU one of two cores."""
    return {} if ON_GPU else {CORES: "|".join(str(rank % 2) for rank in range(workers))}


def shared_by(workers: int) -> dict[str, Any]:
    """Settings and variables of engines of so many workers."""
    cores = cores_of(workers) if workers > 1 else {}
    return {"tensor_parallel_size": workers, "variables": UNTRIED_THERE | cores}


def check_workers(
    started: Callable[..., Any],
    checkpoint: Path,
    length: int,
    settings: Mapping[str, Any],
    variables: Mapping[str, str] = MappingProxyType({}),
    workers: int = 2,
    **of_trees: Any,
) -> None:
    """Workers have the bits of one by a tree, which is another order of sums than one has without it; so do two where
    there are more.

    Args:
        started: gives what an engine answers.
        length: as of :func:`ask`.
        settings: of all engines.
        variables: of those with a tree.
        workers: their number, and that of the tree's slices.
        of_trees: further settings of engines with a tree.
    """
    asked, tree = partial(ask, of=(), length=length), {**variables, TP_TREE.name: str(workers)}
    one = started(checkpoint, afterwards=asked, variables=tree, **settings, **of_trees)
    shared = {**settings, **of_trees, "tensor_parallel_size": workers}
    several = started(checkpoint, afterwards=asked, variables=tree | cores_of(workers), **shared)
    assert several["preemptions"] > 0
    assert [name for name in SAME if several[name] != one["alone"]] == []
    assert decodes_as_it_prefills(several)
    if workers > 2:
        two = started(
            checkpoint, afterwards=alone, variables=tree | cores_of(2), **shared | {"tensor_parallel_size": 2}
        )
        assert two == one["alone"]
    assert started(checkpoint, afterwards=alone, **settings) != one["alone"]


def check_workers_without_a_tree(
    started: Callable[..., Any],
    checkpoint: Path,
    settings: Mapping[str, Any],
    variables: Mapping[str, str] = MappingProxyType({}),
    workers: int = 2,
) -> None:
    """A request has the same bits in any company, and other bits than one worker gives it.

    Args:
        started: gives what an engine answers.
        settings: of all engines.
        variables: of several workers.
        workers: their number.
    """
    shared = {**settings, "tensor_parallel_size": workers}
    variables = {**variables, **cores_of(workers)}
    several = started(checkpoint, afterwards=ask_briefly, variables=variables, **shared)
    assert several["among others"] == several["alone"]
    assert decodes_as_it_prefills(several)
    assert started(checkpoint, afterwards=alone, **settings) != several["alone"]


KEEPS_ALL = {"prefix_cache_retention_interval": None}
"""vLLM keeps states at the ends of prompts and of what they share alone, unless it is told."""


def over_pages(page: int, lengths: Sequence[int]) -> list[dict[str, Any]]:
    """Requests whose answers go over the ends of pages, with drafts of every kind; those of a kind begin alike.

    Args:
        page: tokens of one.
        lengths: tokens that each prompt lacks of two pages.
    """
    made = []
    for kind in range(len(KINDS)):
        begin = [len(KINDS) * 10 + kind, *tokens(2 * page, 60 + kind, VOCABULARY)]
        for number, less in enumerate(lengths):
            own = tokens(less % 7, 70 + number, VOCABULARY)
            prompt = [*begin[: 2 * page - less - len(own)], *own]
            seeded = {"temperature": 1.0, "seed": number} if (number + kind) % 2 else {}
            made.append(request(prompt, max_tokens=28, logprobs=2, **seeded))
    return made


def going_on(asked: Sequence[dict[str, Any]], answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests whose prompts are others' with most of their answers."""
    made = enumerate(zip(asked, answers, strict=True))
    return [
        {**one, "prompt": one["prompt"] + of["completions"][0]["tokens"][: 27 - 2 * (number % 3)]}
        for number, (one, of) in made
    ]


def in_kept_pages(
    started: Callable[..., Any],
    checkpoint: Path,
    folder: Path,
    page: int,
    ways: Sequence[Mapping[str, Any]],
    drafts: Mapping[str, Any] = KNOWN_ANSWERS,
    **settings: Any,
) -> list[dict[str, Any]]:
    """Answers to :func:`over_pages` and then to :func:`going_on` without drafts and without a prefix cache, and by
    engines with both; and by the first of these where pages are left as they were before the verify steps that have
    filled them.

    Args:
        started: gives what an engine answers.
        folder: for the drafter.
        page: tokens of one, which keep a state behind each.
        ways: settings of each engine with drafts.
        drafts: their method, as vLLM's configuration names it.
        settings: of all engines.
    """
    first = over_pages(page, (1, 3, 6, 14))
    config = json.dumps({**drafts, "num_speculative_tokens": 5})
    answers = folder / "answers.json"

    def ask(engine: Engine, expected: list[Any] | None = None, plants: bool = False) -> dict[str, Any]:
        begun = engine.step("first", first)
        longer = going_on(first, (expected or begun.requests)[: len(first)])
        steps = begun, engine.step("going on", longer)
        found: dict[str, Any] = {"answers": [one for step in steps for one in step.requests]}
        if expected is None:
            known = zip([*first, *longer], found["answers"], strict=True)
            answers.write_text(json.dumps([one["prompt"] + of["completions"][0]["tokens"] for one, of in known]))
            return found
        found["preemptions"] = sum(step.preemptions for step in steps)
        found["counts"] = engine.call("tests.engine.drafters:counts")
        cached = zip(first, steps[1].requests, strict=True)
        found["in answers"] = sum(one["cached"] > len(of["prompt"]) for of, one in cached)
        found["expected"] = expected
        if plants:
            engine.call(f"{IN_ENGINE}:leave_full_pages")
            left = engine.step("left", first), engine.step("going on from what was left", longer)
            found["left"] = [one for step in left for one in step.requests]
        return found

    settings["max_model_len"] = 4 * page
    expected = started(checkpoint, afterwards=ask, enable_prefix_caching=False, **settings)["answers"]
    settings |= {"speculative_config": config, "block_size": page, **KEEPS_ALL}
    settings["variables"] = {ANSWERS: str(answers), **settings.get("variables", {})}
    return [
        started(checkpoint, afterwards=partial(ask, expected=expected, plants=not number), **settings | way)
        for number, way in enumerate(ways)
    ]


WAYS_TO_KEEP_PAGES = (
    {"max_num_batched_tokens": 61},
    {"max_num_batched_tokens": 37, "num_gpu_blocks_override": 24},
    {"max_num_seqs": 1},
)
"""The second with so few pages that some requests are preempted, and pages are recycled."""


def check_kept_pages(found: Sequence[dict[str, Any]]) -> None:
    """Of what :func:`in_kept_pages` finds with :data:`WAYS_TO_KEEP_PAGES`: answers are those of plain decoding, also
    from pages that a verify step has filled in the middle of an answer, and pages that were left as they were show.
    """
    for one in found:
        assert differing_answers(one["answers"], one["expected"]) == []
        assert 0 < one["counts"]["accepted"] < one["counts"]["drafts"]
    assert found[0]["in answers"] > 0
    assert any(one["preemptions"] > 0 for one in found) or len(found) == 1
    assert differing_answers(found[0]["left"], found[0]["expected"])

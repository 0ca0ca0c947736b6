"""LFM2, whose short convolutions keep a state: a request has the same bits alone and among others, from chunks of any
size, after a preemption, from the prefix cache, and in a page that another has left.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.convolutions import CONFIG, FAULTS
from tests.engine.engines import EAGER_ON_GPU, OF_DEVICE, concurrent_requests, request, run, tokens
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.worker import Engine

ON_GPU = torch.cuda.is_available()
COVERED = reviews.ran().short_convolutions["cuda" if ON_GPU else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
IN_ENGINE = "tests.engine.convolutions"
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128, "num_dense_layers": 1}
NEAR = 0.25
"""Of logprobs in bf16."""
VOCABULARY = range(3, 500)
LIMITS = {"max_model_len": 512, "max_num_seqs": 24, "skip_tokenizer_init": True} | OF_DEVICE | EAGER_ON_GPU
DEFAULT = {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 28}
"""With so few pages some requests are preempted."""
UNCACHED = {
    "enable_prefix_caching": False, "max_num_seqs": 16, "max_num_batched_tokens": 61, "num_gpu_blocks_override": 20,
}  # fmt: skip
"""A request then has one state, and a prompt is cut anywhere, not also at the ends of pages."""
TARGETS = [
    request(tokens(300, 1, VOCABULARY), max_tokens=6, logprobs=5),
    request(tokens(70, 2, VOCABULARY), max_tokens=12, temperature=1.0, seed=7, logprobs=2, prompt_logprobs=2),
]
OTHERS = [request(tokens(118, 100 + number, VOCABULARY), max_tokens=16) for number in range(8)]
OTHERS += concurrent_requests(5, 3, vocabulary=VOCABULARY)
"""The first ones need one page of keys more than they begin with."""


def written(model: transformers.PreTrainedModel, folder: Path) -> Path:
    """Random weights in bf16, with taps that matter as much as what goes around them. vLLM ties the embeddings of every
    LFM2: they are small, so that a token does not foretell itself, and the last norm makes up for that.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                size = 0.4 if ".conv.conv." in name else 0.02 if "embed_tokens" in name else 0.08
                weight.normal_(0, size, generator=generator)
        for name, bias in model.named_buffers():
            if name.endswith("expert_bias"):
                bias.normal_(0, 0.2, generator=generator)
        model.model.embedding_norm.weight.fill_(8.0)
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = transformers.Lfm2ForCausalLM(transformers.Lfm2Config(**CONFIG))
    return written(model, tmp_path_factory.mktemp("lfm2"))


def seen(answers: list[dict[str, Any]]) -> list[Any]:
    """Tokens, logprobs and candidates of the targets, which come last."""
    return [[one["completions"], one["prompt_logprobs"]] for one in answers[-len(TARGETS) :]]


def alone(engine: Engine, name: str = "alone") -> list[Any]:
    return seen([engine.step(f"{name} {number}", [one], True).requests[0] for number, one in enumerate(TARGETS)])


def ask(engine: Engine) -> dict[str, Any]:
    """Answers of the targets in every company, and what shows that they were in it."""
    found = {"alone": alone(engine)}
    among = engine.step("among others", [*OTHERS, *TARGETS], True)
    found |= {"among others": seen(among.requests), "preemptions": among.preemptions}
    warm = engine.step("warm", TARGETS)
    found |= {"warm": seen(warm.requests), "cached": [one["cached"] for one in warm.requests]}
    found["pages"] = engine.call(f"{IN_ENGINE}:poison")
    found["in pages of NaN"] = alone(engine, "poisoned")
    engine.call(f"{IN_ENGINE}:poison")
    found["among others in pages of NaN"] = seen(engine.step("poisoned", [*OTHERS, *TARGETS], True).requests)
    [tokens_too, *_] = [one["completions"][0]["tokens"] for one in among.requests[-len(TARGETS) :]]
    whole = request(TARGETS[0]["prompt"] + tokens_too, max_tokens=1, prompt_logprobs=5)
    found["decoded"] = engine.step("whole", [whole], True).requests[0]["prompt_logprobs"]
    for fault in FAULTS:
        engine.call(f"{IN_ENGINE}:plant", fault)
        found[fault] = seen(engine.step(fault, TARGETS, True).requests)
    engine.call(f"{IN_ENGINE}:plant", "")
    found["no fault"] = alone(engine, "no fault")
    return found


def started(checkpoint: Path, afterwards: Callable[[Engine], Any] = ask, flag: str = "1", **more: object) -> Any:
    return run({"model": str(checkpoint), **LIMITS, **more}, [], flag, afterwards=afterwards).afterwards


@pytest.fixture(scope="module")
def found(checkpoint: Path) -> dict[str, Any]:
    """As vLLM starts: with a prefix cache."""
    return started(checkpoint, **DEFAULT)


SAME = ("among others", "warm", "in pages of NaN", "among others in pages of NaN", "no fault")


def test_a_request_has_the_same_bits_in_any_company_at_any_cut_and_in_any_page(found: dict[str, Any]) -> None:
    assert found["preemptions"] > 0
    assert found["pages"] > 0
    assert found["cached"][0] >= 256
    assert [name for name in SAME if found[name] != found["alone"]] == []


def test_logprobs_of_decode_are_those_of_prefill(found: dict[str, Any]) -> None:
    """Bits of the decoded tokens' logprobs, and those of the same tokens at the end of a prompt."""
    made = found["alone"][0][0][0]
    assert made["logprobs"] == [
        row[: len(of)] for row, of in zip(found["decoded"][300:], made["logprobs"], strict=True)
    ]


def distance_from_float64(checkpoint: Path, answers: list[Any]) -> float:
    """The largest of listed logprobs of a prompt of 70 tokens from those of Transformers' model in float64."""
    prompt, listed = TARGETS[1]["prompt"], answers[1][1]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    with torch.no_grad():
        expected = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
    rows = zip(expected, listed[1:], strict=False)
    return max(abs(float.fromhex(value) - row[token].item()) for row, of in rows for token, value, _ in of)


def test_logprobs_are_near_those_of_transformers_in_float64(found: dict[str, Any], checkpoint: Path) -> None:
    assert distance_from_float64(checkpoint, found["alone"]) < NEAR
    assert distance_from_float64(checkpoint, found["a chunk begins anew"]) > 10 * NEAR


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_states_shows(found: dict[str, Any], fault: str) -> None:
    assert found[fault] != found["alone"]


@pytest.mark.exhaustive
def test_without_a_prefix_cache_the_bits_are_the_same(found: dict[str, Any], checkpoint: Path) -> None:
    uncached = started(checkpoint, **UNCACHED)
    assert uncached["preemptions"] > 0 or ON_GPU  # where a page holds a request whole
    assert [name for name in SAME if uncached[name] != found["alone"]] == []


@pytest.mark.skipif(not ON_GPU, reason="a CPU has no graphs")
@pytest.mark.parametrize("settings", [DEFAULT, UNCACHED], ids=["prefix cache", "no prefix cache"])
def test_steps_of_decode_in_cuda_graphs_have_the_same_bits(
    found: dict[str, Any], checkpoint: Path, settings: dict[str, Any]
) -> None:
    replayed = started(checkpoint, **settings | {"enforce_eager": False})
    assert [name for name in SAME if replayed[name] != found["alone"]] == []


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_other_dtypes_keep_their_bits(checkpoint: Path, dtype: str) -> None:
    other = started(checkpoint, dtype=dtype, **UNCACHED)
    assert [name for name in SAME if other[name] != other["alone"]] == []
    assert distance_from_float64(checkpoint, other["alone"]) < (1e-4 if dtype == "float32" else NEAR / 4)


@pytest.mark.exhaustive
def test_experts_beside_short_convolutions_keep_their_bits(tmp_path: Path) -> None:
    """LFM2-MoE."""
    model = transformers.Lfm2MoeForCausalLM(transformers.Lfm2MoeConfig(**CONFIG, **EXPERTS))
    folder = written(model, tmp_path)
    kept = started(folder, dtype="float32", **DEFAULT)
    assert kept["preemptions"] > 0
    assert [name for name in SAME if kept[name] != kept["alone"]] == []
    assert distance_from_float64(folder, kept["alone"]) < 1e-4


@pytest.mark.exhaustive
@pytest.mark.skipif(ON_GPU, reason="on a GPU this model is too small for plain vLLM to vary")
def test_plain_vllm_fails_the_same_comparison(checkpoint: Path) -> None:
    """Where its rotary embedding on a CPU is wrong as well. It has no seeds for a request beside others on a CPU."""

    def asked(engine: Engine) -> Any:
        steps = engine.step("alone", TARGETS[:1], True), engine.step("among others", [*OTHERS[:8], TARGETS[0]], True)
        return [step.requests[-1]["completions"] for step in steps]

    by_itself, among = started(checkpoint, asked, "0", enforce_eager=True, **UNCACHED)
    assert by_itself != among

"""An engine of FP8 weights and activations gives a request the same tokens and logprobs with any others, in chunks and
from a warm prefix cache; and when weights are replaced, those of an engine that was started with them.
"""

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from scripts.parity import Gap, of_trainer, plain_logprobs, rollout
from tests.engine.bisected import FP8_FAULTS
from tests.engine.engines import EAGER_ON_GPU, OF_DEVICE, UNTRIED_THERE, concurrent_requests, request, run, tokens
from tests.fp8_checkpoints import FORMS, write
from vllm_batch_invariant.envs import TP_TREE
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.hf import check_engine, engine_weights, patch
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.bisect.recording import MODULE_OUTPUT
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not patch_points.LINEAR_CHOICE.is_there(), reason="refused with this vLLM"),
]

ON_GPU = torch.cuda.is_available()
RELOADS = "tests.engine.reloads"
WAYS = ("by_reload_weights", "by_transfer", "by_buckets", "by_name", "by_hand")
BLOCKS = "fp8 by blocks"
SHAPE = Shape(hidden=256, intermediate=512, layers=2, head_size=128, vocab=1024, max_length=512, dtype="bfloat16")
ROWS_THEMSELVES = "fp8 by tensors", "compressed-tensors by rows", "compressed-tensors by tensors", "ModelOpt's by rows"
"""Forms whose activations have a scale a token."""
VOCABULARY = range(3, 900)
TARGET = request(tokens(150, 1, VOCABULARY), max_tokens=8)
OF_TRAINER = (1, 45, 130)
"""Lengths of prompts of a rollout for a trainer."""
TOKENS = 6
CHUNK = 64
LIMITS = {"max_model_len": 512, "max_num_seqs": 24, "skip_tokenizer_init": True, **OF_DEVICE}
IN_PARTS = {"worker_extension_cls": f"{RELOADS}.Extension", "weight_transfer_config": '{"backend": "files"}'}
SLEEPS = {"enable_sleep_mode": True} if ON_GPU else {}
Answers = dict[str, list[Any]]


class Checkpoints:
    """Folders, written when they are asked for."""

    def __init__(self, root: Path, shape: Shape = SHAPE) -> None:
        self._root, self._shape = root, shape

    def of(self, name: str, seed: int = 0) -> str:
        """Of a form, or "plain": the weights in 16 bits that are then quantised."""
        folder = self._root / f"{name} {seed}".replace(" ", "-")
        source = self._root / f"source-{seed}"
        if not source.exists():
            make_checkpoint(source, self._shape, seed)
        if not folder.exists() and name != "plain":
            write(source, folder, FORMS[name])
        elif not folder.exists():
            shutil.copytree(source, folder)
            file = folder / "model.safetensors"
            weights = enumerate(load_file(source / file.name).items())  # read from elsewhere: tensors are views of it
            made = {
                name: of * (1 + number % 3) if name.endswith("_proj.weight") else of for number, (name, of) in weights
            }
            save_file(made, file, metadata={"format": "pt"})
        return str(folder)


def ask(engine: Engine, name: str) -> list[Any]:
    """The answers of a request alone, with a warm prefix cache, and among others."""
    batches = [[TARGET], [TARGET], [*concurrent_requests(17, 3, vocabulary=VOCABULARY), TARGET]]
    return [
        engine.step(f"{name} {number}", batch, reset_prefix_cache=number == 2).requests[-1]["completions"]
        for number, batch in enumerate(batches)
    ]


def asked_of(
    model: str,
    calls: dict[str, tuple[Any, ...]],
    more: dict[str, Any],
    fault: str = "one_scale_a_step",
    **environment: str,
) -> Answers:
    """What an engine answers when it has started, and a request alone after each call of a function of ``reloads``;
    and, as "one scale", when a fault of ``quantisers`` is planted.
    """

    def asked(engine: Engine) -> Answers:
        found = {"fresh": ask(engine, "fresh")}
        found["rollout"] = rollout(engine, (tokens(length, 2, VOCABULARY) for length in OF_TRAINER), TOKENS)
        found["declared"] = engine.call("tests.engine.engines:declared")
        for name, (function, *arguments) in calls.items():
            engine.call(f"{RELOADS}:{function}", *arguments)
            found[name] = [engine.step(name, [TARGET]).requests[0]["completions"]]
        engine.call(f"tests.engine.quantisers:{fault}")
        return found | {"one scale": ask(engine, "one scale")}

    engine = {"model": model, **LIMITS, **IN_PARTS, **SLEEPS, **more}
    return run(engine, [], "1", afterwards=asked, **environment).afterwards


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("fp8"))


@pytest.fixture(scope="module")
def engines(checkpoints: Checkpoints) -> tuple[Answers, Answers]:
    """An engine of a checkpoint in blocks, which prefills in chunks and whose weights are replaced; and one that was
    started with the other weights in 16 bits, quantises them while it loads them, and has the first ones afterwards.
    """
    first, other, plain = checkpoints.of(BLOCKS), checkpoints.of(BLOCKS, 1), checkpoints.of("plain")
    calls: dict[str, tuple[Any, ...]] = {}
    for way in WAYS:
        calls |= {f"{way} other": (way, other), f"{way} back": (way, first)}
    if SLEEPS:
        calls["asleep"] = "asleep_while_loading", "sleep_of_engine", other
    back: dict[str, tuple[Any, ...]] = {f"{way} back": (way, plain) for way in ("by_reload_weights", "by_hand")}
    with ThreadPoolExecutor(2) as pool:
        stored = pool.submit(asked_of, first, calls, {"max_num_batched_tokens": CHUNK})
        online = {"quantization": "fp8_per_block", "max_num_batched_tokens": 512}
        made = pool.submit(asked_of, checkpoints.of("plain", 1), back, online)
        return stored.result(), made.result()


def test_a_request_has_the_same_bits_alone_among_others_in_chunks_and_from_the_cache(engines) -> None:
    for answers in engines:
        alone, warm, among_others = answers["fresh"]
        assert alone == warm == among_others


@pytest.mark.parametrize("way", WAYS)
def test_codes_and_scales_that_come_again_serve(engines: tuple[Answers, Answers], way: str) -> None:
    """As those of the other engine do, which was started with them and prefills a prompt at once."""
    stored, made = engines
    assert stored[f"{way} other"][0] == made["fresh"][0] != stored["fresh"][0]
    assert stored[f"{way} back"][0] == stored["fresh"][0]


@pytest.mark.parametrize("way", ["by_reload_weights", "by_hand"])
def test_weights_that_come_again_are_quantised_again(engines: tuple[Answers, Answers], way: str) -> None:
    stored, made = engines
    assert made[f"{way} back"][0] == stored["fresh"][0]


def compare_with_a_trainer(answers: Answers, folder: str, quantization: str) -> torch.nn.Module:
    """A trainer of weights in 16 bits that quantises has an engine's logprobs; one that does not has not, and is told
    so.
    """
    samples, declared = answers["rollout"], answers["declared"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda" if ON_GPU else "cpu").eval()
    assert Gap.of(samples, of_trainer(model, samples, plain_logprobs)).different
    plain = patch(model)
    assert Gap.of(samples, of_trainer(plain, samples)).different
    with pytest.raises(
        NotCovered, match=r"an engine with (quantise \(FP8 by|experts in FP8 ).*patch\(model, quantization="
    ):
        check_engine(plain, declared)
    trainer = patch(plain, quantization)
    check_engine(trainer, declared)
    gap = Gap.of(samples, of_trainer(trainer, samples))
    assert gap.tokens == sum(OF_TRAINER) + len(OF_TRAINER) * (TOKENS - 1)
    assert (gap.different, gap.kl) == (0, 0.0)
    return trainer


def test_a_trainer_that_quantises_has_the_logprobs_of_both_engines(
    engines: tuple[Answers, Answers], checkpoints: Checkpoints
) -> None:
    for seed, answers in enumerate(engines):
        compare_with_a_trainer(answers, checkpoints.of("plain", seed), "fp8_per_block")


@pytest.mark.skipif(ON_GPU, reason="a GPU's vLLM has not been tested on a CPU, where this model is")
def test_a_trainer_makes_the_codes_and_scales_of_a_checkpoint(checkpoints: Checkpoints) -> None:
    """Which is made without the plugin's code, and which engines load by every way above."""
    model = AutoModelForCausalLM.from_pretrained(checkpoints.of("plain"), dtype=torch.bfloat16)
    stored = load_file(Path(checkpoints.of(BLOCKS)) / "model.safetensors")
    made = dict(engine_weights(patch(model, "fp8_per_block")))
    assert made.keys() == stored.keys()
    for name, tensor in made.items():
        assert tensor.dtype == stored[name].dtype
        assert torch.equal(tensor.view(torch.uint8), stored[name].view(torch.uint8)), name


@pytest.mark.exhaustive
@pytest.mark.parametrize("quantization", ["fp8_per_channel", "fp8_per_tensor"])
def test_a_trainer_has_the_logprobs_of_other_engines_that_quantise(checkpoints: Checkpoints, quantization: str) -> None:
    folder = checkpoints.of("plain", 1)
    answers = asked_of(folder, {}, {"quantization": quantization}, **UNTRIED_THERE)
    compare_with_a_trainer(answers, folder, quantization)


@pytest.mark.skipif(not SLEEPS, reason="needs an NVIDIA GPU")
def test_weights_that_come_after_a_sleep_serve(engines: tuple[Answers, Answers]) -> None:
    stored, made = engines
    assert stored["asleep"][0] == made["fresh"][0]


@pytest.mark.skipif(ON_GPU, reason="CUDA graphs keep what they captured")
def test_one_scale_of_all_rows_of_a_step_is_found(engines: tuple[Answers, Answers]) -> None:
    """So the comparisons above see what depends on company."""
    for answers in engines:
        alone, _, among_others = answers["one scale"]
        assert alone != among_others


def test_a_bisection_names_the_layer_in_fp8_that_has_a_fault(checkpoints: Checkpoints) -> None:
    """Of its product, and of its quantising: one scale of all rows of a step."""
    settings = {"model": checkpoints.of(BLOCKS), **LIMITS, **EAGER_ON_GPU}
    bisected = run(settings, [], "1", bisection=("in_fp8", [VOCABULARY.start, VOCABULARY.stop])).bisected
    sound = bisected.pop("no fault")
    assert sound["found"] is None, sound["verdict"]
    assert sound["coverage"]["compared"] > 80
    assert bisected.keys() == FP8_FAULTS.keys()
    for name, (layer, _) in FP8_FAULTS.items():
        found = bisected[name]["found"]
        key = found["divergence"]["key"]
        assert (key["module"], key["operation"], found["output_token"]) == (layer, MODULE_OUTPUT, 0), name
        assert found["repeats"], name


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [name for name in FORMS if name != BLOCKS])
def test_other_forms_have_the_same_bits_too(checkpoints: Checkpoints, name: str) -> None:
    variables = UNTRIED_THERE if name.startswith("ModelOpt") else {}
    answers = asked_of(checkpoints.of(name), {}, {"max_num_batched_tokens": CHUNK}, **variables)
    alone, warm, among_others = answers["fresh"]
    assert alone == warm == among_others


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_drafts_leave_the_bits_of_a_target(
    engines: tuple[Answers, Answers], checkpoints: Checkpoints, drafter: str
) -> None:
    """Also if the drafter has FP8."""
    folder = checkpoints.of(BLOCKS)
    speculation: dict[str, Any] = {"method": drafter, "num_speculative_tokens": 3}
    speculation |= {"prompt_lookup_max": 3} if drafter == "ngram" else {"model": folder}
    found = asked_of(folder, {}, {"speculative_config": json.dumps(speculation), **EAGER_ON_GPU})
    assert found["fresh"] == engines[0]["fresh"]


@pytest.mark.exhaustive
@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs 2 GPUs")
@pytest.mark.parametrize("name", FORMS)
def test_two_workers_leave_a_request_its_bits_and_with_a_tree_have_those_of_one(
    checkpoints: Checkpoints, name: str
) -> None:
    """A row's own scale follows from the part of it that a worker has: there is no tree."""
    folder, of_rows = checkpoints.of(name), name in ROWS_THEMSELVES
    variables = UNTRIED_THERE | ({} if of_rows else {TP_TREE.name: "2"})
    two = asked_of(folder, {}, {"tensor_parallel_size": 2}, VLLM_CPU_OMP_THREADS_BIND="0|1", **variables)
    alone, warm, among_others = two["fresh"]
    assert alone == warm == among_others
    if not of_rows:
        one = asked_of(folder, {}, {}, VLLM_CPU_OMP_THREADS_BIND="0", **variables)
        assert two["fresh"] == one["fresh"]

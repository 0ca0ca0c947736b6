"""An engine of a quantised checkpoint has the bits of an engine of the matrices that it stands for: tokens, logprobs,
listed candidates, alone and among others, and when weights are replaced; a trainer of these matrices has its logprobs.
"""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts.parity import Gap, Sample, of_trainer, plain_logprobs, rollout
from tests.engine.engines import OF_DEVICE, concurrent_requests, request, run, selected, some_exhaustive, tokens
from tests.quantised_checkpoints import FORMATS, write
from vllm_batch_invariant.envs import ARITHMETIC, TP_TREE, UNTRIED
from vllm_batch_invariant.hf import check_engine, patch
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.demo_model import Shape, make_checkpoint
from vllm_batch_invariant.verify.harness.worker import Engine

pytestmark = [
    pytest.mark.engine,
    pytest.mark.skipif(not patch_points.LINEAR_CHOICE.is_there(), reason="refused with this vLLM"),
]

ON_GPU = torch.cuda.is_available()
AT_ONCE = 16 if ON_GPU else 2
"""Engines: on a GPU most of a start is the import of vLLM."""
RELOADS = "tests.engine.reloads"
WAYS = ("by_reload_weights", "by_transfer", "by_buckets", "by_name", "by_hand")
REPLACED = "w4a16 of 32 with zero points"
"""Whose weights are replaced, in each way. Its output head is quantised too. Others repeat what it shows."""
QUICK = (REPLACED,)
CHANGED = f"{REPLACED} changed"
"""The same with something added to an element."""
SHAPE = Shape(intermediate=384, layers=2, vocab=1024, max_length=512, dtype="bfloat16")
VOCABULARY = range(3, 900)
PROMPT = tokens(150, 1, VOCABULARY)
TOKENS = 10
OF_TRAINER = (1, 45, 130)
"""Lengths of prompts of a rollout for a trainer."""
LIMITS = {"max_model_len": 512, "max_num_seqs": 24, "skip_tokenizer_init": True, **OF_DEVICE}
LIMITS |= {"kv_cache_memory_bytes": 1 << 28} if ON_GPU else {}  # so many engines share it
IN_PARTS = {"worker_extension_cls": f"{RELOADS}.Extension", "weight_transfer_config": '{"backend": "files"}'}
SLEEPS = {"enable_sleep_mode": True} if ON_GPU else {}
Answers = dict[str, list[Any]]


class Checkpoints:
    """Folders, written when they are asked for."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def of(self, name: str, seed: int = 0, change: float = 0) -> tuple[str, str]:
        """Of a format: packed, and the matrices; with something added to an element of one."""
        root = self._root / f"{name} {seed} {change}".replace(" ", "-")
        folders = root / "packed", root / "unpacked"
        if not root.exists():
            source = make_checkpoint(root / "source", SHAPE, seed)
            write(source, FORMATS[name], *folders, change=change)
            shutil.rmtree(source)
        return str(folders[0]), str(folders[1])


def ask(engine: Engine, name: str) -> list[Any]:
    """The answers of a request alone, with a warm prefix cache, and among others."""
    target = request(PROMPT, max_tokens=TOKENS)
    batches = [[target], [target], [*concurrent_requests(17, 3, vocabulary=VOCABULARY), target]]
    return [
        engine.step(f"{name} {number}", batch, reset_prefix_cache=number == 2).requests[-1]["completions"]
        for number, batch in enumerate(batches)
    ]


def replacing(calls: dict[str, tuple[Any, ...]]) -> Callable[[Engine], Answers]:
    """Asks an engine first, and after each call of a function of ``reloads``, by a name."""

    def asked(engine: Engine) -> Answers:
        found = {"fresh": ask(engine, "fresh")}
        for name, (function, *arguments) in calls.items():
            engine.call(f"{RELOADS}:{function}", *arguments)
            found[name] = ask(engine, name)
        return found

    return asked


@dataclass(frozen=True)
class Rollout:
    """What an engine samples for a trainer, and says of itself."""

    samples: list[Sample]
    declared: list[dict[str, Any]]

    @classmethod
    def of(cls, engine: Engine) -> "Rollout":
        prompts = (tokens(length, 2, VOCABULARY) for length in OF_TRAINER)
        return cls(rollout(engine, prompts, TOKENS), engine.call("tests.engine.engines:declared"))


class Found:
    """What engines of quantised checkpoints answer, and one of the matrices that these stand for."""

    def __init__(self, checkpoints: Checkpoints, names: list[str], pool: ThreadPoolExecutor) -> None:
        unpacked = {name: ("by_reload_weights", checkpoints.of(name)[1]) for name in names}
        unpacked[CHANGED] = "by_reload_weights", checkpoints.of(REPLACED, 0, 2.0)[1]
        unpacked["other"] = "by_reload_weights", checkpoints.of(REPLACED, 1)[1]
        self._matrices = pool.submit(self._engine, checkpoints.of(names[0])[1], unpacked)
        self._packed = {
            name: pool.submit(
                self._engine,
                checkpoints.of(name)[0],
                self._replaced(checkpoints, name, WAYS if name == REPLACED else WAYS[:1]),
            )
            for name in names
        }

    @staticmethod
    def _replaced(checkpoints: Checkpoints, name: str, ways: tuple[str, ...]) -> dict[str, tuple[Any, ...]]:
        first, other = (checkpoints.of(name, seed)[0] for seed in range(2))
        calls: dict[str, tuple[Any, ...]] = {}
        for way in ways:
            calls |= {f"{way} other": (way, other), f"{way} back": (way, first)}
        if SLEEPS and len(ways) > 1:
            calls["asleep"] = "asleep_while_loading", "sleep_of_engine", other
        return calls

    @staticmethod
    def _engine(model: str, calls: dict[str, tuple[Any, ...]]) -> tuple[Rollout, Answers]:
        asked = replacing(calls)
        settings = {"model": model, **LIMITS, **IN_PARTS, **SLEEPS}
        return run(settings, [], "1", afterwards=lambda engine: (Rollout.of(engine), asked(engine))).afterwards

    def matrices(self, name: str) -> list[Any]:
        """Of the matrices of a format, :data:`CHANGED`, or "other": the second checkpoint of the replaced one."""
        return self._matrices.result()[1][name]

    def packed(self, name: str) -> Answers:
        """Of a quantised checkpoint: "fresh", and after each replacement."""
        return self._packed[name].result()[1]

    def rollout(self, name: str) -> Rollout:
        """Of a quantised checkpoint."""
        return self._packed[name].result()[0]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("quantised"))


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, checkpoints: Checkpoints) -> Iterator[Found]:
    names = list(dict.fromkeys([*selected(request, "name"), REPLACED]))
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield Found(checkpoints, names, pool)


@pytest.mark.parametrize("name", some_exhaustive(FORMATS, QUICK))
def test_a_quantised_engine_has_the_bits_of_its_matrices(found: Found, name: str) -> None:
    alone, warm, among_others = found.packed(name)["fresh"]
    assert alone == warm == among_others
    assert [alone, warm, among_others] == found.matrices(name)


def test_one_element_of_one_matrix_shows(found: Found) -> None:
    """So the comparison above would see a wrong code."""
    assert found.matrices(CHANGED)[0] != found.matrices(REPLACED)[0]


@pytest.mark.parametrize("name", some_exhaustive(FORMATS, (REPLACED,)))
def test_a_trainer_of_the_matrices_has_the_logprobs_of_a_quantised_engine(
    found: Found, checkpoints: Checkpoints, name: str
) -> None:
    rolled = found.rollout(name)
    folder, device = checkpoints.of(name)[1], "cuda" if ON_GPU else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device).eval()
    assert Gap.of(rolled.samples, of_trainer(model, rolled.samples, plain_logprobs)).different
    trainer = patch(model)
    check_engine(trainer, rolled.declared)
    gap = Gap.of(rolled.samples, of_trainer(trainer, rolled.samples))
    assert gap.tokens == sum(OF_TRAINER) + len(OF_TRAINER) * (TOKENS - 1)
    assert (gap.different, gap.kl) == (0, 0.0)
    with torch.no_grad():
        trainer.model.layers[-1].mlp.down_proj.weight[5, 7] += 2.0
    assert Gap.of(rolled.samples, of_trainer(trainer, rolled.samples)).different


@pytest.mark.parametrize("way", WAYS)
def test_packed_weights_that_come_again_are_unpacked_again(found: Found, way: str) -> None:
    answers, other = found.packed(REPLACED), found.matrices("other")
    assert answers[f"{way} other"] == other != answers["fresh"]
    assert answers[f"{way} back"] == answers["fresh"]


@pytest.mark.parametrize("name", some_exhaustive(FORMATS, QUICK))
def test_weights_of_every_format_come_again(found: Found, name: str) -> None:
    answers = found.packed(name)
    assert answers[f"{WAYS[0]} other"] != answers["fresh"] == answers[f"{WAYS[0]} back"]


@pytest.mark.skipif(not SLEEPS, reason="needs an NVIDIA GPU")
def test_packed_weights_that_come_after_a_sleep_are_unpacked(found: Found) -> None:
    assert found.packed(REPLACED)["asleep"] == found.matrices("other")


def _plain(folder: str, more: dict[str, Any], **environment: str) -> list[Any]:
    def asked(engine: Engine) -> list[Any]:
        return ask(engine, "fresh")

    return run({"model": folder, **LIMITS, **more}, [], "1", afterwards=asked, **environment).afterwards


@pytest.mark.exhaustive
@pytest.mark.parametrize("drafter", ["ngram", "draft_model"])
def test_drafts_leave_the_bits_of_a_quantised_target(found: Found, checkpoints: Checkpoints, drafter: str) -> None:
    """Also if the drafter is quantised."""
    folder = checkpoints.of(REPLACED)[0]
    speculation: dict[str, Any] = {"method": drafter, "num_speculative_tokens": 3}
    speculation |= {"prompt_lookup_max": 3} if drafter == "ngram" else {"model": folder}
    assert _plain(folder, {"speculative_config": json.dumps(speculation)}) == found.packed(REPLACED)["fresh"]


@pytest.mark.exhaustive
@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs 2 GPUs")
def test_workers_that_share_a_quantised_model_have_the_bits_of_one_with_its_matrices(checkpoints: Checkpoints) -> None:
    packed, unpacked = checkpoints.of(REPLACED)
    tree = {TP_TREE.name: "2"}
    with ThreadPoolExecutor(1) as pool:
        alone: Future[list[Any]] = pool.submit(_plain, unpacked, {}, VLLM_CPU_OMP_THREADS_BIND="0", **tree)
        one = alone.result()
    two = _plain(packed, {"tensor_parallel_size": 2}, VLLM_CPU_OMP_THREADS_BIND="0|1", **tree)
    assert two == one


@pytest.mark.exhaustive
def test_exact_arithmetic_of_a_quantised_model_is_that_of_its_matrices(checkpoints: Checkpoints) -> None:
    packed, unpacked = checkpoints.of(REPLACED)
    exact = {ARITHMETIC.name: "exact", UNTRIED.name: "1"}
    of_packed, of_matrices, usual = (_plain(packed, {}, **exact), _plain(unpacked, {}, **exact), _plain(packed, {}))
    assert of_packed == of_matrices != usual

"""LoRA adapters: a request has the bits of an engine where its adapter is alone, and one without an adapter those of an
engine without LoRA: in any company, slot, order and room, from chunks, after a preemption and from the prefix cache.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.engine.adapters import FAULTS, written
from tests.engine.engines import OF_DEVICE, UNTRIED_THERE, request, run, tokens
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.coverage import CORES
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.verify.harness.adapters import ATTENTION, EMBEDDINGS, FUSED, MLP
from vllm_batch_invariant.verify.harness.worker import Engine
from vllm_batch_invariant.verify.quantised_model import quantise

COVERED = reviews.ran().lora["cuda" if torch.cuda.is_available() else "cpu"]
pytestmark = [
    pytest.mark.engine,
    pytest.mark.exhaustive,
    pytest.mark.skipif(not patch_points.installed_version().startswith(COVERED), reason="refused with this vLLM"),
]
IN_ENGINE = "tests.engine.adapters"
LIMITS: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": 16, "skip_tokenizer_init": True, **OF_DEVICE}
FEW = LIMITS | {"max_num_batched_tokens": 61, "num_gpu_blocks_override": 60}
"""Prompts come in chunks, and some requests are preempted."""
ROOM = {"enable_lora": True, "max_loras": 2, "max_cpu_loras": 3, "max_lora_rank": 64}
"""For fewer adapters than are asked for: each takes the room of others."""
TARGETS = [
    request(tokens(70, 1), max_tokens=8, prompt_logprobs=2),
    request(tokens(150, 2), max_tokens=12, temperature=1.0, seed=7),
]
"""vLLM computes a prompt anew where its logprobs are asked for."""
NAMES = ("A", "B", "C", None)
COMPANY = [(request(tokens(20 + 7 * i, 9 + i), max_tokens=10), NAMES[i % 4]) for i in range(6)]
NUMBERS = {"A": 1, "B": 2, "C": 3}
PLACES = ("among others", "warm", "preempted", "in another order", "by other numbers")
IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@pytest.fixture(scope="module")
def folders(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of rank 8 for all linear layers, of rank 16 for parts of fused ones, and of rank 64 with both embeddings."""
    folder = tmp_path_factory.mktemp("adapters")
    return {
        "A": written(folder / "A", checkpoint, 8, 1),
        "B": written(folder / "B", checkpoint, 16, 2, ("q_proj", "v_proj", "up_proj", "down_proj")),
        "C": written(folder / "C", checkpoint, 64, 3, (*ATTENTION, *EMBEDDINGS)),
    }


def asked(
    engine: Engine,
    folders: Mapping[str, Path],
    requests: Sequence[Any],
    numbers: Mapping[str, int] = NUMBERS,
    **how: Any,
) -> dict[str, Any]:
    """What requests, each with the name of its adapter, get together."""
    known = {name: [number, str(folders[name])] for name, number in numbers.items()}
    sent = [{**one, "adapter": name} for one, name in requests]
    options = {"reset": True, "preempt_after": 0, "then_load": ()} | how
    return engine.call(f"{IN_ENGINE}:step", sent, known, *options.values())


def alone(
    engine: Engine,
    folders: Mapping[str, Path],
    names: Sequence[str | None] = NAMES,
    targets: Sequence[Any] = TARGETS,
) -> dict[str, Any]:
    """Answers to the targets, one at a time, by adapter."""
    return {str(name): [asked(engine, folders, [(one, name)])["answers"][0] for one in targets] for name in names}


def among(
    engine: Engine,
    folders: Mapping[str, Path],
    order: Sequence[str | None],
    targets: Sequence[Any] = TARGETS,
    company: Sequence[tuple[Any, str | None]] = COMPANY,
    **how: Any,
) -> dict[str, Any]:
    """The same where they are sent together with others, adapters in an order; and what more was said of them."""
    mine = [(one, name) for name in order for one in targets]
    got = asked(engine, folders, [*company, *mine], **how)
    answers, count = got.pop("answers")[len(company) :], len(targets)
    return got | {str(name): answers[count * i : count * (i + 1)] for i, name in enumerate(order)}


def in_company(engine: Engine, folders: Mapping[str, Path]) -> dict[str, Any]:
    """Answers alone and at each of :data:`PLACES`."""
    found = {"alone": alone(engine, folders), "among others": among(engine, folders, NAMES)}
    found["warm"] = among(engine, folders, NAMES, reset=False)
    found["preempted"] = among(engine, folders, NAMES, preempt_after=9)
    found["in another order"] = among(engine, folders, ("C", None, "B", "A"))
    found["by other numbers"] = among(engine, folders, NAMES, numbers={"A": 13, "B": 12, "C": 11})
    return found


def with_faults(engine: Engine, folders: Mapping[str, Path]) -> dict[str, Any]:
    found = in_company(engine, folders)
    for fault in FAULTS:
        engine.call(f"{IN_ENGINE}:plant", fault)
        found[fault] = among(engine, folders, NAMES)
    engine.call(f"{IN_ENGINE}:plant", "")
    return found | {"no fault": among(engine, folders, NAMES)}


@pytest.fixture(scope="module")
def found(checkpoint: Path, folders: dict[str, Path]) -> dict[str, Any]:
    return served(checkpoint, partial(with_faults, folders=folders))


def differing(found: Mapping[str, Any], where: str) -> list[str]:
    """Adapters whose requests have other bits there than alone."""
    return [name for name, answers in found["alone"].items() if found[where][name] != answers]


@pytest.mark.parametrize("where", [*PLACES, "no fault"])
def test_a_request_has_the_same_bits_in_any_company(found: dict[str, Any], where: str) -> None:
    assert differing(found, where) == []


def assert_company(found: Mapping[str, Any]) -> None:
    """Adapters differ, and there were preemptions and cached tokens."""
    answers = [*found["alone"].values()]
    assert all(one != other for number, one in enumerate(answers) for other in answers[:number])
    assert found["among others"]["preemptions"] + found["preempted"]["preemptions"] > 0
    assert max(found["warm"]["cached"]) >= 128


def test_the_company_was_there(found: dict[str, Any]) -> None:
    assert_company(found)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_shows(found: dict[str, Any], fault: str) -> None:
    assert differing(found, fault)


def without_adapters(engine: Engine, targets: Sequence[Any] = TARGETS) -> list[Any]:
    """Answers to the targets of an engine without LoRA, one at a time."""
    answers = [engine.step(f"{i}", [one], True).requests[0] for i, one in enumerate(targets)]
    return [[one["completions"], one["prompt_logprobs"]] for one in answers]


def without_lora(model: Path) -> list[Any]:
    """The same of an engine of its own."""
    return run({"model": str(model), **LIMITS}, [], "1", afterwards=without_adapters).afterwards


def test_a_request_without_an_adapter_has_the_bits_of_an_engine_without_lora(
    found: dict[str, Any], checkpoint: Path
) -> None:
    assert without_lora(checkpoint) == found["alone"]["None"]


def test_bits_do_not_follow_from_the_room_for_adapters(
    found: dict[str, Any], checkpoint: Path, folders: dict[str, Path]
) -> None:
    room = {"max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": 256}
    other = served(checkpoint, partial(alone, folders=folders), max_num_batched_tokens=512, **room)
    assert [name for name, answers in other.items() if answers != found["alone"][name]] == []


def served(model: Path, afterwards: Any, flag: str = "1", **more: Any) -> Any:
    """What an engine with other settings gives."""
    variables = UNTRIED_THERE | ({CORES: "0|1"} if "tensor_parallel_size" in more else {})
    return run({"model": str(model), **FEW, **ROOM, **more}, [], flag, afterwards=afterwards, **variables).afterwards


def beside(model: Path, folders: Mapping[str, Path], **more: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Answers of an engine with other settings: alone, and among others."""
    return served(model, lambda engine: (alone(engine, folders), among(engine, folders, NAMES)), **more)


def test_two_workers_keep_a_requests_bits(checkpoint: Path, folders: dict[str, Path]) -> None:
    by_itself, together = beside(checkpoint, folders, tensor_parallel_size=2)
    assert [name for name, answers in by_itself.items() if together[name] != answers] == []


def test_drafts_change_no_bit(found: dict[str, Any], checkpoint: Path, folders: dict[str, Path]) -> None:
    ngrams = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    by_itself, together = beside(checkpoint, folders, speculative_config=json.dumps(ngrams))
    for answers in (by_itself, together):
        assert [name for name, right in found["alone"].items() if answers[name] != right] == []


def test_a_model_with_one_adapter_for_a_fused_layer_keeps_its_bits(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2}
    sizes = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 2, "vocab_size": 4096, **heads}
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    torch.manual_seed(0)
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, **special, max_position_embeddings=1024))
    model.bfloat16().save_pretrained(tmp_path / "phi3")
    ranks = {"A": 8, "B": 16, "C": 64}
    made = {name: written(tmp_path / name, tmp_path / "phi3", rank, rank, FUSED) for name, rank in ranks.items()}
    by_itself, together = beside(tmp_path / "phi3", made)
    assert len({str(answers) for answers in by_itself.values()}) == len(NAMES)
    assert [name for name, answers in by_itself.items() if together[name] != answers] == []


@pytest.mark.parametrize(
    "form", ["w4a16-g128", "w8a16-channel", "awq-g128", "gptq-g128", "w8a8-fp8-block", "w8a8-fp8-channel"]
)
def test_quantised_weights_have_the_bits_of_their_matrices(
    checkpoint: Path, folders: dict[str, Path], tmp_path: Path, form: str
) -> None:
    packed, matrices = shutil.copytree(checkpoint, tmp_path / "packed"), tmp_path / "matrices"
    quantise(packed, form, matrices)
    by_itself, together = beside(packed, folders)
    assert [name for name, answers in by_itself.items() if together[name] != answers] == []
    assert len({str(answers) for answers in by_itself.values()}) == len(NAMES)
    if form.startswith("w8a8"):
        return  # what is given to the matrices is quantised, too
    settings = {"model": str(matrices), **LIMITS, **ROOM}
    assert run(settings, [], "1", afterwards=partial(alone, folders=folders)).afterwards == by_itself


WAYS = ((8, 1, (*ATTENTION, *MLP)), (16, 2, ("q_proj", "v_proj", "up_proj", "down_proj")))
"""Rank, seed and layers of two adapters."""


def replaced(engine: Engine, checkpoint: Path, at: Path, ways: Sequence[Any] = WAYS) -> dict[str, Any]:
    """Another adapter is written where one is that serves, and loaded in place."""
    of_a, mine = str(at), partial(asked, engine, {"A": at}, numbers={"A": 1})
    first, second = (partial(written, model=checkpoint, rank=one[0], seed=one[1], targets=one[2]) for one in ways)
    first(at)
    sent = [(TARGETS[1], "A")]
    found = {"before": mine(sent), "warm": mine(sent, reset=False)}
    second(at)
    found["changed"] = engine.call(f"{IN_ENGINE}:refusal", TARGETS[1], "A", 1, of_a)
    found["not in place"] = engine.call(f"{IN_ENGINE}:load", "A", 1, of_a, False)
    first(at)
    found["restored"] = mine(sent, reset=False)
    other = second(at.with_name("other"))
    found["while it serves"] = mine(sent, then_load=("A", 1, str(other), True))
    second(at)
    found["in place"] = engine.call(f"{IN_ENGINE}:load", "A", 1, of_a, True)
    found["after"] = mine(sent, reset=False)
    engine.call(f"{IN_ENGINE}:forget_digests")
    mine(sent)
    first(at)
    engine.call(f"{IN_ENGINE}:load", "A", 1, of_a, True)
    return found | {"by path alone": mine(sent, reset=False)}


def test_an_adapter_that_is_loaded_in_place_finds_nothing_of_the_one_before(
    found: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    settings = {"model": str(checkpoint), **LIMITS, **ROOM}
    afterwards = partial(replaced, checkpoint=checkpoint, at=tmp_path / "adapter")
    seen = run(settings, [], "1", afterwards=afterwards, **IN_PROCESS).afterwards
    of_a, of_b = found["alone"]["A"][1], found["alone"]["B"][1]
    assert seen["before"]["answers"] == seen["warm"]["answers"] == seen["restored"]["answers"] == [of_a]
    assert seen["warm"]["cached"][0] >= 128
    assert "the files of the LoRA adapter A are not those" in seen["changed"]
    assert "another LoRA adapter with the number 1" in seen["not in place"]
    assert "while requests have it" in seen["while it serves"]["said"]
    assert seen["while it serves"]["answers"] == [of_a]
    assert seen["in place"] == ""
    assert seen["after"]["answers"] == [of_b]
    assert seen["after"]["cached"] == [0]
    assert seen["by path alone"]["answers"] != [of_a]  # a fault, which is vLLM's


def test_plain_vllm_fails_the_same_comparison(checkpoint: Path, folders: dict[str, Path]) -> None:
    """On a CPU a request without an adapter has that of the last slot; on a GPU K is cut by the number of rows."""
    one = request(tokens(37, 2), max_tokens=8)

    def plain(engine: Engine) -> Any:
        names = (None, "A")
        among = [(request(tokens(150, 3 + i), max_tokens=8), name) for i, name in enumerate(("A", "B"))]
        pair = asked(engine, folders, [*among, *((one, name) for name in names)])["answers"][len(among) :]
        return [[asked(engine, folders, [(one, name)])["answers"][0] for name in names], pair]

    room = ROOM | {"enforce_eager": True}
    first, second = run({"model": str(checkpoint), **LIMITS, **room}, [], "0", afterwards=plain).afterwards
    assert first != second

"""Seeds made of a request, and of a sample's name: the same for the same content and name, and another for another.
Equal requests that are a group are found.
"""

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest

from vllm_batch_invariant import envs
from vllm_batch_invariant.errors import BadSetting
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.sampling import seeds
from vllm_batch_invariant.seeds import BITS, SAMPLE_ID, sample_seed

REFUSED = patch_points.VALIDATION_ERROR.get()
PROMPT = [5, 70_000, 3]
CHANGES = {
    "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
    "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1,
}  # fmt: skip


def request(prompt: list[int] | None = PROMPT, embeds: torch.Tensor | None = None, **params: Any) -> EngineCoreRequest:
    made = {
        "request_id": "0", "mm_features": None, "pooling_params": None, "arrival_time": 0.0, "lora_request": None,
        "cache_salt": None, "data_parallel_rank": None, "external_req_id": "0",
    }  # fmt: skip
    params = SamplingParams(**params)
    return EngineCoreRequest(prompt_token_ids=prompt, prompt_embeds=embeds, sampling_params=params, **made)


def seed(chosen: int = 1, **named: Any) -> int:
    return seeds.seeded(request(**named), chosen).sampling_params.seed


def test_the_same_content_gets_the_same_seed_and_any_other_another() -> None:
    others = [seed(2), seed(-1), seed(prompt=PROMPT[:2]), seed(prompt=[*PROMPT, 0])]
    others += [seed(**{name: value}) for name, value in CHANGES.items()]
    assert set(CHANGES) == set(seeds.DECIDING)
    assert seed() == seed(temperature=1) not in others
    assert len(set(others)) == len(others)
    assert all(0 <= value < 2**62 for value in others)


def test_what_only_reports_or_ends_a_sample_is_not_in_its_seed() -> None:
    assert seed(max_tokens=99, logprobs=3, n=4, stop_token_ids=[7], detokenize=False) == seed()


def test_embeddings_are_content() -> None:
    embeds = torch.arange(6.0).view(3, 2)
    values = [seed(prompt=None, embeds=found) for found in (embeds, embeds + 1, embeds.bfloat16())]
    assert len({*values, seed()}) == 4
    assert values[0] == seed(prompt=None, embeds=embeds.t().contiguous().t())


def test_a_seed_of_the_request_and_greedy_requests_are_left_alone() -> None:
    for params in ({"seed": 3}, {"temperature": 0}):
        made = request(**params)
        before = made.sampling_params
        assert seeds.seeded(made, 1).sampling_params is before
        assert before.seed == params.get("seed")


def test_parameters_that_requests_share_are_not_changed() -> None:
    made = request()
    shared = made.sampling_params
    assert shared.sampling_type.name == "RANDOM"
    seeds.seeded(made, 1)
    assert shared.seed is None
    assert made.sampling_params.sampling_type.name == "RANDOM_SEED"


def test_samples_of_one_request_get_seeds_of_their_own() -> None:
    made = seeds.seeded(request(n=4), 1)
    parent = ParentRequest(made)
    found = [parent.get_child_info(index)[1].seed for index in range(4)]
    assert found == [made.sampling_params.seed + index for index in range(4)]


def sampled(sample_id: Any, chosen: int | None = None, **params: Any) -> EngineCoreRequest:
    return seeds.seeded(request(extra_args={SAMPLE_ID: sample_id}, **params), chosen)


def test_a_sample_that_has_a_name_gets_a_seed_of_its_own() -> None:
    names = [*range(16), "0 0", "step 3, 17", "", -1]
    values = [sampled(name, seed=7).sampling_params.seed for name in names]
    assert values == [sample_seed(7, name) for name in names]
    assert values[3] == sampled("3", seed=7).sampling_params.seed
    others = [sampled(name, seed=8).sampling_params.seed for name in names]
    made = [sampled(name, chosen=7).sampling_params.seed for name in names]
    assert len({*values, *others, *made, seed(7)}) == 3 * len(names) + 1
    assert made == [sample_seed(seed(7), name) for name in names]
    assert all(0 <= value < 2**BITS for value in values)


def test_the_seed_of_a_sample_is_not_another_one_tomorrow() -> None:
    assert sample_seed(7, 3) == sample_seed(7, "3") == 587324638940258427


def test_a_name_is_taken_out_of_what_the_engine_gets_and_out_of_nothing_else() -> None:
    made = request(seed=7, extra_args={SAMPLE_ID: 3, "mine": 1})
    shared = made.sampling_params
    found = seeds.seeded(made, None).sampling_params
    assert found.extra_args == {"mine": 1}
    assert shared.extra_args == {SAMPLE_ID: 3, "mine": 1}
    assert seeds.seeded(made, None).sampling_params.seed == found.seed == sample_seed(7, 3)
    assert sampled(3, seed=7).sampling_params.extra_args is None


def test_samples_of_a_named_request_share_none_with_another_name() -> None:
    found = [
        ParentRequest(sampled(name, seed=value, n=4)).get_child_info(index)[1].seed
        for value in (5, 6) for name in (0, 1) for index in range(4)
    ]  # fmt: skip
    assert len(set(found)) == 16


@pytest.mark.parametrize("sample_id", [1.5, True, [1], {}])
def test_a_name_of_another_kind_is_refused(sample_id: object) -> None:
    with pytest.raises(REFUSED, match="sample_id has to be an integer or a string, got "):
        sampled(sample_id, seed=7)


def test_a_name_without_a_seed_is_refused_and_a_greedy_request_needs_none() -> None:
    with pytest.raises(REFUSED, match=r"sample_id=3 tells apart .* this request has none; give it one, or start "):
        sampled(3)
    assert sampled(3, temperature=0).sampling_params.seed is None


class Processor:
    """Stands for vLLM's, which needs an engine's configuration."""

    def process_inputs(self, request_id: str, prompt: list[int], params: SamplingParams) -> EngineCoreRequest:
        made = request(prompt)
        made.sampling_params = params
        return made


@pytest.mark.parametrize(("value", "is_seeded"), [("", False), ("none", False), ("0", True), ("-7", True)])
def test_vllms_input_processor_is_wrapped_if_the_variable_is_set(
    value: str, is_seeded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(envs.SEED.name, value)
    monkeypatch.setattr(patch_points.INPUT_PROCESSOR.module(), "InputProcessor", type("Own", (Processor,), {}))
    seeds.install()
    processor = patch_points.INPUT_PROCESSOR.get()()
    made = processor.process_inputs("0", PROMPT, params=SamplingParams())
    assert (made.sampling_params.seed is not None) == is_seeded
    made = processor.process_inputs("0", PROMPT, params=SamplingParams(seed=7, extra_args={SAMPLE_ID: 3}))
    assert made.sampling_params.seed == sample_seed(7, 3)


@pytest.mark.parametrize("value", ["1.5", "yes", "0x1", " 1"])
def test_a_value_that_is_no_integer_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.SEED.name, value)
    with pytest.raises(BadSetting, match="use none or an integer"):
        envs.SEED.read()


class Clock:
    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def equal(clock: Clock) -> seeds.EqualRequests:
    return seeds.EqualRequests(clock)


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    lines: list[str] = []
    monkeypatch.setattr(seeds.logger, "warning", lambda line, *values: lines.append(line % values))
    return lines


def test_a_group_of_equal_requests_is_told_of_once(equal: seeds.EqualRequests, said: list[str]) -> None:
    for number in range(equal.GROUP - 1):
        equal.meet(request(seed=5))
        equal.meet(request([number], seed=5))
    assert said == []
    equal.meet(request(seed=5))
    [line] = said
    assert "4 requests within 60 s have the same prompt, sampling parameters and seed (5)" in line
    assert "sample_id in extra_args (vllm_xargs over HTTP)" in line
    for number in range(3 * equal.GROUP):
        equal.meet(request([number % 2], seed=5))
    assert said == [line]


@pytest.mark.parametrize(
    "ask",
    [
        lambda number: request(temperature=0),
        lambda number: request(),
        lambda number: request(seed=number),
        lambda number: request([*PROMPT, number], seed=5),
        lambda number: request(seed=5, max_tokens=1 + number),
        lambda number: request(seed=5, temperature=0.1 + number / 20),
        lambda number: request(None, torch.full((2, 2), float(number)), seed=5),
        lambda number: sampled(number, seed=5),
        lambda number: seeds.seeded(request([number]), 5),
    ],
)
def test_nothing_is_said_of_greedy_requests_of_those_without_a_seed_and_of_different_ones(
    ask: Any, equal: seeds.EqualRequests, said: list[str]
) -> None:
    for number in range(20):
        equal.meet(ask(number))
    assert said == []


def test_seeds_made_of_equal_requests_are_equal_so_they_are_told_of(
    equal: seeds.EqualRequests, said: list[str]
) -> None:
    for _ in range(4):
        equal.meet(seeds.seeded(request(), 5))
    assert len(said) == 1


def test_nothing_is_said_of_a_request_that_is_sent_again_from_time_to_time(
    equal: seeds.EqualRequests, clock: Clock, said: list[str]
) -> None:
    for _ in range(20):
        clock.seconds += equal.SECONDS / 2
        equal.meet(request(seed=5))
    assert said == []


def test_only_the_latest_requests_are_remembered(
    equal: seeds.EqualRequests, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seeds.EqualRequests, "KEPT", 8)
    for number in range(100):
        for _ in range(3):
            equal.meet(request([number], seed=5))
    assert len(equal._seen) == 8
    equal.meet(request([0], seed=5))
    assert said == []
    equal.meet(request([99], seed=5))
    assert len(said) == 1

"""Seeds made of a request: the same for the same content, and another for another."""

from typing import Any

import pytest
import torch
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest

from vllm_batch_invariant import envs
from vllm_batch_invariant.errors import BadSetting
from vllm_batch_invariant.integration import patch_points, seeds

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
    made = patch_points.INPUT_PROCESSOR.get()().process_inputs("0", PROMPT, params=SamplingParams())
    assert (made.sampling_params.seed is not None) == is_seeded


@pytest.mark.parametrize("value", ["1.5", "yes", "0x1", " 1"])
def test_a_value_that_is_no_integer_is_refused(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(envs.SEED.name, value)
    with pytest.raises(BadSetting, match="use none or an integer"):
        envs.SEED.read()

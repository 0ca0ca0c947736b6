"""The sampler of vLLM's second model runner with exact arithmetic in its place, by the GPU's kernels in Triton's
interpreter: tokens and logprobs have the bits of the definition. vLLM's own sampler runs here, on the CPU's memory;
what its kernels leave for it, the counts of tokens, is put there.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.receipts import SAMPLINGS
from tests.ops.exact.cases import assert_same
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.sampling import exact_sampler
from vllm_batch_invariant.ops import dispatch
from vllm_batch_invariant.ops.exact import cuda, definition

vllm = pytest.importorskip("vllm")
VOCABULARY = 300
PROMPTS = (1, 5, 40, 33, 7, 12, 64)
"""Tokens of the prompt of each request."""
OUTPUTS = (0, 1, 9, 4, 30, 6, 2)
"""Tokens that it has already."""
POINTS = ("GUMBEL_SAMPLE", "TEMPERATURE_OF_STATES", "MIN_P_OF_STATES", "PENALTIES")


class Buffer:
    """Of vLLM's, memory that a GPU reads where the host writes it."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self.cpu = torch.zeros(size, dtype=dtype)
        self.np = self.cpu.numpy()

    def uva(self, count: int | None = None) -> torch.Tensor:
        return self.cpu[:count]


@pytest.fixture
def sampler(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's, with the functions that are installed in a worker on a GPU; all is given back afterwards."""
    monkeypatch.setattr(exact_sampler, "operations", lambda device_type: cuda)
    monkeypatch.setattr(dispatch, "_arithmetic", "exact")
    for operation in ("softmax", "top_k_top_p"):
        monkeypatch.setitem(dispatch.MODULES, (operation, "exact", "cpu"), ".exact.cuda")
    dispatch._module.cache_clear()
    module = patch_points.SECOND_SAMPLER.module()
    monkeypatch.setattr(module.Sampler, "add_request", module.Sampler.add_request)
    for name in POINTS:
        point = patch_points.ALL[name]
        monkeypatch.setattr(point.module(), point.attribute, point.get())
    from vllm_batch_invariant.integration.sampling.sampler import _top_k_top_p

    monkeypatch.setattr(module, "apply_top_k_top_p", _top_k_top_p)
    exact_sampler.install()
    from vllm.v1.worker.gpu import buffer_utils
    from vllm.v1.worker.gpu.states import RequestState

    monkeypatch.setattr(buffer_utils, "UvaBuffer", Buffer)
    states = RequestState(16, 128, 128, 0, VOCABULARY, torch.device("cpu"))
    config = SimpleNamespace(reasoning_config=None, model_config=SimpleNamespace(), speculative_config=None)
    yield module.Sampler(config, 16, VOCABULARY, torch.device("cpu"), states)
    monkeypatch.undo()
    dispatch._module.cache_clear()


def counted(sampler: Any, row: int, prompt: np.ndarray, output: np.ndarray) -> None:
    """Write a request's tokens as vLLM's kernels do: a bit for each of the prompt, a count for each of the output."""
    words = np.zeros(sampler.penalties_state.prompt_bin_mask.shape[1], np.uint32)
    for token in prompt:
        words[token // 32] |= np.uint32(1 << (token % 32))
    sampler.penalties_state.prompt_bin_mask[row] = torch.from_numpy(words.view(np.int32))
    counts = np.bincount(output, minlength=VOCABULARY).astype(np.int32)
    sampler.penalties_state.output_bin_counts[row] = torch.from_numpy(counts)


@pytest.mark.parametrize("only", [None, 0, 1])
def test_the_second_model_runners_sampler_takes_the_tokens_of_the_definition(sampler: Any, only: int | None) -> None:
    """All requests together, a greedy one alone and a seeded one alone: vLLM leaves out steps that none asks for."""
    draw = np.random.default_rng(3)
    logits = torch.from_numpy(draw.standard_normal((len(SAMPLINGS), VOCABULARY)).astype(np.float32) * 2).bfloat16()
    chosen = list(range(len(SAMPLINGS))) if only is None else [only]
    requests = [15 - which for which in chosen]
    tokens = {}
    for which, request in zip(chosen, requests, strict=True):
        prompt, output = (draw.integers(0, VOCABULARY, count) for count in (PROMPTS[which], OUTPUTS[which]))
        sampler.req_states.prompt_len.np[request] = len(prompt)
        sampler.add_request(request, vllm.SamplingParams(logprobs=3, **SAMPLINGS[which]))
        counted(sampler, request, prompt, output)
        tokens[which] = prompt, output
    sampler.penalties_state._new_penalties_reqs.clear()
    sampler.sampling_states.apply_staged_writes()
    for name in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        getattr(sampler.penalties_state, name).copy_to_uva()
    rows, positions = torch.tensor(requests), torch.tensor([PROMPTS[one] + OUTPUTS[one] - 1 for one in chosen])

    def sample(positions: torch.Tensor) -> torch.Tensor:
        none = torch.zeros_like(rows)
        lengths = positions.numpy() + 1
        return sampler.sample(logits[chosen], rows, rows, np.array(requests), positions, none, none, lengths)[0]

    found = sample(positions)
    assert torch.equal(found, sample(positions + 1)) == (only == 0)  # seeded ones have other noise at another place
    for place, which in enumerate(chosen):
        asked = vllm.SamplingParams(**SAMPLINGS[which])
        row, (prompt, output) = logits[which].float().numpy(), tokens[which]
        penalties = asked.repetition_penalty, asked.frequency_penalty, asked.presence_penalty
        if penalties != (1, 0, 0):
            in_prompt = np.isin(np.arange(VOCABULARY), prompt)
            row = definition.penalised(row, in_prompt, np.bincount(output, minlength=VOCABULARY), *penalties)
        right = definition.draw(
            row, asked.temperature, max(asked.top_k, 0), asked.top_p, asked.seed or 0, OUTPUTS[which], asked.min_p
        )
        assert int(found[place]) == right, SAMPLINGS[which]


def test_noise_follows_the_place_in_the_output_and_the_seed_of_any_sign() -> None:
    draws = SimpleNamespace(draw=lambda logits, keys, temperatures: (keys, temperatures))
    for seed, prompt in ((7, 1), (-3, 100), (2**63 - 1, 5), (-(2**63), 3)):
        seeds = np.zeros(4, np.int64)
        seeds[2] = seed
        state = SimpleNamespace(
            sampling_states=SimpleNamespace(seeds=SimpleNamespace(np=seeds)),
            req_states=SimpleNamespace(prompt_len=SimpleNamespace(np=np.array([9, 9, prompt, 9]))),
        )
        exact_sampler.keyed(lambda self, request: None)(state, 2)
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(exact_sampler, "operations", lambda device_type: draws)
            places = torch.tensor([0, 1, 70_000]) + prompt - 1
            rows = torch.tensor([2, 2, 2], dtype=torch.int32)
            temperatures = torch.tensor([0.0, 0.1, 0.5, 0.9])
            keys, heat = exact_sampler.draw(torch.zeros(3, 5), rows, temperatures, torch.from_numpy(seeds), places)
        right = [definition.key_of(seed, place) for place in (0, 1, 70_000)]
        assert keys.view(torch.uint64).tolist() == right
        assert heat.tolist() == [0.5] * 3


def test_logprobs_of_the_second_model_runner_are_those_of_the_definition(sampler: Any) -> None:
    from vllm_batch_invariant.integration.sampling.sampler import compute_topk_scores

    logits = torch.from_numpy(np.random.default_rng(4).standard_normal((3, VOCABULARY)).astype(np.float32)).bfloat16()
    found = compute_topk_scores(logits, 5, torch.tensor([4, 0, 299]))
    right = definition.log_softmax(logits.float().numpy())
    assert_same(found.logprobs, np.take_along_axis(right, found.logprob_token_ids.numpy(), -1))

"""A verify step of vLLM's first model runner gives each request what its steps of plain decoding give it."""

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from tests.assertions import assert_same_bits
from tests.engine import states
from vllm_batch_invariant.envs import ARITHMETIC, ATTENTION, UNTRIED
from vllm_batch_invariant.integration import coverage
from vllm_batch_invariant.integration.engine import refusals, thoughts
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.integration.sampling import speculation
from vllm_batch_invariant.ops.acceptance import NO_TOKEN

pytest.importorskip("vllm")
from vllm.v1.outputs import LogprobsLists, LogprobsTensors
from vllm.v1.sample.logits_processor import LogitsProcessors
from vllm.v1.sample.metadata import SamplingMetadata
from vllm.v1.sample.rejection_sampler import RejectionSampler
from vllm.v1.sample.sampler import Sampler
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

VOCABULARY = 64
REQUESTS = 6
DRAFTS = [3, 0, 5, 1, 2, 5]
PER_REQUEST = {"temperature", "top_p", "top_k", "frequency_penalties", "presence_penalties", "repetition_penalties"}
PER_REQUEST |= {"prompt_token_ids", "output_token_ids", "allowed_token_ids_mask"}
BY_REQUEST = {"generators", "bad_words_token_ids", "logprob_token_ids"}
OF_THE_STEP = {"all_greedy", "all_random", "max_num_logprobs", "no_penalties", "logitsprocs"}
NOT_NEEDED = {"spec_token_ids", "thinking_budget_state_holder"}
"""Drafts, which are among the tokens of a row, and what is refused at start-up."""


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's compiled kernels, and as in a worker a sampler that lists candidates by the mode's order."""
    from vllm_batch_invariant.integration.sampling import sampler

    patch_points.ROTARY.module()
    monkeypatch.setattr(Sampler, "gather_logprobs", staticmethod(sampler.gather_logprobs))


def metadata_of(requests: list[int], outputs: list[list[int]], generators: dict[int, torch.Generator]) -> Any:
    """Of some of six requests: greedy and seeded, with penalties, bad words, a filter, and a mask."""
    rows = torch.tensor(requests)
    seeded = torch.tensor([0.0, 0.8, 1.0, 0.0, 1.3, 0.7])
    prompts = torch.arange(REQUESTS * 4).view(REQUESTS, 4) % VOCABULARY
    mask = torch.zeros(REQUESTS, VOCABULARY, dtype=torch.bool)
    mask[2, 20:] = True
    penalty = torch.tensor([0.0, 0.4, 0.3, 0.5, 0.0, 0.2])
    bad = {3: [[5], [7, 9]], 5: [[1]]}
    return SamplingMetadata(
        temperature=seeded[rows],
        all_greedy=False,
        all_random=False,
        top_p=torch.tensor([1.0, 0.9, 1.0, 1.0, 0.5, 1.0])[rows],
        top_k=torch.tensor([VOCABULARY, 20, VOCABULARY, VOCABULARY, 9, 3], dtype=torch.int32)[rows],
        generators={place: generators[one] for place, one in enumerate(requests) if one in generators},
        max_num_logprobs=3,
        no_penalties=False,
        prompt_token_ids=prompts[rows],
        frequency_penalties=penalty[rows],
        presence_penalties=penalty[rows],
        repetition_penalties=1 + penalty[rows],
        output_token_ids=outputs,
        allowed_token_ids_mask=mask[rows],
        bad_words_token_ids={place: bad[one] for place, one in enumerate(requests) if one in bad},
        logitsprocs=LogitsProcessors(),
    )


def seeds() -> dict[int, torch.Generator]:
    return {one: torch.Generator().manual_seed(one) for one in (1, 2, 4, 5)}


def decoded(
    logits: list[torch.Tensor], tokens: int
) -> tuple[list[list[int]], list[list[LogprobsTensors]], dict[int, list[torch.Tensor]]]:
    """Tokens and logprobs by plain decoding, a step a token, and the generators' states after each."""
    sampler, generators = Sampler(), seeds()
    outputs: list[list[int]] = [[] for _ in range(REQUESTS)]
    listed: list[list[LogprobsTensors]] = [[] for _ in range(REQUESTS)]
    states: dict[int, list[torch.Tensor]] = {one: [] for one in generators}
    for step in range(tokens):
        metadata = metadata_of(list(range(REQUESTS)), outputs, generators)
        done = sampler(torch.stack([rows[step] for rows in logits]), metadata)
        for one in range(REQUESTS):
            listed[one].append(LogprobsTensors(*(tensor[one : one + 1] for tensor in done.logprobs_tensors[:3])))
            outputs[one].append(int(done.sampled_token_ids[one, 0]))
        for one, generator in generators.items():
            states[one].append(generator.get_state())
    return outputs, listed, states


def spec_metadata(drafts: list[list[int]]) -> SpecDecodeMetadata:
    """vLLM's, for requests with these drafts: their rows lie after each other."""
    made = SpecDecodeMetadata.make_dummy(drafts, torch.device("cpu"))
    counts = torch.tensor([len(one) + 1 for one in drafts])
    ends = counts.cumsum(0) - 1
    made.bonus_logits_indices = ends.to(torch.int32)
    rows = torch.arange(int(counts.sum()))
    made.target_logits_indices = rows[~torch.isin(rows, ends)].to(torch.int32)
    return made


@pytest.mark.parametrize("right", [0, 1, 2, 5])
def test_a_verify_step_gives_tokens_logprobs_and_generators_of_plain_decoding(right: int) -> None:
    chance = torch.Generator().manual_seed(right)
    logits = [torch.randn(6, VOCABULARY, generator=chance) * 3 for _ in range(REQUESTS)]
    outputs, listed, states = decoded(logits, 6)
    drafts = [outputs[one][:number] for one, number in enumerate(DRAFTS)]
    for one in drafts:
        one[right:] = [(token + 1) % VOCABULARY for token in one[right:]]
    generators = seeds()
    rejection_sampler = RejectionSampler(Sampler())
    metadata = metadata_of(list(range(REQUESTS)), [[] for _ in range(REQUESTS)], generators)
    rows = torch.cat([one[: number + 1] for one, number in zip(logits, DRAFTS, strict=True)])
    done = speculation.verify(rejection_sampler, spec_metadata(drafts), None, rows, metadata)
    width = max(DRAFTS) + 1
    for one, number in enumerate(DRAFTS):
        count = min(right, number) + 1
        assert done.sampled_token_ids[one].tolist() == outputs[one][:count] + [NO_TOKEN] * (width - count)
        for j in range(count):
            for ours, plain in zip(done.logprobs_tensors[:3], listed[one][j][:3], strict=True):
                assert_same_bits(ours[one * width + j], plain[0])
        if one in generators:
            assert_same_bits(generators[one].get_state(), states[one][count - 1])


def test_every_field_of_vllms_metadata_is_known() -> None:
    assert {field.name for field in fields(SamplingMetadata)} == PER_REQUEST | BY_REQUEST | OF_THE_STEP | NOT_NEEDED


@dataclass
class SecondOutput:
    """The part of the second runner's ``SamplerOutput`` that verification reads or writes."""

    sampled_token_ids: torch.Tensor
    num_sampled: Any = None
    num_rejected: Any = None


def test_the_second_runners_step_samples_every_row_and_keeps_what_equals_the_drafts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a fake of vLLM's sampler, and of the kernel that counts tokens of prompts."""
    point = patch_points.SAMPLED_AND_REJECTED
    monkeypatch.setattr(point.module(), point.attribute, lambda counts, *_: (counts, None), raising=False)
    sampled = torch.tensor([[5], [6], [7], [8], [9], [3]])

    def sampler(logits: torch.Tensor, batch: Any) -> Any:
        assert len(logits) == len(batch.logits_indices)
        return SecondOutput(sampled)

    sampler.req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu=None))  # type: ignore[attr-defined]
    batch = SimpleNamespace(
        input_ids=torch.tensor([0, 1, 5, 6, 0, 2, 9, 4]),
        logits_indices=torch.tensor([1, 2, 3, 4, 5, 7]),
        cu_num_logits=torch.tensor([0, 4, 6], dtype=torch.int32),
        seq_lens=None,
        idx_mapping=None,
    )
    rejection_sampler = SimpleNamespace(sampler=sampler, num_speculative_steps=3)
    logits = torch.zeros(6, VOCABULARY)
    done = speculation.verify_in_second_runner(rejection_sampler, logits, batch)
    assert done.sampled_token_ids.tolist() == [[5, 6, 7, NO_TOKEN], [9, NO_TOKEN, NO_TOKEN, NO_TOKEN]]
    assert done.num_sampled.tolist() == [3, 1]
    invalid = torch.tensor([False, False, True, False, False, False])
    done = speculation.verify_in_second_runner(rejection_sampler, logits, batch, invalid_drafts=invalid)
    assert done.num_sampled.tolist() == [2, 1]
    monkeypatch.setattr(speculation, "accept", speculation.accept)
    states.accept_every_draft(SimpleNamespace(collective_rpc=lambda plant: plant(None)))
    done = speculation.verify_in_second_runner(rejection_sampler, logits, batch)
    assert done.sampled_token_ids.tolist() == [[5, 6, 0, 8], [4, 3, NO_TOKEN, NO_TOKEN]], "a fault for engines"


@dataclass
class Sampled:
    """The part of the second runner's ``SamplerOutput`` that its sampler gives."""

    sampled_token_ids: torch.Tensor
    logprobs_tensors: Any
    num_nans: torch.Tensor | None = None


@dataclass
class Batch:
    """The part of the second runner's ``InputBatch`` that its sampler reads."""

    num_reqs: int
    idx_mapping: torch.Tensor
    idx_mapping_np: np.ndarray
    seq_lens: torch.Tensor
    seq_lens_cpu_upper_bound: torch.Tensor
    cu_num_logits: torch.Tensor
    cu_num_logits_np: np.ndarray
    expanded_idx_mapping: torch.Tensor
    expanded_local_pos: torch.Tensor
    logits_indices: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, counts: list[int]) -> "Batch":
        starts = np.cumsum([0, *counts]).astype(np.int32)
        requests, rows = np.arange(len(counts))[::-1].copy(), int(starts[-1])
        return cls(
            len(counts), torch.from_numpy(requests), requests, torch.arange(len(counts)) + 50,
            torch.arange(len(counts)) + 60, torch.from_numpy(starts), starts,
            torch.from_numpy(requests).repeat_interleave(torch.tensor(counts)),
            torch.cat([torch.arange(count) for count in counts]), torch.arange(rows) * 2, torch.arange(2 * rows),
        )  # fmt: skip


@pytest.mark.parametrize("most_rows", [1, 2, 5, 7, 8, 100])
def test_the_second_runner_samples_as_many_rows_at_once_as_there_is_memory_for(
    most_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a fake of vLLM's sampler: requests with an even index want logprobs, the last most of them."""
    counts = [1, 4, 4, 2, 1, 3]
    batch, logits = Batch.of(counts), torch.randn(sum(counts), VOCABULARY)
    seen: list[int] = []

    def sampler(logits: torch.Tensor, part: Batch) -> Sampled:
        seen.append(len(logits))
        assert len(logits) == len(part.logits_indices) == part.cu_num_logits_np[-1] == part.cu_num_logits[-1]
        assert part.num_reqs == len(part.idx_mapping) == len(part.idx_mapping_np) == len(part.cu_num_logits) - 1
        assert torch.equal(part.seq_lens + 10, part.seq_lens_cpu_upper_bound)
        of_rows = part.idx_mapping.repeat_interleave(part.cu_num_logits.diff())
        assert torch.equal(of_rows, part.expanded_idx_mapping)
        tokens = part.positions[part.logits_indices] + 100 * part.expanded_local_pos
        wanted = [int(request) + 1 for request in part.idx_mapping_np if request % 2 == 0]
        listed = LogprobsTensors(*logits.sort(-1, descending=True)[::-1], tokens) if wanted else None
        if listed:
            width = max(wanted)
            listed = LogprobsTensors(listed[0][:, :width], listed[1][:, :width], tokens)
        return Sampled(tokens.view(-1, 1), listed, tokens)

    monkeypatch.setattr(speculation, "_MOST_BYTES", most_rows * 4 * VOCABULARY)
    done = speculation._sampled_in_parts(sampler, logits, batch)
    assert max(seen) <= max(most_rows, *counts)
    assert sum(seen) == sum(counts)
    assert (len(seen) == 1) == (most_rows == 100)
    whole = sampler(logits, batch)
    assert torch.equal(done.sampled_token_ids, whole.sampled_token_ids)
    assert torch.equal(done.num_nans, whole.num_nans)
    assert done.logprobs_tensors.logprobs.shape == whole.logprobs_tensors.logprobs.shape
    if len(seen) > 2:
        assert done.logprobs_tensors.cu_num_generated_tokens == batch.cu_num_logits_np.tolist()
    for request, row in zip(batch.expanded_idx_mapping.tolist(), range(len(logits)), strict=True):
        width = request + 1 if request % 2 == 0 else 0
        for name in ("logprob_token_ids", "logprobs"):
            one, other = (getattr(all_of.logprobs_tensors, name)[row, :width] for all_of in (done, whole))
            assert torch.equal(one, other)
        if width:
            assert done.logprobs_tensors.selected_token_ranks[row] == whole.logprobs_tensors.selected_token_ranks[row]


def test_drafts_are_drawn_with_the_models_noise() -> None:
    def newer(logits: int, *, is_drafting: bool, use_fp64: bool) -> tuple[int, bool, bool]:
        return logits, is_drafting, use_fp64

    def older(logits: int, *, use_fp64: bool) -> tuple[int, bool]:
        return logits, use_fp64

    drawn = speculation.with_the_models_noise(newer)
    assert drawn(3, is_drafting=True, use_fp64=False) == (3, False, False)
    assert drawn(3, is_drafting=True, use_fp64=True, logits_cache=1, logits_cache_col=2) == (3, False, True)
    assert speculation.with_the_models_noise(older) is older


def test_tokens_behind_a_stop_string_and_their_logprobs_are_dropped() -> None:
    """As vLLM before 0.32 needs it; with fakes of its detokenizer and of its processor of logprobs."""
    seen: list[tuple[list[int], bool]] = []

    def update(_: object, tokens: list[int], stop_terminated: bool) -> str | None:
        seen.append((tokens, stop_terminated))
        return "stop" if 7 in tokens else None

    tokens = [5, 6, 7, 8, 9]
    assert speculation.token_by_token(update)(None, tokens, True) == "stop"
    assert (tokens, seen) == ([5, 6, 7], [([5], False), ([6], False), ([7], False)])
    taken: list[Any] = []
    rows = np.arange(10).reshape(5, 2)
    output = SimpleNamespace(new_token_ids=tokens, new_logprobs=LogprobsLists(rows, rows / 2, rows[:, 0]))
    speculation.of_kept_tokens(lambda _, output: taken.append(output.new_logprobs))(None, output)
    assert [part.tolist() for part in taken[0][:3]] == [rows[:3].tolist(), (rows[:3] / 2).tolist(), [0, 2, 4]]
    assert speculation.token_by_token(update)(None, [5, 6], True) is None
    assert seen[3:] == [([5], False), ([6], True)]


@pytest.mark.parametrize(
    ("method", "device", "attention", "found"),
    [
        ("ngram", "cpu", "auto", []),
        ("eagle3", "cpu", "auto", []),
        ("medusa", "cpu", "auto", []),
        ("medusa", "cuda", "auto", ["speculative decoding with medusa on a GPU"]),
        ("ngram_gpu", "cpu", "auto", ["speculative decoding with ngram_gpu on a CPU"]),
        ("ngram_gpu", "cuda", "auto", []),
        ("eagle", "cuda", "auto", []),
        ("suffix", "cuda", "auto", []),
        ("mlp_speculator", "cpu", "auto", ["speculative decoding with mlp_speculator"]),
        ("dspark", "cuda", "auto", ["speculative decoding with dspark"]),
        ("extract_hidden_states", "cuda", "auto", ["speculative decoding with extract_hidden_states"]),
        ("a later one", "cpu", "auto", ["speculative decoding with a later one"]),
        ("ngram", "cuda", "auto", []),
        ("ngram", "cuda", "flex", ["speculative decoding beside FlexAttention"]),
    ],
)
def test_drafters_that_have_not_run_are_refused_by_name(
    method: str, device: str, attention: str, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ATTENTION.name, attention)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method=method),
        device_config=SimpleNamespace(device_type=device),
        reasoning_config=None,
        parallel_config=SimpleNamespace(pipeline_parallel_size=1, tensor_parallel_size=1, data_parallel_size=1),
        model_config=SimpleNamespace(is_moe=False, enable_prompt_embeds=False),
    )
    rows = [feature for feature in coverage.REFUSED if "peculative" in feature.name]
    assert [name for name in (feature.found(config) for feature in rows) if name] == found
    config.reasoning_config = object()
    config.structured_outputs_config = SimpleNamespace(reasoning_parser="qwen3", enable_in_reasoning=False)
    assert [name for name in (feature.found(config) for feature in rows) if name] == found


BUDGET, GRAMMAR = "a thinking budget", "a grammar behind thoughts"


@pytest.mark.parametrize(
    ("asked", "settings", "device", "refused"),
    [
        ({}, {}, "cpu", ""),
        ({"thinking_token_budget": 3}, {}, "cpu", BUDGET),
        ({"thinking_token_budget": 0}, {"reasoning_parser": ""}, "cuda", BUDGET),
        ({"thinking_token_budget": 3}, {"drafts": None}, "cpu", ""),
        ({"structured_outputs": object()}, {}, "cpu", ""),
        ({"structured_outputs": object()}, {}, "cuda", GRAMMAR),
        ({"structured_outputs": object()}, {"version": "0.33.0"}, "cpu", GRAMMAR),
        ({"structured_outputs": object()}, {"reasoning_parser": ""}, "cuda", ""),
        ({"structured_outputs": object()}, {"enable_in_reasoning": True}, "cuda", ""),
        ({"structured_outputs": object()}, {"drafts": None}, "cuda", ""),
    ],
)
def test_a_request_that_counts_a_thoughts_tokens_is_refused_beside_drafts_where_that_has_not_run(
    asked: dict[str, Any],
    settings: dict[str, Any],
    device: str,
    refused: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"reasoning_parser": "qwen3", "enable_in_reasoning": False, "drafts": object(), "version": "0.32.0"}
    given |= settings
    monkeypatch.setattr(patch_points, "installed_version", lambda: given["version"])
    config = SimpleNamespace(
        speculative_config=given["drafts"],
        structured_outputs_config=SimpleNamespace(**given),
        device_config=SimpleNamespace(device_type=device),
    )
    params = SimpleNamespace(**{"thinking_token_budget": None, "structured_outputs": None} | asked)
    said = thoughts.objection(params, config)
    assert said.startswith(refused)
    assert bool(said) is bool(refused)
    assert thoughts.objection(None, config) == ""

    class Refused(ValueError):
        pass

    monkeypatch.setattr(patch_points.VALIDATION_ERROR.module(), "VLLMValidationError", Refused)
    process = refusals.of_requests(lambda self, request: request, thoughts.problem)
    request = SimpleNamespace(sampling_params=params)
    if not refused:
        assert process(SimpleNamespace(vllm_config=config), request) is request
        return
    with pytest.raises(Refused, match=f"does not cover {refused} beside speculative decoding"):
        process(SimpleNamespace(vllm_config=config), request)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("method", ["ngram", "eagle3", "draft_model"])
def test_prompts_that_are_embeddings_are_refused_beside_drafts_but_of_ngrams_on_a_cpu(method: str, device: str) -> None:
    [row] = [one for one in coverage.REFUSED if one.name.startswith("Embeddings as prompts beside spec")]

    def found(embeds: bool, speculation: Any) -> str | None:
        return row.found(
            SimpleNamespace(
                model_config=SimpleNamespace(enable_prompt_embeds=embeds),
                speculative_config=speculation,
                device_config=SimpleNamespace(device_type=device),
            )
        )

    drafts = SimpleNamespace(method=method)
    named = f"embeddings as prompts beside speculative decoding with {method}"
    assert found(True, drafts) == (None if (method, device) == ("ngram", "cpu") else named)
    assert found(True, None) is found(False, drafts) is None


def test_every_method_of_the_installed_vllm_is_covered_or_refused_by_name() -> None:
    from vllm.config.speculative import MTPModelTypes, SpeculativeMethod

    aliases = set(get_args(MTPModelTypes)) - {"mtp"}  # vLLM makes mtp of them before it asks
    refused = {"dspark", "extract_hidden_states", "mlp_speculator"}
    assert set(get_args(SpeculativeMethod)) - aliases <= {*coverage.RAN.drafters, *refused}
    assert {*coverage.RAN.mtp_models} <= aliases


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"method": "mtp", "model": "mimo_mtp"}, None),
        ({"method": "mtp", "model": "qwen3_next_mtp"}, None),
        ({"method": "mtp", "model": "ernie_mtp"}, None),
        ({"method": "mtp", "model": "ernie_mtp", "device": "cuda"}, None),
        ({"method": "mtp", "model": "gemma4_mtp"}, None),
        (
            {"method": "mtp", "model": "gemma4_mtp", "centroids": True},
            "speculative decoding with mtp of gemma4_mtp with centroids on a CPU",
        ),
        ({"method": "mtp", "model": "gemma4_mtp", "centroids": True, "device": "cuda"}, None),
        (
            {"method": "mtp", "model": "gemma4_mtp", "quantization": "fp8"},
            "speculative decoding with mtp of gemma4_mtp with quantisation fp8",
        ),
        ({"method": "mtp", "model": "exaone_moe_mtp"}, "speculative decoding with mtp of exaone_moe_mtp"),
        ({"method": "mtp", "model": "qwen3_next_mtp", "device": "cuda"}, None),
        ({"method": "eagle3", "parallel_drafting": True}, "parallel drafts of eagle3"),
        ({"method": "draft_model", "use_heterogeneous_vocab": True}, "a draft model with another vocabulary"),
    ],
)
def test_what_a_covered_method_has_not_run_with_is_refused_by_name(options: dict[str, Any], found: str | None) -> None:
    device, model = (options.pop(name, default) for name, default in (("device", "cpu"), ("model", "llama")))
    ordered = {"use_ordered_embeddings": options.pop("centroids", False)}
    quantised = options.pop("quantization", None)
    draft = SimpleNamespace(hf_config=SimpleNamespace(model_type=model, **ordered), quantization=quantised)
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(draft_model_config=draft, **options),
        device_config=SimpleNamespace(device_type=device),
    )
    [row] = [feature for feature in coverage.REFUSED if feature.name == "Speculative decoding with another drafter"]
    assert row.found(config) == found


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({}, None),
        ({"architectures": ["DFlashLagunaForCausalLM"]}, None),
        ({"layer_types": ["sliding_attention"] * 2}, None),
        ({"device": "cuda"}, "speculative decoding with dflash and vLLM 0.32.0"),
        ({"device": "cuda", "version": "0.33.0"}, None),
        (
            {"device": "cuda", "version": "0.33.0", "cache_dtype": "fp8"},
            "speculative decoding with dflash and a KV cache in fp8 on a GPU",
        ),
        (
            {"device": "cuda", "version": "0.33.0", "target": {"dtype": "torch.float16"}},
            "speculative decoding with dflash in float16 on a GPU",
        ),
        ({"version": "0.31.0"}, "speculative decoding with dflash and vLLM 0.31.0"),
        ({"architectures": ["DFlash2DraftModel"]}, "speculative decoding with dflash of DFlash2DraftModel"),
        ({"workers": 2}, "speculative decoding with dflash by 2 workers"),
        ({"quantization": "fp8"}, "drafts of dflash with quantisation fp8"),
        ({"target": {"quantization": "fp8"}}, "speculative decoding with dflash and quantisation fp8"),
        ({"target": {"architecture": "MiMoForCausalLM"}}, "speculative decoding with dflash for MiMoForCausalLM"),
        (
            {"cache_dtype": "fp8_per_token_head"},
            "speculative decoding with dflash and a KV cache in fp8_per_token_head",
        ),
        ({"arithmetic": "exact"}, "speculative decoding with dflash in exact arithmetic"),
        (
            {"attention": "flex"},
            "speculative decoding with dflash and VLLM_BATCH_INVARIANT_ATTENTION=flex",
        ),
        (
            {"layer_types": ["sliding_attention", "full_attention"]},
            "drafts of dflash with full_attention and sliding_attention",
        ),
    ],
)
def test_draft_models_of_dflash_that_have_not_run_are_refused_by_name(
    options: dict[str, Any], found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = {
        "device": "cpu", "untried": False, "version": "0.32.0", "architectures": ["DFlashDraftModel"],
        "quantization": None, "layer_types": None, "workers": 1, "target": {}, "cache_dtype": "auto",
        "arithmetic": "", "attention": "",
    } | options  # fmt: skip
    for variable, name in ((ARITHMETIC, "arithmetic"), (ATTENTION, "attention")):
        if given[name]:
            monkeypatch.setenv(variable.name, given[name])
    target = {"architecture": "Qwen3ForCausalLM", "quantization": None, "dtype": "torch.bfloat16"} | given["target"]
    monkeypatch.setattr(patch_points, "installed_version", lambda: given["version"])
    monkeypatch.setenv(UNTRIED.name, "1" if given["untried"] else "0")
    draft = SimpleNamespace(
        architectures=given["architectures"],
        quantization=given["quantization"],
        hf_config=SimpleNamespace(layer_types=given["layer_types"]),
    )
    config = SimpleNamespace(
        speculative_config=SimpleNamespace(method="dflash", draft_model_config=draft, parallel_drafting=True),
        model_config=SimpleNamespace(**target),
        cache_config=SimpleNamespace(cache_dtype=given["cache_dtype"]),
        parallel_config=SimpleNamespace(tensor_parallel_size=given["workers"]),
        device_config=SimpleNamespace(device_type=given["device"]),
    )
    [row] = [feature for feature in coverage.REFUSED if feature.name == "Speculative decoding with another drafter"]
    assert row.found(config) == found


@pytest.mark.parametrize(
    ("asks", "method", "is_refused"), [(True, "eagle3", True), (True, "dflash", False), (False, "ngram", False)]
)
def test_keys_after_a_token_are_refused_but_where_dflash_asks_for_them(
    asks: bool, method: str, is_refused: bool
) -> None:
    [row] = [feature for feature in coverage.REFUSED if "use_non_causal" in feature.name]
    speculation = SimpleNamespace(method=method)
    config = SimpleNamespace(attention_config=SimpleNamespace(use_non_causal=asks), speculative_config=speculation)
    assert (row.found(config) is not None) is is_refused


class BadWords:
    """As the second runner's of vLLM 0.26: behind an output come the inputs of a request's rows, from the first on."""

    output, word = [4, 5], [6, 7, 8]

    def apply_bad_words(self, logits, requests, requests_np, input_ids, positions):
        for row, position in enumerate(positions.tolist()):
            first = row - position
            seen = [*self.output, *input_ids[first : first + position].tolist()]
            if seen[-2:] == self.word[:-1]:
                logits[row, self.word[-1]] = -torch.inf


@pytest.mark.parametrize("is_mended", [False, True])
def test_bad_words_are_found_in_the_drafts_before_a_row(is_mended: bool) -> None:
    state = type("State", (BadWords,), {})
    if is_mended:
        speculation.bad_words_see_drafts(state)
    inputs, positions = (
        torch.tensor([5, 6, 7, 5, 6, 7]),
        torch.tensor([0, 1, 2, 0, 1, 2]),
    )  # the last output, two drafts
    logits = torch.zeros(6, 9)
    state().apply_bad_words(logits, None, None, inputs, positions)
    masked = [row for row in range(6) if logits[row, 8] == -torch.inf]
    assert (masked == [2, 5]) is is_mended

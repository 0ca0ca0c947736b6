"""A draft model's CUDA graphs: which there are, that their plans fit, and that a draft is the one without them."""

from collections.abc import Iterator
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.integration.test_cuda_graphs import HEADS, STEP, config_of, default_sizes, planners  # noqa: F401 - a fixture
from vllm_batch_invariant.integration import reviews
from vllm_batch_invariant.integration.engine import draft_graphs
from vllm_batch_invariant.integration.engine.cuda_graphs import most_tokens, put, sizes
from vllm_batch_invariant.integration.layers.attention import Metadata
from vllm_batch_invariant.integration.reviews import patch_points

pytest.importorskip("vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator")

DRAFTS = 3
VOCABULARY = 997
PAGE, PAGES, SLOTS, LONGEST = 4, 12, 9, 40
OFF = 10**6
"""What sampling gives a row that is padding."""


@pytest.fixture
def drafter(monkeypatch: pytest.MonkeyPatch) -> type:
    """vLLM's class, with the graphs of the mode."""
    point = patch_points.DRAFT_MODEL
    own = type(point.attribute, (point.get(),), {})
    monkeypatch.setattr(point.module(), point.attribute, own)
    draft_graphs.install()
    return own


def manager_of(graphs: list[Any]) -> Any:
    """vLLM's manager, as far as it chooses among graphs."""
    kind = patch_points.GRAPH_MANAGER.get()
    manager = kind.__new__(kind)
    manager._graphs_captured, manager._lora_dispatch_map = True, {}
    put(manager, graphs)
    return manager


def steps(most_requests: int) -> Iterator[list[int]]:
    """Scheduled tokens of each request."""
    for requests in sorted({1, 2, 3, most_requests - 1, most_requests} & set(range(1, most_requests + 1))):
        for most in (1, 2, 4, 5, 8, 9, 33, 500):
            yield [most] * requests
            yield [1] * (requests - 1) + [most]
            yield [1 + DRAFTS] * (requests - 1) + [most]


def test_the_installed_drafter_is_the_one_that_was_read(drafter: type) -> None:
    assert drafter._prefill.__module__ == draft_graphs.__name__
    assert drafter.capture is draft_graphs.capture
    assert drafter.decode_cudagraph_manager is None


def test_another_drafter_is_left_alone(drafter: type, monkeypatch: pytest.MonkeyPatch) -> None:
    point = patch_points.DRAFT_MODEL
    own = type(point.attribute, (point.get().__mro__[1],), {})
    monkeypatch.setattr(point.module(), point.attribute, own)
    monkeypatch.setitem(reviews.functions("drafter")[point.modules[0]], f"{point.attribute}.propose", ("another",))
    draft_graphs.install()
    assert own._prefill.__module__ != draft_graphs.__name__


@pytest.mark.parametrize("slots", [1, 2, 5, 64, 100, 300])
@pytest.mark.parametrize("model", HEADS)
def test_every_step_of_a_draft_model_is_planned_as_its_graph_was_captured(slots: int, model: str, planners) -> None:  # noqa: F811
    planner, lengths, longest = planners(model, slots), (2 + DRAFTS,), 1 + DRAFTS
    largest = max(sizes(default_sizes(slots * longest), slots, STEP, longest))
    first = manager_of(draft_graphs.first_graphs(largest, slots, lengths))
    more = manager_of(draft_graphs.next_graphs(largest, slots))
    group = planner.shape.queries_per_kv

    def captured(graph: Any) -> Any:
        each = graph.num_tokens // graph.num_reqs
        longest = max(each, graph.num_tokens - (graph.num_reqs - 1) * each)
        numbers = torch.zeros(graph.num_reqs + 1, dtype=torch.int32)
        most = most_tokens(graph.num_reqs, graph.num_tokens, longest, lengths)
        return planner.plan(numbers, numbers[1:], graph.num_tokens, most)

    for scheduled in steps(slots):
        read = [1 + tokens for tokens in scheduled]
        graph = draft_graphs._chosen(first, len(read), sum(read), read[0] if len({*read}) == 1 else None)
        if graph is None:
            assert sum(read) > largest
            continue
        assert graph.num_reqs >= len(read)
        assert graph.num_tokens >= sum(read)
        uniform = {*read} == set(lengths) and len(read) * read[0] <= largest
        assert not uniform or graph.num_tokens in (graph.num_reqs * read[0], sum(read))
        plan = captured(graph)
        small = [tokens * group for tokens in read if tokens * group <= 16]
        assert not small or (plan.has_decode and plan.partial_rows >= max(small))
        assert len(small) == len(read) or plan.prefill_ctas
    for requests in range(1, min(slots, largest) + 1):
        graph = draft_graphs._chosen(more, requests, requests, 1)
        assert graph.num_reqs == graph.num_tokens >= requests
        assert captured(graph).partial_rows >= min(group, 16)


class Cache:
    """One layer whose keys are tokens, and whose hidden state is a hash of all that a row sees."""

    def __init__(self, tables: torch.Tensor) -> None:
        self.tables, self.keys = tables, torch.zeros(int(tables.max() + 1) * PAGE, dtype=torch.int64)

    def run(
        self, input_ids: torch.Tensor, positions: torch.Tensor, metadata: Any, slots: dict[str, torch.Tensor], _: object
    ) -> torch.Tensor:
        written = slots["layer"][: len(input_ids)]
        assert not bool((input_ids >= VOCABULARY).any())
        self.keys[written[written >= 0]] = input_ids[written >= 0].to(torch.int64)
        hidden = torch.full((len(input_ids), 1), torch.nan, dtype=torch.float64)
        starts = metadata.query_start_loc.tolist()
        for request, kv_len in enumerate(metadata.seq_lens.tolist()):
            first, end = starts[request : request + 2]
            assert metadata.table[request] >= 0 or kv_len == starts[request + 1] - starts[request] == 0
            places = self.tables[metadata.table[request]][:, None] * PAGE + torch.arange(PAGE)
            for row in range(first, end):
                seen = kv_len - (end - 1 - row)
                value = int(positions[row])
                for key in self.keys[places.flatten()[:seen]].tolist():
                    value = (31 * value + key + 1) % 1_000_003
                hidden[row] = value
        return hidden


def drafting(kind: type, graphs: bool, seed: int) -> Any:
    """A drafter for requests in slots that are not those of the step, whose device is a CPU."""
    chance = torch.Generator().manual_seed(seed)
    self = kind.__new__(kind)
    tables = 1 + torch.randperm(SLOTS * PAGES, generator=chance).view(SLOTS, PAGES)
    cache = Cache(tables)
    cache.keys.copy_(torch.randint(VOCABULARY, cache.keys.shape, generator=chance))

    def compute_slot_mappings(
        indices: torch.Tensor,
        starts: torch.Tensor,
        positions: torch.Tensor,
        tokens: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        out = self.block_tables.slot_mappings if out is None else out
        out.fill_(-1)
        for request, slot in enumerate(indices.tolist()):
            rows = slice(*starts[request : request + 2].tolist())
            if slot >= 0:
                out[0, rows] = tables[slot][positions[rows] // PAGE] * PAGE + positions[rows] % PAGE
        return out[:, :tokens]

    def metadata_of(num_reqs: int, batch_desc: Any, **_: object) -> Any:
        padded = batch_desc.num_reqs
        self.planned.append((padded, batch_desc.num_tokens))
        buffers = self.input_buffers
        return SimpleNamespace(
            query_start_loc=buffers.query_start_loc[: padded + 1],
            seq_lens=buffers.seq_lens[:padded],
            table=self.idx_mapping[:padded],
        )

    def sample_draft(
        hidden: torch.Tensor, positions: torch.Tensor, indices: torch.Tensor, *others: Any
    ) -> torch.Tensor:
        keyed = hidden[:, 0] + 13 * positions + 101 * indices + 7 * others[2]
        return torch.where(indices >= 0, keyed.nan_to_num().to(torch.int64) % VOCABULARY, OFF)

    tokens = SLOTS * LONGEST
    self.__dict__ |= {
        "max_num_reqs": SLOTS,
        "num_speculative_steps": DRAFTS,
        "vllm_config": SimpleNamespace(model_config=SimpleNamespace(max_model_len=PAGES * PAGE)),
        "max_model_len": PAGES * PAGE,
        "kv_cache_config": SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=["layer"])]),
        "block_tables": SimpleNamespace(
            compute_slot_mappings=compute_slot_mappings, slot_mappings=torch.zeros(1, tokens, dtype=torch.int64)
        ),
        "input_buffers": SimpleNamespace(
            input_ids=torch.zeros(tokens, dtype=torch.int32),
            positions=torch.zeros(tokens, dtype=torch.int64),
            query_start_loc=torch.zeros(SLOTS + 1, dtype=torch.int32),
            seq_lens=torch.zeros(SLOTS, dtype=torch.int32),
        ),
        "expanded_input_ids": torch.zeros(tokens, dtype=torch.int32),
        "expanded_positions": torch.zeros(tokens, dtype=torch.int64),
        "expanded_slot_mappings": torch.zeros(1, tokens, dtype=torch.int64),
        "last_token_indices": torch.zeros(SLOTS, dtype=torch.int64),
        "arange_gpu": torch.arange(SLOTS + 1, dtype=torch.int32),
        "arange_np": torch.arange(SLOTS + 1, dtype=torch.int32).numpy(),
        "current_draft_step": torch.tensor(0),
        "draft_tokens": torch.zeros(SLOTS, DRAFTS, dtype=torch.int64),
        "idx_mapping": torch.full((SLOTS,), -1),
        "temperature": None,
        "seeds": None,
        "draft_logits": None,
        "sample_draft": sample_draft,
        "_run_model": cache.run,
        "_build_attn_metadata": metadata_of,
        "_build_uniform_attn_metadata": metadata_of,
        "planned": [],
        "replayed": [],
    }
    if graphs:
        first, more = draft_graphs.first_graphs(32, SLOTS, (2 + DRAFTS,)), draft_graphs.next_graphs(32, SLOTS)
        self.prefill_cudagraph_manager = _manager(self, first, draft_graphs.draft_first)
        self.decode_cudagraph_manager = _manager(self, more, draft_graphs.draft_next)
    return self


def _manager(self: Any, graphs: list[Any], step: Any) -> Any:
    manager = manager_of(graphs)

    def run_fullgraph(_: object, graph: Any) -> None:
        self.replayed.append((step.__name__, graph.num_reqs, graph.num_tokens))
        step(self, graph)

    manager.run_fullgraph = MethodType(run_fullgraph, manager)
    return manager


def drafter_inputs(
    input_buffers: Any, input_batch: Any, last_sampled: torch.Tensor, num_rejected: torch.Tensor, **buffers: Any
) -> int:
    """What vLLM's kernel writes, which has no CPU's version."""
    starts = input_batch.query_start_loc.tolist()
    requests, longest = input_batch.num_reqs, buffers["max_model_len"]
    buffers["last_token_indices"].zero_()
    input_buffers.seq_lens.zero_()
    for request in range(requests):
        first, end = starts[request : request + 2]
        kept, out = end - first - int(num_rejected[request]), first + request
        position = int(input_batch.positions[first])
        ids = [
            *input_batch.input_ids[first : first + kept].tolist(),
            int(last_sampled[input_batch.idx_mapping[request]]),
        ]
        ids += [0] * (end - first + 1 - len(ids))
        buffers["expanded_input_ids"][out : end + request + 1] = torch.tensor(ids, dtype=torch.int32)
        places = torch.arange(position, position + len(ids)).clamp(max=longest - 1)
        buffers["expanded_positions"][out : end + request + 1] = places
        buffers["last_token_indices"][request] = out + kept
        input_buffers.query_start_loc[request] = out
        input_buffers.seq_lens[request] = min(int(input_batch.seq_lens[request]) + 1, longest)
    input_buffers.query_start_loc[requests:] = starts[requests] + requests
    return starts[requests] + requests


def step_of(scheduled: list[int], seed: int) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """A step's batch, how many drafts of each request were rejected, and the last sampled token by slot."""
    chance = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(scheduled)
    context = torch.randint(0, 20, lengths.shape, generator=chance)
    context[-1] = PAGES * PAGE - lengths[-1]
    starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    positions = torch.cat([torch.arange(int(c), int(c + n)) for c, n in zip(context, lengths, strict=True)])
    batch = SimpleNamespace(
        num_reqs=len(scheduled),
        num_tokens=sum(scheduled),
        num_scheduled_tokens=lengths.numpy(),
        query_start_loc=starts,
        query_start_loc_np=starts.numpy(),
        seq_lens=(context + lengths).to(torch.int32),
        seq_lens_cpu_upper_bound=(context + lengths).to(torch.int32),
        idx_mapping=torch.randperm(SLOTS, generator=chance)[: len(scheduled)],
        input_ids=torch.randint(VOCABULARY, positions.shape, generator=chance, dtype=torch.int32),
        positions=positions,
    )
    rejected = torch.randint(0, 10, lengths.shape, generator=chance) % lengths
    return batch, rejected, torch.randint(VOCABULARY, (SLOTS,), generator=chance)


STEPS = {
    "one verify step": [4],
    "verify steps, padded": [4] * 5,
    "verify steps without padding": [4] * 4,
    "more verify steps than graphs": [4] * 7,
    "mixed, padded": [1, 4, 4, 9, 2],
    "without drafts": [1] * 9,
    "a prompt": [17],
    "more than a graph has": [4, 27],
}


def drafts_of(kind: type, graphs: bool, scheduled: list[int]) -> tuple[list[torch.Tensor], list[str]]:
    """The drafts of three steps, and what was replayed: what one leaves in the buffers is there in the next."""
    self, drafts = drafting(kind, graphs, seed=3), []
    for number in range(3):
        requests = len(scheduled) if number != 1 else 1
        batch, rejected, sampled = step_of(scheduled[:requests], 10 + number)
        self.idx_mapping.fill_(-1)
        self.idx_mapping[:requests] = batch.idx_mapping
        self._prefill(batch, rejected, sampled, requests, False, None)
        self._multi_step_decode(batch, rejected, requests, False, None)
        drafts.append(self.draft_tokens[:requests].clone())
    return drafts, [name for name, *_ in self.replayed]


@pytest.fixture
def on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patch_points.DRAFT_INPUTS.module(), patch_points.DRAFT_INPUTS.attribute, drafter_inputs)


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("scheduled", STEPS.values(), ids=STEPS.keys())
def test_drafts_by_graphs_are_those_of_vllms_methods(drafter: type, scheduled: list[int]) -> None:
    (theirs, launched), (ours, replayed) = (drafts_of(drafter, graphs, scheduled) for graphs in (False, True))
    assert not launched
    assert replayed.count("draft_next") == 3 * (DRAFTS - 1)
    assert "draft_first" in replayed
    for expected, found in zip(theirs, ours, strict=True):
        assert found.tolist() == expected.tolist()
        assert bool((found < VOCABULARY).all())
        assert len(set(found.flatten().tolist())) > 1


@pytest.mark.usefixtures("on_a_cpu")
@pytest.mark.parametrize("step", ["draft_first", "draft_next"])
def test_drafts_by_graphs_that_see_a_key_less_are_others(
    drafter: type, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    run = Cache.run

    def short(
        self: Cache, input_ids: torch.Tensor, positions: torch.Tensor, metadata: Any, *others: Any
    ) -> torch.Tensor:
        if (metadata.query_start_loc[-1] > len(metadata.seq_lens)) == (step == "draft_first"):
            metadata.seq_lens = (metadata.seq_lens - 1).clamp(min=0)
        return run(self, input_ids, positions, metadata, *others)

    scheduled = STEPS["verify steps, padded"]
    theirs, _ = drafts_of(drafter, False, scheduled)
    monkeypatch.setattr(Cache, "run", short)
    ours, _ = drafts_of(drafter, True, scheduled)
    assert [one.tolist() for one in ours] != [one.tolist() for one in theirs]


def test_graphs_are_captured_with_padding_alone(drafter: type, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    kind, modes, captured = patch_points.GRAPH_MANAGER.get(), patch_points.CUDAGRAPH_MODE.get(), []
    worker = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(patch_points.GRAPH_MANAGER.module(), "get_pp_group", lambda: worker)
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: None)

    def capture(manager: Any, create_forward_fn: Any, _: str) -> None:
        for graph in manager._capture_descs[modes.FULL]:
            for warmup in (True, False):
                create_forward_fn(graph, warmup)(modes.NONE)
            captured.append((graph.num_tokens, graph.num_reqs, graph.uniform_token_count))

    monkeypatch.setattr(kind, "capture", capture)
    self, builder = drafting(drafter, False, seed=3), SimpleNamespace(verify=())
    model = self.vllm_config.model_config
    self.vllm_config = config_of([1, 2, 4, 8, 16, 32], SLOTS, DRAFTS, None)
    self.vllm_config.model_config = model
    self.device, self.dp_size = torch.device("cpu"), 1
    self.attn_groups = [[SimpleNamespace(metadata_builders=[builder])]]
    self.init_cudagraph_manager(modes.NONE)
    self.capture()
    self.attn_groups.append([SimpleNamespace(metadata_builders=[SimpleNamespace()])])  # another backend's
    self.init_cudagraph_manager(modes.FULL)
    self.capture()
    assert not captured
    self.attn_groups.pop()
    self.init_cudagraph_manager(modes.FULL)
    keys = self._run_model.__self__.keys
    before = keys.clone()
    self.capture()
    assert builder.verify == (2 + DRAFTS,)
    assert torch.equal(keys, before)
    assert captured == [
        *((32, 9, None), (24, 9, None), (20, 4, 5), (16, 8, None), (10, 2, 5), (8, 4, None), (5, 1, 5)),
        *((4, 2, None), (2, 1, None), (9, 9, 1), (8, 8, 1), (4, 4, 1), (2, 2, 1), (1, 1, 1)),
    ]
    assert self.planned == [(requests, tokens) for tokens, requests, _ in captured for _ in range(2)]


@pytest.mark.parametrize(("tokens", "most", "causal"), [(3, 1, True), (15, 5, False), (15, 5, True)])
def test_a_further_step_of_a_drafter_is_planned_by_what_its_graph_left_in_the_buffers(
    tokens: int, most: int, causal: bool
) -> None:
    """vLLM asks for it between the steps that one graph of an EAGLE head has, and in that of DFlash, whose requests
    have a block of tokens each; a target's layers, which may be beside the drafter's, are not in it.
    """
    from vllm_batch_invariant.integration.layers.attention_cuda import PlannedMetadataBuilder

    planned = []
    builder = PlannedMetadataBuilder.__new__(PlannedMetadataBuilder)
    builder._sees_all = False
    builder._planners = {
        (8, None, of_step): SimpleNamespace(plan=lambda *given, of_step=of_step: planned.append((of_step, *given)))
        for of_step in (True, False)
    }
    starts, lengths = torch.arange(4), torch.tensor([5, 6, 0])
    builder.update_draft_decode_metadata(Metadata(tokens, starts, lengths, torch.zeros(3, 1), causal=causal))
    assert planned == [(causal, starts, lengths, tokens, most, False)]

"""Which numbers of tokens get a CUDA graph, and that every step finds what its graph was captured with."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from vllm_batch_invariant.integration.engine import cuda_graphs
from vllm_batch_invariant.integration.engine.cuda_graphs import (
    largest_size,
    most_tokens,
    most_tokens_of_a_step,
    sizes,
    verify_lengths,
    weights_of_layer,
)
from vllm_batch_invariant.ops.attention import AttentionReduction


@pytest.mark.parametrize(("requests", "largest"), [(1024, 512), (256, 512), (64, 128), (50, 96), (5, 8)])
def test_vllms_sizes_are_followed_by_larger_ones(requests, largest):
    captured = [1, 2, 4, *range(8, largest + 1, 8)]
    found = sizes(captured, requests, 8192)
    assert {*captured, requests} <= set(found)
    assert max(found) == 2048
    assert found == sorted(set(found))


def test_no_size_is_above_a_steps_tokens():
    assert max(sizes([1, 2, 4, 8], 5, 300)) == 256
    assert sizes([1], 2048, 1) == [1]


def config_of_layers(heads: tuple[int, int, int], hidden: int, width: object, workers: int = 1, **kinds: bool):
    """What is read of a configuration, of so many heads over KV heads of a size."""
    of_model = {"is_moe": False, "is_hybrid": False, "use_mla": False} | kinds
    model = SimpleNamespace(
        hf_text_config=SimpleNamespace(intermediate_size=width),
        get_hidden_size=lambda: hidden,
        get_head_size=lambda: heads[2],
        get_num_attention_heads=lambda parallel: heads[0] // parallel.tensor_parallel_size,
        get_num_kv_heads=lambda parallel: max(1, heads[1] // parallel.tensor_parallel_size),
        **of_model,
    )
    return SimpleNamespace(model_config=model, parallel_config=SimpleNamespace(tensor_parallel_size=workers))


@pytest.mark.parametrize(
    ("layers", "largest"),
    [
        (config_of_layers((32, 8, 128), 4096, 12_288), 2048),
        (config_of_layers((16, 8, 128), 1024, 3072), 16_384),
        (config_of_layers((16, 8, 128), 2048, 6144), 8192),
        (config_of_layers((64, 8, 128), 5120, 25_600, workers=8), 6656),
        (config_of_layers((16, 8, 128), 1024, 3072, is_moe=True), 2048),
        (config_of_layers((16, 8, 128), 1024, 3072, use_mla=True), 2048),
        (config_of_layers((16, 8, 128), 1024, [3072, 6144]), 2048),
        (SimpleNamespace(model_config=None, parallel_config=None), 2048),
    ],
)
def test_longer_steps_of_small_layers_are_graphs_too(layers, largest):
    found = sizes([1, 2, 4, 8], 5, 16_384, largest_more=largest_size(weights_of_layer(layers)))
    assert max(found) == largest
    assert all(later <= 1.13 * former for former, later in pairwise(found) if former >= 2048)


@pytest.mark.parametrize(
    ("requests", "length", "largest"), [(1, 4096, 4096), (2, 8192, 16_384), (4, 40_960, 16_384), (3, 700, 2048)]
)
def test_no_graph_has_more_tokens_than_its_requests_have_pages_for(requests, length, largest):
    config = config_of_layers((16, 8, 128), 1024, 3072)
    config.model_config.max_model_len = length
    config.scheduler_config = SimpleNamespace(max_num_seqs=requests, max_num_batched_tokens=16_384)
    most, more = most_tokens_of_a_step(config), largest_size(weights_of_layer(config))
    found = sizes([1, 2, 2 * requests], requests, most, largest_more=more)
    assert max(found) == largest <= requests * length


@pytest.mark.parametrize("captured", [[], [1, 2, 4], [1, 8, 64, 1000]])
def test_a_users_sizes_are_kept(captured):
    assert sizes(captured, 256, 8192) == captured


HEADS = {"8b": (32, 8, 128), "0.6b": (16, 8, 128), "0.5b": (14, 2, 64), "MHA": (32, 32, 128), "MQA": (71, 1, 64)}
STEP = 2100
"""Tokens of a step at most: more than the largest graph has."""
SLOTS = (*range(1, 10), 63, 64, 65, *range(97, 105), 300, 1000)
"""Values of --max-num-seqs."""
GAPS = ([1, 2, 256], [8], [1, 64, 65, 2000], [3, 5, 7, 110])
"""Sizes that a user may choose."""
Rule = Callable[[int, int, int, tuple[int, ...]], int]


def default_sizes(slots: int) -> list[int]:
    """vLLM's of 0.26, which has none for the most requests of a step."""
    largest = min(2 * slots, 512)
    return [size for size in (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)) if size <= largest]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SimpleNamespace]:
    """Managers of CUDA graphs: vLLM's, with the graphs of the mode, for sizes, a number of requests and of drafts."""
    module = pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils")
    from vllm.platforms import current_platform

    monkeypatch.setattr(module, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    monkeypatch.setattr(type(current_platform), "get_global_graph_pool", lambda self: None)
    monkeypatch.setattr(module.CudaGraphManager, "_init_candidates", module.CudaGraphManager._init_candidates)
    cuda_graphs.install()
    return lambda *of_engine: manager_of(module.CudaGraphManager, *of_engine)


def config_of(captured: list[int], slots: int, drafts: int, fewer_drafts: int | None) -> SimpleNamespace:
    by_batch_size = fewer_drafts is not None and [(1, 4, drafts), (5, max(slots, 5), fewer_drafts)]
    return SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=slots),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=captured, max_cudagraph_capture_size=max(captured, default=0)
        ),
        parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=SimpleNamespace(
            num_speculative_tokens_per_batch_size=by_batch_size or None,
            uses_dynamic_speculative_decoding=lambda: bool(by_batch_size),
        )
        if drafts
        else None,
        num_speculative_tokens=drafts,
    )


def manager_of(
    kind: type,
    captured: list[int],
    slots: int,
    drafts: int = 0,
    fewer_drafts: int | None = None,
    loras: tuple[int, ...] = (0,),
) -> SimpleNamespace:
    from vllm.config import CUDAGraphMode

    config = config_of(captured, slots, drafts, fewer_drafts)
    manager = kind(config, torch.device("cpu"), CUDAGraphMode.FULL, 1 + drafts, [*loras])
    manager._graphs_captured = True
    return manager


def mixes(slots: int) -> Iterator[list[int]]:
    """Tokens of each request of a step."""
    for requests in sorted({1, 2, 3, slots - 1, slots} & set(range(1, slots + 1))):
        for most in (1, 2, 3, 4, 5, 8, 9, 16, 17, 40, 64, 500, 2047, 2048):
            for first in sorted({1, requests // 2, requests - 1} & set(range(requests))):
                mix = [1] * first + [most] * (requests - first)
                if sum(mix) <= STEP:
                    yield mix
            if requests * most <= STEP:
                yield [most] * requests
            if requests + most <= STEP:
                yield [most, *[1] * (requests - 1)]


@pytest.fixture
def planners(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, int], object]:
    """Those of attention, for 132 multiprocessors, whose kernel does nothing."""
    plan = pytest.importorskip("vllm_batch_invariant.ops.attention.plan")
    properties = SimpleNamespace(multi_processor_count=132, major=9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(plan, "plan_kernel", SimpleNamespace(run=lambda *_, **__: None))
    monkeypatch.setattr(plan, "PARTIAL_BYTES", 16 << 20)

    def planner(model: str, slots: int, keys: int = 100_000) -> object:
        heads, kv_heads, size = HEADS[model]
        shape = plan.AttentionShape(heads, kv_heads, size, torch.bfloat16, AttentionReduction.of_device("cuda"))
        return plan.Planner(shape, torch.device("cpu"), slots, STEP, keys)

    return planner


def plan_of(planner: object, rule: Rule, requests: int, tokens: int, most: int, verify: tuple[int, ...]) -> object:
    numbers = torch.zeros(requests + 1, dtype=torch.int32)
    return planner.plan(numbers, numbers[1:], tokens, rule(requests, tokens, most, verify))


def misfits(manager: SimpleNamespace, planner: object, rule: Rule) -> Iterator[str]:
    """Steps whose plan is not the one that their graph was captured with, or leaves a request out."""
    group, slots, verify = planner.shape.queries_per_kv, manager.max_num_reqs, verify_lengths(manager.vllm_config)
    captured = {}
    for graph in (one for descriptions in manager._capture_descs.values() for one in descriptions):
        # vLLM's dummy step: the same number of tokens for all requests, and what is left for the last.
        each, left = divmod(graph.num_tokens, graph.num_reqs)
        captured[graph] = plan_of(planner, rule, graph.num_reqs, graph.num_tokens, each + left, verify)
    for mix in mixes(slots):
        tokens, requests, most = sum(mix), len(mix), max(mix)
        for uniform in {None, most if min(mix) == most else None}:
            graph = manager.dispatch(requests, tokens, uniform, 0)
            replays = graph in captured
            requests_then, tokens_then = (graph.num_reqs, graph.num_tokens) if replays else (requests, tokens)
            plan = plan_of(planner, rule, requests_then, tokens_then, most, verify)
            if replays and plan != captured[graph]:
                yield f"{mix}: planned as {plan}, captured as {captured[graph]}"
            launched = captured.get(graph, plan)
            small = [one * group for one in mix if one * group <= 16]
            if small and not (launched.has_decode and launched.partial_rows >= max(small)):
                yield f"{mix}: requests of few rows, {launched}"
            if len(small) < len(mix) and not launched.prefill_ctas:
                yield f"{mix}: requests of many rows, {launched}"
            room = planner._decode_workspace(launched.partial_rows) * planner.shape.kv_heads * launched.partial_rows
            if room > len(planner.partial_m):
                yield f"{mix}: room for {room} rows of partial results in {len(planner.partial_m)}"


@pytest.mark.parametrize("model", HEADS)
@pytest.mark.parametrize("captured", [None, *GAPS], ids=str)
def test_every_step_is_planned_as_its_graph_was_captured(model, captured, planners, graphs):
    for slots in SLOTS if captured is None else (1, 5, 100, 300):
        of_graphs = captured or sizes(default_sizes(slots), slots, STEP)
        manager = graphs(of_graphs, slots)
        assert next(misfits(manager, planners(model, slots), most_tokens), None) is None, slots


@pytest.mark.parametrize("model", ["8b", "0.5b", "MHA"])
@pytest.mark.parametrize(
    ("drafts", "fewer"), [(1, None), (2, None), (3, None), (7, None), (7, 0), (7, 2)], ids=lambda number: f"k={number}"
)
def test_every_verify_step_is_planned_as_its_graph_was_captured(model, drafts, fewer, planners, graphs):
    for slots in (1, 2, 5, 64, 100, 300):
        longest = 1 + drafts
        captured = sizes(default_sizes(slots * longest), slots, STEP, longest)
        manager = graphs(captured, slots, drafts, fewer)
        assert next(misfits(manager, planners(model, slots), most_tokens), None) is None, slots
        for length in verify_lengths(manager.vllm_config):
            for requests in {1, slots} & set(range(max(captured) // length + 1)):
                graph = manager.dispatch(requests, requests * length, length, 0)
                assert (graph.num_reqs, graph.uniform_token_count) == (requests, length)


LORAS = {"one number": (0, 5), "numbers of their own": (0, 1, 2, 4, 5)}
"""Of four slots: what vLLM captures graphs for without --specialize-active-lora and with it."""


@pytest.mark.parametrize("loras", LORAS.values(), ids=LORAS)
@pytest.mark.parametrize("drafts", [0, 3])
def test_a_step_with_adapters_has_the_graph_of_one_without_for_as_many_adapters(loras, drafts, graphs):
    captured = [1, 2, 4, 8, 16, 24, 40]
    manager, without = graphs(captured, 5, drafts, None, loras), graphs(captured, 5, drafts)
    steps = {(len(mix), sum(mix), mix[0] if min(mix) == max(mix) else None) for mix in mixes(5) if sum(mix) <= 40}
    assert len(steps) > 20
    for active in range(5):
        case = min(one for one in loras if one >= active)
        for step in steps:
            graph = manager.dispatch(*step, active)
            assert graph == replace(without.dispatch(*step, 0), num_active_loras=case)
            assert graph in manager._capture_descs[graph.cg_mode]
    assert len(set(manager._capture_descs[graph.cg_mode])) == len(manager._capture_descs[graph.cg_mode])


@pytest.mark.parametrize("model", ["8b"])
def test_every_step_with_adapters_is_planned_as_its_graph_was_captured(model, planners, graphs):
    manager = graphs(default_sizes(64), 64, 0, None, (0, 5))
    assert next(misfits(manager, planners(model, 64), most_tokens), None) is None


def by_the_longest_query(requests: int, tokens: int, most: int, verify: tuple[int, ...]) -> int:
    return most


def test_a_mix_in_a_graph_of_as_many_requests_and_tokens_as_a_verify_step_has_does_not_fit(
    planners, graphs, monkeypatch
):
    """The most requests, with some tokens more: vLLM's graph of that size."""
    monkeypatch.setattr(cuda_graphs, "is_verify", lambda *_: False)
    manager = graphs([1, 2, 4, 8, 16, 20, 40], 5, 3)
    assert next(misfits(manager, planners("8b", 5), most_tokens), None) is not None


@pytest.mark.parametrize(("slots", "captured"), [(100, default_sizes(100)), (5, default_sizes(5)), (300, [1, 2, 512])])
def test_a_plan_that_follows_the_longest_query_does_not_fit_its_graph(slots, captured, planners, graphs):
    """A step of decode that is padded to more tokens than requests."""
    manager = graphs(captured, slots)
    assert next(misfits(manager, planners("8b", slots), by_the_longest_query), None) is not None


def test_a_request_with_several_tokens_in_a_step_with_no_more_tokens_than_requests_is_an_error():
    assert most_tokens(4, 4, 1) == 1
    assert most_tokens(4, 5, 1) == 5
    with pytest.raises(RuntimeError, match="2 of them of one"):
        most_tokens(4, 4, 2)


def test_a_step_of_as_many_tokens_as_a_verify_step_has_the_most_that_its_requests_have():
    assert most_tokens(4, 16, 4, (4,)) == 4
    assert most_tokens(4, 16, 13, (4,)) == 16
    assert most_tokens(4, 12, 3, (2, 4)) == 12
    assert most_tokens(4, 8, 2, (2, 4)) == 2

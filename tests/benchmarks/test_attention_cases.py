"""Keys, bytes and operations of a step; which cases there are."""

import pytest

from benchmarks.attention_cases import CASES, LAYER_CASES, LAYERS, SHAPES, Case, Request, cases_of, shape_name
from benchmarks.roofline import Work
from scripts import attention_heads
from tests.benchmarks.attention_fakes import DECODE, MIXED, PREFILL, SMALL


@pytest.mark.parametrize(("tokens", "context"), [(1, 1), (1, 100), (7, 7), (5, 12), (512, 16384)])
def test_the_pairs_of_a_request_are_the_keys_that_each_of_its_tokens_sees(tokens: int, context: int) -> None:
    seen = [position + 1 for position in range(context - tokens, context)]
    assert Request(tokens, context).pairs == sum(seen)


@pytest.mark.parametrize("window", [1, 3, 40])
@pytest.mark.parametrize(("tokens", "context"), [(1, 1), (1, 100), (7, 7), (5, 12), (60, 100)])
def test_a_window_counts_the_keys_in_it(tokens: int, context: int, window: int) -> None:
    seen = [min(window, position + 1) for position in range(context - tokens, context)]
    assert Request(tokens, context).pairs_in(window) == sum(seen)


def test_a_decode_reads_keys_and_values_of_its_kv_heads_and_its_query_and_writes_its_output() -> None:
    cache = 3 * 64 * 2 * 16 * 2 * 2
    assert cache == DECODE.cache_bytes
    assert Work(cache + 2 * 3 * 4 * 16 * 2, 4 * 16 * 4 * 3 * 64) == DECODE.work


def test_a_prefill_counts_the_visible_half_exactly() -> None:
    assert PREFILL.work.operations == 4 * 16 * 4 * (40 * 41 // 2)
    assert PREFILL.work.moved_bytes == 2 * 40 * 2 * 16 * 2 + 2 * 40 * 4 * 16 * 2


def test_a_mixed_step_adds_up() -> None:
    alone = [Case(SMALL, "mixed", (request,)).work for request in MIXED.requests]
    assert MIXED.work.operations == sum(work.operations for work in alone)
    assert MIXED.work.moved_bytes == sum(work.moved_bytes for work in alone)
    assert DECODE.decode_only
    assert not MIXED.decode_only


def test_a_case_is_named_by_its_largest_request_and_its_heads() -> None:
    heads = "heads=4 kv_heads=2 head=16 page=16 dtype=bf16"
    assert MIXED.text(16) == f"phase=mixed batch=3 tokens=20 context=48 {heads}"


def test_every_shape_has_every_kind_of_case_and_no_cache_is_too_large() -> None:
    assert {(case.shape, case.phase) for case in CASES} == {
        (shape, phase) for shape in SHAPES for phase in ("decode", "prefill", "chunk", "mixed")
    }
    assert {case.shape for case in LAYER_CASES} == set(LAYERS)
    assert max(case.cache_bytes for case in CASES) < 24e9
    every = (*CASES, *LAYER_CASES)
    assert len({case.text(16) for case in every}) == len(every)
    [largest] = cases_of(["llama-70b-tp8 batch=256 context=131072"])
    assert largest.cache_bytes == 256 * 131072 * 2 * 128 * 2
    assert not cases_of(["qwen3-8b batch=256 context=131072"])


def test_heads_of_every_size_that_the_page_on_gpus_has_are_measured_but_those_of_latent_attention() -> None:
    assert {shape.head_size for shape in (*SHAPES, *LAYERS)} == set(attention_heads.SIZES)
    of_size = {case.phase for case in LAYER_CASES if case.shape.head_size in (96, 512)}
    assert of_size == {"decode", "prefill", "chunk"}


def test_cases_are_found_by_all_words_of_one_filter() -> None:
    found = cases_of(["qwen3-8b decode batch=1", "chunk"])
    assert {(case.shape.name, case.phase, len(case.requests)) for case in found} == {
        ("qwen3-8b", "decode", 1), *((shape.name, "chunk", 1) for shape in (*SHAPES, *LAYERS) if not shape.encodes)
    }  # fmt: skip
    assert cases_of(["no such word"]) == ()


def test_a_shape_that_was_read_has_its_name() -> None:
    assert shape_name({"heads": "8", "kv_heads": "1", "head": "128"}) == "llama-70b-tp8"
    assert shape_name({"heads": "6", "kv_heads": "2", "head": "80"}) == "6/2/80"

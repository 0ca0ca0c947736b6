"""Attention layers on NPUs call the library for decodes and prefills apart, always over the cache.

vllm-ascend and the libraries are fakes: this proves what a call is given, not what an NPU makes of it.
"""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.ascend import fake_vllm_ascend
from vllm_batch_invariant.ascend.integration import library as ascend_library
from vllm_batch_invariant.errors import NotCovered

HEADS, SIZE = 2, 16


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    fake_vllm_ascend.install(monkeypatch)
    return importlib.import_module("vllm_batch_invariant.ascend.integration.attention")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """What the libraries were called with."""
    seen: list[dict] = []

    def ascendc(**arguments: object) -> tuple[torch.Tensor, None]:
        seen.append(arguments)
        return arguments["query"] + 1, None

    def flash(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, **arguments: object) -> torch.Tensor:
        seen.append({"query": query, "key": keys, **arguments})
        return query + 1

    package = ModuleType("flash_attn_npu_v3")
    package.flash_attn_with_kvcache = flash
    monkeypatch.setitem(sys.modules, "flash_attn_npu_v3", package)
    monkeypatch.setitem(sys.modules, "batch_invariant_ops", ModuleType("batch_invariant_ops"))
    operators = SimpleNamespace(npu_fused_infer_attention_score_batch_invariant=ascendc)
    monkeypatch.setattr(torch.ops, "batch_invariant_ops", operators, raising=False)
    return seen


def step(decodes: list[int], prefills: list[int]) -> SimpleNamespace:
    """A step of decodes with so many keys each and of whole prompts of those lengths."""
    rows = [1] * len(decodes) + prefills
    ends = torch.tensor(rows).cumsum(0).tolist()
    requests = len(rows)
    return SimpleNamespace(
        actual_seq_lengths_q=ends,
        attn_mask="mask",
        block_tables=torch.arange(requests).view(-1, 1),
        num_decodes=len(decodes),
        num_decode_tokens=len(decodes),
        seq_lens_list=decodes + prefills,
    )


def run(layer: object, metadata: SimpleNamespace) -> torch.Tensor:
    rows = metadata.actual_seq_lengths_q[-1]
    query = torch.arange(float(rows)).view(-1, 1, 1).expand(rows, HEADS, SIZE)
    return layer.forward_impl(query, query, query, None, metadata, torch.full((rows, HEADS, SIZE), torch.nan))


@pytest.mark.parametrize("name", ["AscendCAttention", "FlashAttention3"])
def test_a_prefill_is_given_the_same_with_decodes_beside_it_as_alone(
    module: ModuleType, calls: list[dict], name: str
) -> None:
    layer = getattr(module, name)(HEADS, SIZE, SIZE**-0.5)
    run(layer, step([], [5]))
    [alone] = calls
    calls.clear()
    out = run(layer, step([7, 9], [5]))
    decode, prefill = calls
    assert torch.equal(out, torch.arange(7.0).view(-1, 1, 1).expand(7, HEADS, SIZE) + 1)
    assert len(decode["query"]) == 2
    table = "block_table" if name == "AscendCAttention" else "page_table"
    assert decode[table].tolist() == [[0], [1]]
    assert prefill[table].tolist() == [[2]]
    for key, value in alone.items():
        if key not in ("query", table):
            same = torch.equal(prefill[key], value) if isinstance(value, torch.Tensor) else prefill[key] == value
            assert same, key


def test_ascendc_reads_the_pages_and_counts_rows_from_each_part(module: ModuleType, calls: list[dict]) -> None:
    layer = module.AscendCAttention(HEADS, SIZE, 0.25)
    run(layer, step([7, 9], [5, 3]))
    decode, prefill = calls
    assert decode["actual_seq_lengths"] == [1, 2]
    assert decode["actual_seq_lengths_kv"] == [7, 9]
    assert prefill["actual_seq_lengths"] == [5, 8]
    assert prefill["actual_seq_lengths_kv"] == [5, 3]
    for call in calls:
        assert call["key"].shape == (9, 4, HEADS * SIZE)
        assert (call["scale"], call["sparse_mode"], call["input_layout"]) == (0.25, 3, "TND")


def test_flash_attention_has_one_split(module: ModuleType, calls: list[dict]) -> None:
    run(module.FlashAttention3(HEADS, SIZE, 0.5), step([7], [5, 3]))
    decode, prefill = calls
    assert [call["num_splits"] for call in calls] == [1, 1]
    assert [call["softmax_scale"] for call in calls] == [0.5, 0.5]
    assert decode["cu_seqlens_q"].tolist() == [0, 1]
    assert prefill["cu_seqlens_q"].tolist() == [0, 5, 8]
    assert prefill["cache_seqlens"].tolist() == [5, 3]
    assert (decode["causal"], prefill["causal"], prefill["max_seqlen_q"]) == (False, True, 5)


@pytest.mark.parametrize(
    ("option", "line"),
    [
        ({"sinks": torch.zeros(2)}, "attention sinks on an NPU"),
        ({"alibi_slopes": [0.5]}, "ALiBi on an NPU"),
        ({"logits_soft_cap": 30.0}, "soft-capped attention logits on an NPU"),
        ({"kv_sharing_target_layer_name": "layer"}, "layers that share a KV cache on an NPU"),
        ({"attn_type": "encoder_only"}, "encoder_only attention"),
        ({"sliding_window": 128}, "a sliding window with flash_attn_npu_v3"),
    ],
)
def test_what_a_layer_may_ask_for_and_no_kernel_has_is_refused(
    module: ModuleType, calls: list[dict], option: dict, line: str
) -> None:
    with pytest.raises(NotCovered, match=line):
        module.FlashAttention3(HEADS, SIZE, 0.25, **option)


def test_another_package_of_the_library_s_name_is_refused(
    module: ModuleType, calls: list[dict], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.ops, "batch_invariant_ops", SimpleNamespace())
    with pytest.raises(NotCovered, match="it has no npu_fused_infer_attention_score_batch_invariant; install"):
        module.AscendCAttention(HEADS, SIZE, 0.25)


@pytest.mark.parametrize("library", ascend_library.LIBRARIES)
def test_the_backend_takes_the_library_that_is_there(
    module: ModuleType, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ascend_library, "find_spec", lambda name: name if name == library else None)
    assert module.Backend.get_impl_cls() is module.IMPLEMENTATIONS[library]
    assert module.Backend.supports_batch_invariance()
    assert module.Backend.get_name() == "CUSTOM"

"""What an attention layer of vLLM hands to the operation."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ops.attention.cases import Chunk, Heads, Request, attend, by_tokens, call_of, exact, paged
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.layers.attention import FixedSplitAttention, Metadata, MetadataBuilder
from vllm_batch_invariant.integration.layers.attention_cpu import CpuFixedSplitAttention
from vllm_batch_invariant.integration.reviews import patch_points
from vllm_batch_invariant.ops.attention import PagedAttention, PagedCache
from vllm_batch_invariant.ops.attention import attend as attend_call
from vllm_batch_invariant.ops.attention.certificate import _by_kind
from vllm_batch_invariant.verify.check.operations import certify

HEADS = Heads(4, 2, 64)
SINKS = torch.tensor([-1.0, 0.5, 3.0, 6.0])
OPTIONS = {"sliding_window": 30, "logits_soft_cap": 2.0, "alibi_slopes": [0.5, 0.25, 0.0, 0.125]}


def layer(sinks: torch.Tensor | None, **options: object) -> FixedSplitAttention:
    return FixedSplitAttention(4, 64, 64**-0.5, 2, sinks=sinks, **options)


def rows(layer: FixedSplitAttention, chunks: list[Chunk]) -> torch.Tensor:
    query, keys, values, table, lengths, starts = paged(chunks)
    batch = Metadata(len(query), starts, lengths, table)
    out = torch.full_like(query, torch.nan)
    return layer.forward(SimpleNamespace(), query, None, None, torch.cat([keys, values], -1), batch, out)


@pytest.mark.parametrize("options", [{}, OPTIONS], ids=["plain", "every option"])
def test_a_layer_with_sinks_computes_attention_with_sinks(options: dict[str, object]) -> None:
    chunks = [Chunk(Request(HEADS, 300, 1), 290, 300), Chunk(Request(HEADS, 9, 2), 0, 9)]
    named = options | ({"alibi_slopes": torch.tensor(options["alibi_slopes"])} if options else {})
    got = rows(layer(SINKS, **options), chunks)
    assert torch.equal(got, torch.cat(attend(chunks, sinks=SINKS, **named)))
    torch.testing.assert_close(got.double(), exact(chunks, sinks=SINKS, **named), rtol=2e-6, atol=4e-6)
    assert not torch.equal(got, rows(layer(None, **options), chunks)), "the negative control"


def test_sinks_are_read_at_each_step_because_weights_come_after_layers() -> None:
    chunks = [Chunk(Request(HEADS, 20, 1), 0, 20)]
    parameter = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    loaded = layer(parameter)
    before = rows(loaded, chunks)
    parameter.data.copy_(SINKS)
    assert torch.equal(rows(loaded, chunks), torch.cat(attend(chunks, sinks=SINKS)))
    assert not torch.equal(rows(loaded, chunks), before)


def test_layers_of_a_step_share_a_plan_where_they_ask_alike_and_none_else() -> None:
    chunks = [Chunk(Request(HEADS, 300, 1), 290, 300), Chunk(Request(HEADS, 9, 2), 0, 9)]

    def run(plans: dict[Any, Any], chunks: list[Chunk], **options: Any) -> torch.Tensor:
        query, keys, values, table, lengths, starts = paged(chunks)
        batch, out = Metadata(len(query), starts, lengths, table, plans), torch.full_like(query, torch.nan)
        one = CpuFixedSplitAttention(4, 64, 64**-0.5, 2, **options)
        return one.forward(SimpleNamespace(), query, None, None, torch.cat([keys, values], -1), batch, out)

    plans: dict[Any, Any] = {}
    for options in ({}, {"sliding_window": 30}, {}):
        assert torch.equal(run(plans, chunks, **options), torch.cat(attend(chunks, **options)))
    assert len(plans) == 2
    other = [Chunk(Request(HEADS, 20, 1), 1, 20)]
    assert not torch.equal(run(plans, other), torch.cat(attend(other))), "the negative control: another step's plan"


def of_drafter(monkeypatch: pytest.MonkeyPatch, **options: Any) -> CpuFixedSplitAttention:
    """A layer that vLLM makes of a draft model whose tokens see each other."""
    config = SimpleNamespace(attention_config=SimpleNamespace(use_non_causal=True))
    with monkeypatch.context() as patch:
        patch.setattr(patch_points, "CURRENT_CONFIG", SimpleNamespace(get=lambda: lambda: config))
        return CpuFixedSplitAttention(4, 64, 64**-0.5, 2, **options)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 30}], ids=str)
def test_tokens_of_a_block_see_each_other_and_all_keys_before_them(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [Chunk(Request(HEADS, 300, 1), 290, 300), Chunk(Request(HEADS, 9, 2), 0, 9)]
    query, keys, values, table, lengths, starts = paged(chunks)
    batch = Metadata(len(query), starts, lengths, table, causal=False)
    out = torch.full_like(query, torch.nan)
    one = of_drafter(monkeypatch, **options)
    got = one.forward(SimpleNamespace(), query, None, None, torch.cat([keys, values], -1), batch, out)
    assert one.is_of_block
    torch.testing.assert_close(got.double(), exact(chunks, causal=False, **options), rtol=2e-6, atol=4e-6)
    assert not torch.equal(got, torch.cat(attend(chunks, **options))), "the negative control: no key after a token"


def test_steps_of_a_model_and_of_its_drafter_are_refused_for_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = [Chunk(Request(HEADS, 9, 2), 0, 9)]
    query, keys, values, table, lengths, starts = paged(chunks)
    drafter, model = of_drafter(monkeypatch), CpuFixedSplitAttention(4, 64, 64**-0.5, 2)
    for one, causal in ((drafter, True), (model, False)):
        batch = Metadata(len(query), starts, lengths, table, causal=causal)
        with pytest.raises(NotCovered, match="attention that is not causal over a KV cache"):
            one.forward(SimpleNamespace(), query, None, None, torch.cat([keys, values], -1), batch, query.clone())


@pytest.mark.parametrize("has_drafter", [True, False])
def test_a_step_that_is_not_causal_is_made_beside_layers_of_a_drafter_alone(
    has_drafter: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"model": SimpleNamespace(impl=CpuFixedSplitAttention(4, 64, 64**-0.5, 2))}
    if has_drafter:
        layers["drafter"] = SimpleNamespace(impl=of_drafter(monkeypatch))
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    builder = MetadataBuilder(SimpleNamespace(), [*layers], config, torch.device("cpu"))
    step = SimpleNamespace(
        causal=False, num_actual_tokens=4, query_start_loc=torch.tensor([0, 4]), seq_lens=torch.tensor([9]),
        block_table_tensor=torch.zeros(1, 1),
    )  # fmt: skip
    if not has_drafter:
        with pytest.raises(NotCovered, match="attention that is not causal over a KV cache"):
            builder.build(0, step)
        return
    assert builder.build(0, step).causal is False
    step.causal = torch.tensor([True])
    with pytest.raises(NotCovered, match="attention that is not causal over a KV cache"):
        builder.build(0, step)


def held(k_scale: float | list[float], v_scale: float | list[float]) -> SimpleNamespace:
    return SimpleNamespace(_k_scale=torch.tensor(k_scale), _v_scale=torch.tensor(v_scale).view(-1))


@pytest.mark.parametrize("scales", [(0.5, 4.0), ([0.5, 2.0], [4.0, 0.25])], ids=["of all", "of heads"])
def test_a_cache_in_fp8_is_written_and_read_by_the_scales_of_its_layer(scales: tuple[Any, Any]) -> None:
    """And queries are not quantised: with powers of two it has the bits of the numbers of its codes."""
    heads = Heads(4, 2, 64, torch.bfloat16)
    request = Request(heads, 40, 1)
    coded, holder = layer(None, kv_cache_dtype="fp8"), held(*scales)
    assert not coded.supports_quant_query_input
    cache = torch.zeros(4, 2, 16, 128, dtype=torch.uint8)
    slots = torch.arange(16, 56)
    coded.do_kv_cache_update(holder, request.key, request.value, cache, slots)
    rounded = Request(heads, 40, 1)
    for name, scale in zip(("key", "value"), scales, strict=True):
        of_heads = torch.tensor(scale).view(-1, 1)
        codes = (getattr(request, name).float() / of_heads).to(torch.float8_e4m3fn)
        setattr(rounded, name, (codes.float() * of_heads).bfloat16())
    batch = Metadata(40, torch.tensor([0, 40]), torch.tensor([40]), torch.tensor([[1, 2, 3]]))
    got = coded.forward(holder, request.query, None, None, cache, batch, torch.empty_like(request.query))
    assert torch.equal(got, attend([Chunk(rounded, 0, 40)])[0])
    assert not torch.equal(got, attend([Chunk(request, 0, 40)])[0]), "the negative control"


def test_a_cache_with_a_scale_a_token_and_head_is_written_beside_it_and_read() -> None:
    request = Request(Heads(4, 2, 64, torch.bfloat16), 40, 1)
    coded, holder = layer(None, kv_cache_dtype="fp8_per_token_head"), SimpleNamespace()
    assert coded.scales_of(holder) == (None, None)
    cache, slots = torch.zeros(4, 2, 16, 2 * (64 + 4), dtype=torch.uint8), torch.arange(16, 56)
    coded.do_kv_cache_update(holder, request.key, request.value, cache, slots)
    batch = Metadata(40, torch.tensor([0, 40]), torch.tensor([40]), torch.tensor([[1, 2, 3]]))
    got = coded.forward(holder, request.query, None, None, cache, batch, torch.empty_like(request.query))
    call = call_of(paged([Chunk(request, 0, 40)]), FixedSplitAttention.reduction, scale=64**-0.5)
    assert torch.equal(got, attend_call(replace(call, cache=by_tokens(call.cache))))
    assert not torch.equal(got, attend([Chunk(request, 0, 40)])[0]), "the negative control"


def test_scales_that_weights_bring_go_where_a_graph_reads_them() -> None:
    for k_scale, later, v_scale in ((0.5, [0.25], [4.0]), ([0.5, 2.0], [0.25, 8.0], [4.0, 1.0])):
        coded, holder = layer(None, kv_cache_dtype="fp8"), held(k_scale, v_scale)
        first = coded.scales_of(holder)
        holder._k_scale = torch.tensor(later)
        again = coded.scales_of(holder)
        assert [one.data_ptr() for one in again] == [one.data_ptr() for one in first]
        assert [one.view(-1).tolist() for one in again] == [later, v_scale]
        assert holder._k_scale is first[0]
        assert layer(None).scales_of(holder) == (None, None)


@pytest.mark.parametrize(
    "dtype", ["fp8_e5m2", "int4_per_token_head", "int8_per_token_head", "nvfp4", "turboquant_k8v4"]
)
def test_a_cache_in_another_format_is_refused_by_its_name(dtype: str) -> None:
    with pytest.raises(NotCovered, match=f"a KV cache in {dtype}"):
        layer(None, kv_cache_dtype=dtype)


def test_a_start_compares_layers_with_sinks_as_a_kind_of_their_own() -> None:
    kinds = {layer(sinks, **options).spec for sinks in (None, SINKS, 2 * SINKS) for options in ({}, OPTIONS)}
    assert len(kinds) == len(_by_kind(tuple(kinds))) == 4
    assert str(layer(SINKS, sliding_window=30).spec) == "window 30, sinks"


def test_a_start_tells_layers_of_other_slopes_apart() -> None:
    layers = [layer(None, alibi_slopes=slopes).spec for slopes in ([0.5] * 4, [0.5, 0.5, 0.5, 0.25])]
    assert len(set(layers)) == len(_by_kind(layers)) == 2
    assert all(one.startswith("ALiBi ") for one in _by_kind(layers))


class Model(torch.nn.Module):
    """With attention layers in an engine: of pages of 16 keys."""

    def __init__(self, *layers: FixedSplitAttention) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        for index, one in enumerate(layers):
            held = torch.nn.Module()
            held.impl, held.kv_cache = one, torch.zeros(2, 2, 16, 128)
            self.add_module(str(index), held)


ALL = OPTIONS | {"sinks": SINKS}
SLIPS = {
    "sinks": lambda call: call.spec.sinks is not None,
    "a window": lambda call: call.spec.sliding_window == 30,
    "a soft-cap": lambda call: call.spec.logits_soft_cap == 2.0,
    "ALiBi": lambda call: call.spec.alibi_slopes is not None and call.spec.alibi_slopes[3] == 0.125,
    "a scale": lambda call: call.spec.scale == 64**-0.5,
    "a dtype": lambda call: call.query.dtype == torch.float32,
    "heads": lambda call: call.query.shape[1:] == (4, 64),
}
"""For which calls a kernel gives a row of a larger batch another bit."""


@pytest.mark.parametrize("slips", SLIPS)
def test_what_check_certifies_is_the_layer_with_all_that_decides_its_bits(
    slips: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(call: PagedAttention, *_: object) -> torch.Tensor:
        out = call.query.clone()
        if len(call.seq_lens) > 1 and SLIPS[slips](call):
            out = torch.nextafter(out, torch.tensor(torch.inf))
        return out

    monkeypatch.setattr("vllm_batch_invariant.ops.attention.attend", faulty)
    of_batch, of_chunks = certify(Model(layer(**ALL)), "attention", (1, 3))
    assert "at place " in of_batch.difference
    assert of_batch.compared > 0
    assert of_chunks.difference == "", "the fault is in batches alone"
    assert of_batch.shape == "4 query heads, 2 KV heads of 64, float32, window 30, soft-cap 2, ALiBi, sinks"


def test_check_certifies_every_kind_of_layer_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_batch_invariant.ops.attention.attend", lambda call, *_: call.query.clone())
    kinds = [{}, {"sliding_window": 30}, {"logits_soft_cap": 2.0}, {"alibi_slopes": [1.0] * 4}, {"sinks": SINKS}]
    layers = [layer(**({"sinks": None} | kind)) for kind in [*kinds, *kinds, {"sinks": 2 * SINKS}]]
    layers.append(FixedSplitAttention(4, 64, 0.25, 2))
    found = certify(Model(*layers), "attention", (1,))
    assert [one.guarantee for one in found] == ["batch", "schedule"] * (len(kinds) + 1)


SCALES = {
    ("fp8", 1): ((1,), ""),
    ("fp8", 2): ((2,), " with one scale a head"),
    ("fp8_per_token_head", 1): (None, " with one scale a token and head"),
}
"""Of a layer's cache and the scales that it is given: those that check gives one, and in words."""


@pytest.mark.parametrize(("cache", "given"), SCALES)
def test_check_certifies_a_cache_in_fp8_with_such_scales_as_its_layer_has(
    cache: str, given: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[PagedCache] = []

    def noting(call: PagedAttention, implementation: str) -> torch.Tensor:
        read.append(call.cache)
        return attend_call(call, implementation)

    monkeypatch.setattr("vllm_batch_invariant.ops.attention.attend", noting)
    shape, words = SCALES[cache, given]
    model = Model(layer(None, kv_cache_dtype=cache))
    vars(model.get_submodule("0"))["_k_scale"] = torch.ones(given)
    found = certify(model, "attention", (1, 3))
    heads = "4 query heads, 2 KV heads of 64, float32"
    assert [one.shape for one in found] == [f"{heads}, KV cache in e4m3{words}"] * 2
    assert all(one.compared > 0 and one.difference == "" and not one.untested for one in found)
    assert {one.k_scale.shape == (shape or one.keys.shape[:3]) for one in read} == {True}


def test_the_planner_is_told_that_a_layer_with_sinks_is_not_plain() -> None:
    assert not layer(None).spec.added
    assert layer(SINKS).spec.added == ("sinks",)


def test_a_layer_that_reads_the_cache_of_another_is_given_no_keys() -> None:
    """It has the bits of a layer with the same cache, and has nothing written."""
    chunks = [Chunk(Request(HEADS, 300, 1), 290, 300), Chunk(Request(HEADS, 9, 2), 0, 9)]
    sharing = layer(None, kv_sharing_target_layer_name="model.layers.0.self_attn.attn")
    assert torch.equal(rows(sharing, chunks), rows(layer(None), chunks))


def test_a_layer_that_reads_codes_of_another_reads_them_by_its_scales() -> None:
    """Also when new weights bring others. Its own are those of no checkpoint."""
    name = "model.layers.0.self_attn.attn"
    writer = SimpleNamespace(impl=layer(None, kv_cache_dtype="fp8"))
    writer._k_scale, writer._v_scale = torch.tensor(0.5), torch.tensor(2.0)
    reader = layer(None, kv_cache_dtype="fp8")
    own = SimpleNamespace(_k_scale=torch.tensor(1.0), _v_scale=torch.tensor(1.0), kv_sharing_target_layer_name=name)
    own.impl = reader
    layers = {name: writer, "own": own}
    config = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    MetadataBuilder(None, ["own"], config, torch.device("cpu"))
    held = reader.scales_of(own)
    assert [scale.item() for scale in held] == [0.5, 2.0]
    writer._k_scale = torch.tensor(0.25)
    assert reader.scales_of(own)[0] is held[0]
    assert held[0].item() == 0.25


@pytest.mark.parametrize("size", [48, 272, 496, 528])
def test_a_layer_with_heads_of_another_size_is_refused_by_its_name(size: int) -> None:
    assert FixedSplitAttention(4, 512, 1.0, 1).head_size == 512
    with pytest.raises(NotCovered, match=f"heads of size {size}: the kernels have sizes 64 to 256 in steps of 16, and"):
        FixedSplitAttention(4, size, 1.0, 1)

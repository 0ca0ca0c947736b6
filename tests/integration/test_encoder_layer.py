"""What an attention layer of an encoder hands to the operation, and which of them are refused."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.assertions import assert_same_bits
from tests.integration.test_layers import bare, named
from tests.ops.attention.cases import Heads, Request, packed
from vllm_batch_invariant.envs import ATTENTION
from vllm_batch_invariant.errors import NotCovered
from vllm_batch_invariant.integration.layers import attention_cpu, review
from vllm_batch_invariant.integration.layers.attention import ExactAttention, FixedSplitAttention, Metadata
from vllm_batch_invariant.ops.attention import PagedAttention
from vllm_batch_invariant.verify.check.operations import certify

pytest.importorskip("vllm")
POOLER = "vllm.model_executor.layers.pooler"
LENGTHS = (9, 300, 1)


def layer(size: int = 64, **options: Any) -> FixedSplitAttention:
    return attention_cpu.CpuFixedSplitAttention(4, size, size**-0.5, 2, attn_type="encoder_only", **options)


@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("size", [32, 64])
def test_a_layer_computes_attention_to_both_sides_of_the_steps_own_tokens(window: int | None, size: int) -> None:
    """Beside rows of padding, without a cache, from parts of one matrix."""
    asked = [Request(Heads(4, 2, size), length, length) for length in LENGTHS]
    expected = torch.cat(packed(asked, sliding_window=window))
    query, key, value = (torch.cat([getattr(one, name) for one in asked]) for name in ("query", "key", "value"))
    qkv = torch.cat([query, key, value], dim=1)
    rows = torch.cat([qkv, torch.full_like(qkv[:3], torch.nan)])
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    starts = torch.tensor([0, 9, 309, 310], dtype=torch.int32)
    batch = Metadata(sum(LENGTHS), starts, lengths, torch.zeros(3, 1, dtype=torch.int32))
    parts, out = rows.split([4, 2, 2], dim=1), torch.full_like(rows[:, :4], torch.nan)
    made, nothing = layer(size, sliding_window=window), torch.tensor([])
    made.do_kv_cache_update(SimpleNamespace(), parts[1], parts[2], nothing, torch.zeros(313))
    made.forward(SimpleNamespace(), *parts, nothing, batch, out)
    assert_same_bits(out[:310], expected)
    assert out[310:].isnan().all()


@pytest.mark.parametrize(("of_encoder", "causal", "refused"), [
    (True, False, False), (True, True, False), (False, True, False), (False, False, True),
    (True, torch.tensor([False]), True), (False, torch.tensor([True]), True),
])  # fmt: skip
def test_a_step_that_is_not_causal_is_taken_of_encoders_alone(of_encoder: bool, causal: Any, refused: bool) -> None:
    interface = "vllm.v1.kv_cache_interface."
    kind = named(interface + ("EncoderOnlyAttentionSpec" if of_encoder else "FullAttentionSpec"))
    spec = kind(block_size=16, num_kv_heads=2, head_size=64, dtype=torch.float32)
    config = SimpleNamespace(model_config=SimpleNamespace(), compilation_config=SimpleNamespace())
    builder = attention_cpu.Backend.get_builder_cls()(spec, [], config, torch.device("cpu"))
    starts = torch.tensor([0, 3])
    common = SimpleNamespace(
        causal=causal, num_actual_tokens=3, query_start_loc=starts, seq_lens=starts[1:], block_table_tensor=None
    )
    if refused:
        with pytest.raises(NotCovered, match="attention that is not causal over a KV cache"):
            builder.build(0, common)
    else:
        assert builder.build(0, common).num_actual_tokens == 3


def test_other_devices_and_arithmetics_refuse_encoders_and_a_cpu_other_kinds() -> None:
    assert attention_cpu.Backend.supports_attn_type("encoder_only")
    assert not attention_cpu.ExactBackend.supports_attn_type("encoder_only")
    for kind in (FixedSplitAttention, ExactAttention):
        with pytest.raises(NotCovered, match="encoder_only attention"):
            kind(4, 64, 0.125, 2, attn_type="encoder_only")
    for other in ("encoder", "encoder_decoder"):
        with pytest.raises(NotCovered, match=f"{other} attention"):
            attention_cpu.CpuFixedSplitAttention(4, 64, 0.125, 2, attn_type=other)
    with pytest.raises(NotCovered, match="an encoder with a KV cache in fp8"):
        layer(kv_cache_dtype="fp8")
    with pytest.raises(NotCovered, match="heads of size 16"):
        layer(16)
    with pytest.raises(NotCovered, match="heads of size 32"):
        attention_cpu.CpuFixedSplitAttention(4, 32, 0.125, 2)


def test_flex_attention_is_refused_when_the_layer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ATTENTION.name, "flex")
    with pytest.raises(NotCovered, match=f"an encoder with {ATTENTION.name}=flex"):
        layer()
    attention_cpu.CpuFixedSplitAttention(4, 64, 0.125, 2)


def test_an_encoders_layer_is_known_where_ours_serves_it() -> None:
    kind = named("vllm.model_executor.layers.attention.EncoderOnlyAttention")
    review.check(bare(kind, impl=layer(), head_size=64, head_size_v=64))
    with pytest.raises(NotCovered, match="its kernels are not ours"):
        review.check(bare(kind, impl=SimpleNamespace(), head_size=64))


@pytest.mark.parametrize("pooler", ["bert.BertPooler", "modernbert.ModernBertPooler"])
def test_a_function_of_a_known_pooler_may_call_its_layers_and_that_of_another_is_refused(pooler: str) -> None:
    kind = named(f"vllm.model_executor.models.{pooler}")
    head = named(f"{POOLER}.seqwise.heads.EmbeddingPoolerHead")

    def projector(x: torch.Tensor) -> torch.Tensor:
        return x

    strange = bare(head, projector=projector)
    with pytest.raises(NotCovered, match="its projector is a function"):
        review.check(torch.nn.ModuleList([strange]))
    projector.__module__, projector.__qualname__ = kind.__module__, f"{kind.__name__}.__init__.<locals>.<lambda>"
    review.check(torch.nn.ModuleList([strange]))


def test_check_certifies_an_encoders_layer_and_finds_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    model = torch.nn.Module()
    model.weight, model.layer = torch.nn.Parameter(torch.zeros(1)), bare(torch.nn.Module, impl=layer())
    of_batch, of_chunks = certify(model, "attention", (1, 3))
    assert (of_batch.difference, of_batch.untested) == ("", "")
    assert of_batch.compared == 4 * 64 * (37 + 530) * (1 + 3)
    assert of_batch.shape.endswith("keys of both directions")
    assert of_chunks.not_applicable

    def faulty(call: PagedAttention, *_: object) -> torch.Tensor:
        return call.query + (len(call.seq_lens) > 1)

    monkeypatch.setattr("vllm_batch_invariant.ops.attention.attend", faulty)
    assert "at place " in certify(model, "attention", (1, 3))[0].difference


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("models.bert.SPLADESparsePooler", "it is a Pooler of its own"),
        ("models.bert_with_rope.NomicMoE", "NomicMoE.forward calls .*fused_topk"),
        ("layers.pooler.special.BgeM3Pooler", "does not know it"),
    ],
)
def test_what_else_encoders_are_made_of_is_refused_by_name(kind: str, said: str) -> None:
    with pytest.raises(NotCovered, match=f"{kind.rpartition('.')[2]}.*{said}"):
        review.check(bare(named(f"vllm.model_executor.{kind}")))

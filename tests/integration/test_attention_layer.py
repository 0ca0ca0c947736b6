"""What an attention layer of vLLM hands to the operation."""

from types import SimpleNamespace

import pytest
import torch

from tests.ops.attention.cases import Chunk, Heads, Request, attend, exact, paged
from vllm_batch_invariant.integration import attention as integration
from vllm_batch_invariant.integration.attention import FixedSplitAttention, Metadata
from vllm_batch_invariant.ops.attention.certificate import Options

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


def test_a_start_compares_layers_with_sinks_as_a_kind_of_their_own() -> None:
    kinds = {Options.of(layer(sinks, **options)) for sinks in (None, SINKS, 2 * SINKS) for options in ({}, OPTIONS)}
    assert len(kinds) == 4
    assert str(Options.of(layer(SINKS, sliding_window=30))) == "window 30, sinks"


def test_the_planner_is_told_that_a_layer_with_sinks_is_not_plain() -> None:
    from vllm_batch_invariant.ops.attention.sm90 import is_plain

    assert is_plain(layer(None))
    assert not is_plain(layer(SINKS))


def test_a_layer_that_shares_a_cache_is_still_refused() -> None:
    with pytest.raises(integration.NotCovered, match="share a KV cache"):
        layer(SINKS, kv_sharing_target_layer_name="other")
